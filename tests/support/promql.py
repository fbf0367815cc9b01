"""Reads which series and labels a PromQL expression names; ValueError if it cannot be read.

It is stricter than Prometheus: an unknown function is an error too, as a misspelt one would be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_TOKEN: Final = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<range>\[[^\]]*\])
    | (?P<number>0x[0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?:ms|[smhdwy])?)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},@])
    """,
    re.VERBOSE,
)
_RANGE: Final = re.compile(r"\[(\$__\w+|(\d+(ms|[smhdwy]))+)\]")
_GROUPING: Final = ("by", "without", "on", "ignoring", "group_left", "group_right")
_OPERATORS: Final = ("and", "or", "unless", "bool", "offset", "inf", "nan")
_FUNCTIONS: Final = (
    *("sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile"),
    *("rate", "irate", "increase", "delta", "changes", "resets", "predict_linear", "absent"),
    *("histogram_quantile", "min_over_time", "max_over_time", "avg_over_time", "clamp_min"),
    *("label_replace", "scalar", "vector", "time", "abs", "ceil", "floor", "round"),
)


@dataclass(frozen=True)
class Selector:
    """A series as an expression selects it; `matchers` are (label, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


@dataclass
class Expression:
    """What an expression names."""

    selectors: list[Selector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)  # by which it groups or joins


Token = tuple[str, str]  # kind and text


def read_expression(text: str) -> Expression:
    tokens, found = list(_tokens(text)), Expression()
    at = 0
    while at < len(tokens):
        kind, word = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind != "name" or word in _OPERATORS:
            at += 1
        elif word in _GROUPING:
            labels, at = _read_labels(tokens, at + 1)
            found.labels.update(labels)
        elif following == "(" or following in _GROUPING:
            if word not in _FUNCTIONS:
                raise ValueError(f"{word} is no function that is known here")
            at += 1
        else:
            matchers, at = _read_matchers(tokens, at + 1)
            found.selectors.append(Selector(word, matchers))
    return found


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None or token.lastgroup is None:
            raise ValueError(f"cannot be read from here on: {text[at : at + 20]!r}")
        if token.lastgroup == "range" and not _RANGE.fullmatch(token[0]):
            raise ValueError(f"{token[0]} is no range")
        if token.lastgroup != "space":
            yield token.lastgroup, token[0]
        at = token.end()


def _read_labels(tokens: list[Token], at: int) -> tuple[list[str], int]:
    """`(a, b)`: the labels, and where it goes on."""
    end = tokens.index(("sign", ")"), at)
    inner = tokens[at:end]
    if not inner or inner[0] != ("sign", "("):
        raise ValueError("labels stand in parentheses")
    kinds = "".join({"name": "n", "sign": "s"}.get(kind, "?") for kind, _ in inner[1:])
    if not re.fullmatch(r"(n(sn)*)?", kinds):
        raise ValueError("labels stand one after the other, with commas")
    return [word for kind, word in inner if kind == "name"], end + 1


def _read_matchers(tokens: list[Token], at: int) -> tuple[tuple[tuple[str, str, str], ...], int]:
    """`{a="b", c=~"d"}`, or nothing: the matchers, and where it goes on."""
    if at >= len(tokens) or tokens[at] != ("sign", "{"):
        return (), at
    end = tokens.index(("sign", "}"), at)
    inner = [word for _, word in tokens[at + 1 : end]]
    found = []
    for begin in range(0, len(inner), 4):
        label, operator, value, *comma = inner[begin : begin + 4]
        if operator not in ("=", "!=", "=~", "!~") or comma not in ([], [","]):
            raise ValueError(f"{label}{operator}{value} is no matcher")
        found.append((label, operator, value[1:-1]))
    return tuple(found), end + 1
