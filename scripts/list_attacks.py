"""Writes docs/attacks.md: every numbered attempt on the system, from the marks of the tests.

`python -m scripts.list_attacks` writes the page; `tests/docs/test_attacks.py` fails if it is old.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "attacks.md"
_MARK: Final = "attack"
_HEAD: Final = """# Attempts on the system

Each line is a test that tries something hostile and says what must happen. `make test` runs all of
them. [SECURITY.md](../SECURITY.md) has the threat model and the bounds.

| attempt | what happens | test |
|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Attack:
    number: int
    sentence: str
    path: str

    def line(self) -> str:
        return f"| {self.number} | {self.sentence} | `{self.path}` |"


def find_attacks(root: Path = ROOT) -> list[Attack]:
    """All marked tests, by number; ValueError if a number occurs twice."""
    found = sorted(
        attack for path in (root / "tests").rglob("test_*.py") for attack in _read(path, root)
    )
    numbers = [attack.number for attack in found]
    twice = {number for number in numbers if numbers.count(number) > 1}
    if twice:
        raise ValueError(f"attempts with the same number: {sorted(twice)}")
    return found


def render(attacks: list[Attack]) -> str:
    return _HEAD + "\n".join(attack.line() for attack in attacks) + "\n"


def _read(path: Path, root: Path) -> Iterator[Attack]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            sentence = node.name.removeprefix("test_").replace("_", " ")
            for number in _numbers(node.decorator_list):
                yield Attack(number, sentence, str(path.relative_to(root)))


def _numbers(decorators: list[ast.expr]) -> Iterator[int]:
    """The numbers of `@pytest.mark.attack(7)`."""
    for node in decorators:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == _MARK:
            yield from (int(ast.literal_eval(argument)) for argument in node.args)


if __name__ == "__main__":
    PAGE.write_text(render(find_attacks()))
