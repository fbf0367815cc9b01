"""The names of points, as users write them: parsed, checked and put in path order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import total_ordering
from typing import Final, Literal, get_args

from clairai.errors import PointError, quote

PointKind = Literal["pre_attn", "post_attn", "post_block"]
POINT_KINDS: Final[tuple[PointKind, ...]] = get_args(
    PointKind
)  # in the order the residual meets them
MAX_LAYER: Final = 99_999

_ALIASES: Final = (
    ("resid_pre", "pre_attn"),
    ("resid_mid", "post_attn"),
    ("resid_post", "post_block"),
)
_SYNTAX: Final = (
    f"write KIND.LAYER with KIND one of {', '.join(POINT_KINDS)} "
    f"(or {', '.join(alias for alias, _ in _ALIASES)}), such as post_block.15"
)
# One spelling for each layer: no sign, no leading zero, no digits outside ASCII.
_LAYER: Final = r"(?:0|[1-9][0-9]{0,4})"
_POINT: Final = re.compile(rf"([a-z_]{{1,16}})\.({_LAYER})")
_PART: Final = re.compile(rf"({_LAYER})(?:-({_LAYER}))?")


@total_ordering
@dataclass(frozen=True, slots=True)
class Point:
    """A named place in the residual stream; sorts by layer, then along the block."""

    kind: PointKind
    layer: int

    def __post_init__(self) -> None:
        if self.kind not in POINT_KINDS:
            raise PointError(f"{quote(self.kind)} is not a kind of tap point; {_SYNTAX}")
        if type(self.layer) is not int or not 0 <= self.layer <= MAX_LAYER:
            raise PointError(
                f"layer {quote(self.layer)} is not a whole number of 0..{MAX_LAYER}; "
                "count layers from 0 at the input"
            )

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read one name or alias, such as `post_block.15` or `resid_post.15`."""
        matched = _POINT.fullmatch(text) if isinstance(text, str) else None
        if matched is None:
            raise PointError(f"{quote(text)} is not a tap point; {_SYNTAX}")
        return cls(_parse_kind(matched[1]), int(matched[2]))

    def __str__(self) -> str:
        return f"{self.kind}.{self.layer}"

    def __lt__(self, other: Point) -> bool:
        return self._path_order() < other._path_order()

    def _path_order(self) -> tuple[int, int]:
        return self.layer, POINT_KINDS.index(self.kind)


def expand(patterns: Sequence[str], num_layers: int) -> tuple[Point, ...]:
    """Every point that the patterns name in a model of `num_layers`, sorted, without duplicates.

    A pattern is `all`, or KIND.LAYERS with LAYERS as `*`, `15`, `0-3` or `0,5,9-11`.
    """
    if num_layers < 1:
        raise PointError(f"the model has {num_layers} layers; at least 1 is needed to tap it")
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed:
        raise PointError("no tap points were given; list at least one, such as post_block.15")
    return tuple(sorted({point for text in listed for point in _expand_pattern(text, num_layers)}))


def _expand_pattern(pattern: str, num_layers: int) -> Iterator[Point]:
    if pattern == "all":
        return (Point(kind, layer) for layer in range(num_layers) for kind in POINT_KINDS)
    if not isinstance(pattern, str):
        raise PointError(f"{quote(pattern)} is not the name of a tap point; {_SYNTAX}")
    name, dot, layers = pattern.partition(".")
    if not dot:
        raise PointError(f"{quote(pattern)} is not a tap point; {_SYNTAX}, or all")
    kind = _parse_kind(name)
    return (Point(kind, layer) for layer in _parse_layers(layers, pattern, num_layers))


def _parse_layers(text: str, pattern: str, num_layers: int) -> list[int]:
    if text == "*":
        return list(range(num_layers))
    layers: set[int] = set()
    for part in text.split(","):
        first, last = _parse_bounds(part, pattern)
        if last >= num_layers:
            raise PointError(
                f"{quote(pattern)} names layer {last}, and this model has {num_layers} layers: "
                f"0..{num_layers - 1}; name one of those"
            )
        layers.update(range(first, last + 1))
    return sorted(layers)


def _parse_bounds(part: str, pattern: str) -> tuple[int, int]:
    matched = _PART.fullmatch(part)
    if matched is None:
        raise PointError(
            f"{quote(pattern)} has {quote(part)} where layers belong; write *, 15, 0-3 or 0,5,9"
        )
    first, last = int(matched[1]), int(matched[2] or matched[1])
    if last < first:
        raise PointError(f"{quote(pattern)} counts down; write the range as {last}-{first}")
    return first, last


def _parse_kind(name: str) -> PointKind:
    kind = dict(_ALIASES).get(name, name)
    if kind not in POINT_KINDS:
        raise PointError(f"{quote(name)} is not a kind of tap point; {_SYNTAX}")
    return kind
