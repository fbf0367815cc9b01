"""The repository's Python files, parsed, and which modules import which."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "clairai"
FOLDERS: Final = ("src", "tests", "scripts", "bench", "examples")


@dataclass(frozen=True)
class Module:
    """One file: its dotted name below `clairai` ("" for the package itself), and its text."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.text)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def package() -> tuple[Module, ...]:
    """Every module of clairai."""
    return tuple(
        Module(_dotted(file.relative_to(PACKAGE)), file.read_text())
        for file in sorted(PACKAGE.rglob("*.py"))
    )


@cache
def everything() -> tuple[Module, ...]:
    """Every Python file of the repository, by its path."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Module(str(file.relative_to(ROOT)), file.read_text()) for file in files)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: Module, known: frozenset[str]) -> set[str]:
    """Dotted names of everything that it imports, in functions and under TYPE_CHECKING too.

    `from clairai.wire import x` is an import of clairai.wire.x where `known` has such a module.
    """
    found: set[str] = set()
    for node in ast.walk(module.tree):
        found.update(_imported(node, known))
    return found


def _imported(node: ast.AST, known: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = "." * node.level + (node.module or "")
        for alias in node.names:
            inner = f"{origin}.{alias.name}"
            yield inner if inner.removeprefix("clairai.") in known else origin
    elif isinstance(node, ast.Call) and _called(node) in ("import_module", "find_spec"):
        yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def ours(module: Module, known: frozenset[str]) -> set[str]:
    """Modules of clairai that it imports, without the leading `clairai.`."""
    return _below_clairai(imports(module, known))


def ours_at_start(module: Module, known: frozenset[str]) -> set[str]:
    """The same without what functions import when they are called."""
    return _below_clairai(
        name for node in _at_start(module.tree) for name in _imported(node, known)
    )


def _below_clairai(names: Iterable[str]) -> set[str]:
    return {name.removeprefix("clairai").lstrip(".") for name in names if _is_in(name, "clairai")}


def is_importing(module: Module, library: str) -> bool:
    return any(_is_in(name, library) for name in imports(module, frozenset()))


def is_importing_at_start(
    module: Module, library: str, known: frozenset[str] = frozenset()
) -> bool:
    """True if importing the module imports the library too; imports in functions do not count."""
    found = [name for node in _at_start(module.tree) for name in _imported(node, known)]
    return any(_is_in(name, library) for name in found)


def _at_start(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _at_start(child)


def _is_in(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]
