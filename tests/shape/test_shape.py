"""The code's own shape: sizes, names and habits, each rule shown able to fail."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable
from functools import partial

import pytest

from tests.shape import rules
from tests.shape.source import Module, everything, functions, package

MAX_FUNCTION_LINES, P90_FUNCTION_LINES, MEDIAN_FUNCTION_LINES = 50, 25, 8
MAX_NESTING = 3

Rule = Callable[[ast.Module], list[str]]


def broken(rule: Rule, modules: tuple[Module, ...]) -> list[str]:
    return [f"{module.name}: {fault}" for module in modules for fault in rule(module.tree)]


def test_no_function_is_longer_than_50_lines() -> None:
    rule = partial(rules.long_functions, limit=MAX_FUNCTION_LINES)
    assert broken(rule, package()) == []


def test_most_functions_fit_on_half_a_screen(
    record_property: Callable[[str, object], None],
) -> None:
    lengths = [rules.num_lines(node) for module in package() for node in functions(module.tree)]
    p90 = statistics.quantiles(lengths, n=10)[-1]
    record_property(
        "function_lines_median_p90_max", (statistics.median(lengths), p90, max(lengths))
    )
    assert p90 <= P90_FUNCTION_LINES
    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES


def test_no_function_is_nested_more_than_three_deep() -> None:
    rule = partial(rules.deep_functions, limit=MAX_NESTING)
    assert broken(rule, everything()) == []


def test_no_error_is_swallowed() -> None:
    assert broken(rules.swallowed_errors, everything()) == []


def test_no_module_holds_state_that_anybody_can_change() -> None:
    assert broken(rules.mutable_globals, package()) == []


def test_nothing_is_put_off_in_a_comment() -> None:
    assert [f"{m.name}: {line}" for m in everything() for line in rules.promises(m.text)] == []


def test_every_module_begins_with_what_it_is_for() -> None:
    silent = [m.name for m in everything() if m.text and not ast.get_docstring(m.tree)]
    assert silent == []


def test_names_are_nouns_of_this_domain() -> None:
    vague = [f"{m.name}: {name}" for m in everything() for name in rules.vague_names("", m.tree)]
    assert vague == []
    assert [m.name for m in everything() if rules.vague_names(m.name, ast.Module([], []))] == []


def test_every_test_reads_as_a_sentence() -> None:
    short = [
        f"{module.name}: {node.name}"
        for module in everything()
        if module.name.startswith("tests/")
        for node in functions(module.tree)
        if node.name.startswith("test_") and node.name.count("_") < 3
    ]
    assert short == []


LONG = "def f():\n" + "    x = 1\n" * 50
DEEP = """
def f(x):
    for a in x:
        with a:
            if a:
                while a:
                    pass
"""
PLANTED: list[tuple[Rule, str, int]] = [
    (partial(rules.long_functions, limit=50), LONG, 1),
    (partial(rules.long_functions, limit=50), LONG.replace("    x = 1\n", "", 1), 0),
    (partial(rules.deep_functions, limit=3), DEEP, 1),
    (partial(rules.deep_functions, limit=3), "async " + DEEP.strip(), 1),
    (partial(rules.deep_functions, limit=3), f"class A:{DEEP}".replace("\n", "\n  "), 1),
    (partial(rules.deep_functions, limit=4), DEEP, 0),
    (
        partial(rules.deep_functions, limit=1),
        "def f(x):\n  if x: pass\n  elif x: pass\n  elif x: pass\n  else: pass",
        0,
    ),
    (
        partial(rules.deep_functions, limit=1),
        "def f(x):\n  try: pass\n  except OSError:\n    if x: pass",
        1,
    ),
    (rules.swallowed_errors, "try: f()\nexcept: raise", 1),
    (rules.swallowed_errors, "try: f()\nexcept Exception: pass", 1),
    (rules.swallowed_errors, "try: f()\nexcept BaseException as e: ...", 1),
    (rules.swallowed_errors, "for x in y:\n  try: f()\n  except (OSError, Exception): continue", 1),
    (rules.swallowed_errors, "with contextlib.suppress(Exception): f()", 1),
    (rules.swallowed_errors, "try: f()\nexcept Exception as e: log(e)", 0),
    (rules.swallowed_errors, "try: f()\nexcept OSError: pass", 0),
    (rules.mutable_globals, "A = {}", 1),
    (rules.mutable_globals, "A = B = [1]", 2),
    (rules.mutable_globals, "A: dict[str, int] = {1: 2}", 1),
    (rules.mutable_globals, "A = {x for x in y}", 1),
    (rules.mutable_globals, "A = collections.OrderedDict()", 1),
    (rules.mutable_globals, "def f():\n  global A", 1),
    (rules.mutable_globals, "A: Final = {}\nB: Final[list[int]] = []\n__all__ = []", 0),
    (rules.mutable_globals, "A = (1, 2)\ndef f():\n  a = []", 0),
    (partial(rules.vague_names, "x"), "class RingManager: pass", 1),
    (partial(rules.vague_names, "x"), "def f(helper): pass", 1),
    (partial(rules.vague_names, "x"), "io_utils = 3", 1),
    (partial(rules.vague_names, "src/clairai/util.py"), "", 1),
    (partial(rules.vague_names, "x"), "utilisation = managed = 3", 0),
]


@pytest.mark.parametrize(("rule", "text", "expected"), PLANTED)
def test_a_broken_rule_is_found(rule: Rule, text: str, expected: int) -> None:
    assert len(rule(ast.parse(text))) == expected


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "HACK"])
def test_a_promise_is_found_in_a_comment_and_only_there(word: str) -> None:
    assert len(rules.promises(f"a = 1\n# {word}: later\n")) == 1
    assert rules.promises(f'a = "{word}"\n') == []
