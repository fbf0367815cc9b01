# ruff: noqa: E501, S101, RUF012
"""Moves, merges and renames modules by a map: python move.py ROOT MAP.json

The map has "modules" (old dotted name to new; several old to one new is a merge), "names"
(`old.module:old_name` to new name, top-level names only), "words" (identifiers renamed everywhere)
and "files" (paths of other files). Test modules count as modules of `tests`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import libcst as cst
from libcst.metadata import (
    Assignment,
    FunctionScope,
    ClassScope,
    ComprehensionScope,
    GlobalScope,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    ScopeProvider,
)

FOLDERS = ("src", "tests", "bench", "scripts", "examples")
TEXTS = (
    "*.md",
    "*.toml",
    "Makefile",
    "*.h",
    "*.c",
    "*.txt",
    "*.json",
    "*.ts",
    "*.tsx",
    "*.mjs",
    "*.ipynb",
)


def dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class World:
    def __init__(self, root: Path, mapping: dict) -> None:
        self.root = root
        files = [f.relative_to(root) for d in FOLDERS for f in sorted((root / d).rglob("*.py"))]
        files = [f for f in files if "node_modules" not in f.parts]
        self.paths = {dotted(f): f for f in files}
        self.modules: dict[str, str] = mapping["modules"]
        self.names: dict[str, str] = mapping["names"]
        self.words: dict[str, str] = mapping["words"]
        self.files: dict[str, str] = mapping["files"]
        self.origins = self._origins()
        self.texts = self._text_rules()

    def new_module(self, name: str) -> str:
        return self.modules.get(name, name)

    def new_name(self, module: str, name: str) -> str:
        module, name = self.origin(module, name)
        return self.names.get(f"{module}:{name}", name)

    def origin(self, module: str, name: str) -> tuple[str, str]:
        seen = set()
        while (module, name) in self.origins and (module, name) not in seen:
            seen.add((module, name))
            module, name = self.origins[module, name]
        return module, name

    def _origins(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Where a module's imported top-level name really is defined."""
        import ast

        found = {}
        for module, path in self.paths.items():
            tree = ast.parse((self.root / path).read_text())
            defined = set()
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    defined.add(node.name)
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    for alias in node.names:
                        name = alias.asname or alias.name
                        if (
                            node.module in self.paths
                            and f"{node.module}.{alias.name}" not in self.paths
                        ):
                            if name not in defined and module != "clairai":
                                found[module, name] = (node.module, alias.name)
        return found

    def _text_rules(self) -> list[tuple[re.Pattern, object]]:
        dots = {
            old: new
            for old, new in self.modules.items()
            if old != new and old not in ("clairai.cli",)
        }
        full = {}
        for key, new in self.names.items():
            module, _, name = key.partition(":")
            full[f"{module}.{name}"] = f"{self.new_module(module)}.{new}"
        full.update({k: v for k, v in dots.items() if k not in full})
        rules = []
        if full:
            pattern = "|".join(re.escape(k) for k in sorted(full, key=len, reverse=True))
            rules.append(
                (re.compile(rf"(?<![\w./])(?:{pattern})(?!\w)(?!\.py)"), lambda m: full[m[0]])
            )
        paths = dict(self.files)
        for old, new in self.modules.items():
            if old in self.paths and old != new:
                paths[str(self.paths[old])] = module_path(new)
        short = {}
        for old, new in paths.items():
            short[old] = new
            if old.startswith("src/"):
                short[old.removeprefix("src/")] = new.removeprefix("src/")
                o, n = old.removeprefix("src/clairai/"), new.removeprefix("src/clairai/")
                if "/" in o or o not in ("http.py",):
                    short[o] = n
        if short:
            pattern = "|".join(re.escape(k) for k in sorted(short, key=len, reverse=True))
            rules.append(
                (re.compile(rf"(?<![\w/.-])(?:{pattern})(?![\w/])"), lambda m: short[m[0]])
            )
        return rules

    def text(self, text: str) -> str:
        for pattern, to in self.texts:
            text = pattern.sub(to, text)
        return text


def module_path(name: str) -> str:
    top = "src/" if name.split(".")[0] == "clairai" else ""
    return top + name.replace(".", "/") + ".py"


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def dotted_node(name: str) -> cst.Name | cst.Attribute:
    node: cst.Name | cst.Attribute = cst.Name(name.split(".")[0])
    for part in name.split(".")[1:]:
        node = cst.Attribute(node, cst.Name(part))
    return node


def node_dotted(node) -> str:
    if isinstance(node, cst.Name):
        return node.value
    return f"{node_dotted(node.value)}.{node.attr.value}"


class Rewrite(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (ScopeProvider, ParentNodeProvider)

    def __init__(self, world: World, module: str) -> None:
        super().__init__()
        self.world, self.module = world, module
        self.new_self = world.new_module(module)
        self.rename: dict[int, str] = {}
        self.module_refs: dict[int, str] = {}  # id of Name -> old module it refers to
        self.collapse: set[str] = set()
        self.keep_alias: dict[tuple[int, str], str] = {}  # import node id, name -> alias
        self.problems: list[str] = []
        self.keep: list[object] = []  # ids stay unique while nodes live

    def visit_Module(self, node: cst.Module) -> None:
        scopes = {s for s in (self.get_metadata(ScopeProvider, n, None) for n in _walk(node)) if s}
        for scope in scopes:
            for assignment in scope.assignments:
                if isinstance(assignment, ImportAssignment):
                    self._import(scope, assignment)
                elif isinstance(assignment, Assignment) and isinstance(scope, GlobalScope):
                    self._definition(scope, assignment)

    def _definition(self, scope, assignment) -> None:
        new = self.world.names.get(f"{self.module}:{assignment.name}")
        if new is None or new == assignment.name:
            return
        node = assignment.node
        target = node.name if isinstance(node, cst.FunctionDef | cst.ClassDef) else node
        if isinstance(target, cst.Name):
            self._set(target, new)
        self._references(assignment, new)

    def _references(self, assignment, new: str) -> bool:
        names = [
            n for a in assignment.references for n in [_base(a.node)] if isinstance(n, cst.Name)
        ]
        if assignment.name != new and any(
            _is_shadowed(a.scope, assignment.name) for a in assignment.references
        ):
            self.problems.append(f"LOCAL {self.module}: {assignment.name} -> {new}")
        clash = [a for a in assignment.references if _is_shadowed(a.scope, new)]
        for name in names:
            self._set(name, new)
        if clash:
            self.problems.append(
                f"{self.module}: {assignment.name} -> {new} is shadowed by a local"
            )
        return not clash

    def _set(self, node: cst.Name, new: str) -> None:
        self.keep.append(node)
        self.rename[id(node)] = new

    def _import(self, scope, assignment) -> None:
        node = assignment.node
        if not isinstance(node, cst.ImportFrom) or node.module is None or node.relative:
            return
        origin = node_dotted(node.module)
        if isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            bound = alias.asname.name.value if alias.asname else alias.name.value
            if bound == assignment.name:
                self._bound(scope, assignment, node, origin, alias.name.value, bool(alias.asname))

    def _bound(self, scope, assignment, node, origin: str, name: str, is_aliased: bool) -> None:
        world = self.world
        refs = [(a, _base(a.node)) for a in assignment.references]
        if f"{origin}.{name}" in world.paths:  # a module
            old = f"{origin}.{name}"
            new = world.new_module(old)
            for _, ref in refs:
                if isinstance(ref, cst.Name):
                    self.keep.append(ref)
                    self.module_refs[id(ref)] = old
            if is_aliased or new == self.new_self:
                return
            if leaf(new) != name:
                self._rebind(assignment, node, name, leaf(new), refs)
            return
        if origin not in world.paths or origin == "clairai":
            return
        new = world.new_name(origin, name)
        home = world.new_module(world.origin(origin, name)[0])
        if home == self.new_self:
            self._references(assignment, new)
        elif not is_aliased and new != name:
            self._rebind(assignment, node, name, new, refs)

    def _rebind(self, assignment, node, name: str, new: str, refs) -> None:
        if any(_is_shadowed(a.scope, name) for a, _ in refs):
            self.problems.append(f"LOCAL {self.module}: import {name} -> {new}")
        clash = [a for a, _ in refs if _is_shadowed(a.scope, new)]
        if clash or _is_taken(assignment.scope, new, assignment):
            self.keep.append(node)
            self.keep_alias[id(node), name] = name
            self.problems.append(f"{self.module}: import {new} kept as {name}: the name is taken")
            return
        for _, ref in refs:
            if isinstance(ref, cst.Name):
                self._set(ref, new)

    # rewriting

    def leave_Name(self, original: cst.Name, updated: cst.Name) -> cst.Name:
        if id(original) in self.rename:
            updated = updated.with_changes(value=self.rename[id(original)])
        word = self.world.words.get(updated.value)
        return (
            updated.with_changes(value=word)
            if word and id(original) not in self.rename
            else updated
        )

    def leave_Attribute(self, original: cst.Attribute, updated: cst.Attribute):
        if isinstance(original.value, cst.Name) and id(original.value) in self.module_refs:
            old = self.module_refs[id(original.value)]
            attr = self.world.new_name(old, original.attr.value)
            home = self.world.new_module(self.world.origin(old, original.attr.value)[0])
            if self.world.new_module(old) == self.new_self:
                return cst.Name(attr, lpar=updated.lpar, rpar=updated.rpar)
            return updated.with_changes(attr=cst.Name(attr))
        return updated

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        args = original.args
        if len(args) < 2 or not isinstance(args[0].value, cst.Name):
            return updated
        old = self.module_refs.get(id(args[0].value))
        text = args[1].value
        if (
            old is None
            or not isinstance(text, cst.SimpleString)
            or not isinstance(text.evaluated_value, str)
        ):
            return updated
        new = self.world.new_name(old, text.evaluated_value)
        changed = [*updated.args]
        changed[1] = changed[1].with_changes(value=cst.SimpleString(json.dumps(new)))
        return updated.with_changes(args=changed)

    def leave_SimpleString(self, original, updated):
        value = updated.value
        bare = value.strip("'\"")
        if bare in self.world.words:
            return updated.with_changes(value=value.replace(bare, self.world.words[bare]))
        return updated.with_changes(value=self.world.text(value))

    def leave_FormattedStringText(self, original, updated):
        return updated.with_changes(value=self.world.text(updated.value))

    def leave_Comment(self, original, updated):
        return updated.with_changes(value=self.world.text(updated.value))

    def leave_SimpleStatementLine(self, original, updated):
        if len(original.body) != 1 or not isinstance(original.body[0], cst.ImportFrom):
            return updated
        node = original.body[0]
        if node.module is None or node.relative or isinstance(node.names, cst.ImportStar):
            return updated
        origin = node_dotted(node.module)
        if origin.split(".")[0] not in ("clairai", "tests", "bench", "scripts"):
            return updated
        if origin == "clairai" and self.module == "clairai" and False:
            return updated
        made: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        for alias in node.names:
            asname = alias.asname.name.value if alias.asname else None
            name = alias.name.value
            if f"{origin}.{name}" in self.world.paths:
                new = self.world.new_module(f"{origin}.{name}")
                if new == self.new_self:
                    continue
                package, target = new.rpartition(".")[0], leaf(new)
            elif origin in self.world.paths and origin != "clairai":
                home, base = self.world.origin(origin, name)
                package, target = self.world.new_module(home), self.world.new_name(home, base)
                if package == self.new_self:
                    continue
            else:
                package, target = origin, name
            kept = self.keep_alias.get((id(node), name))
            words = self.world.words
            if target == name or f"{origin}.{name}" not in self.world.paths:
                target = words.get(target, target)
            asname = words.get(asname, asname) if asname else None
            made[package].append((target, asname or kept))
        lines = []
        for package, names in made.items():
            aliases = [
                cst.ImportAlias(
                    cst.Name(t),
                    asname=cst.AsName(cst.Name(a)) if a and (a != t or asname) else None,
                )
                for t, a in names
            ]
            lines.append(cst.SimpleStatementLine([cst.ImportFrom(dotted_node(package), aliases)]))
        if not lines:
            return (
                cst.RemoveFromParent()
                if not _is_alone(self, original)
                else cst.SimpleStatementLine([cst.Pass()])
            )
        lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated.trailing_whitespace)
        return cst.FlattenSentinel(lines)


def _is_alone(rewrite, node) -> bool:
    parent = rewrite.get_metadata(ParentNodeProvider, node, None)
    return isinstance(parent, cst.IndentedBlock) and len(parent.body) == 1


def _base(node):
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def _is_shadowed(scope, name: str) -> bool:
    while scope is not None and not isinstance(scope, GlobalScope) and hasattr(scope, "parent"):
        if isinstance(scope, FunctionScope | ComprehensionScope) and name in _own(scope):
            return True
        if scope is scope.parent:
            return False
        scope = scope.parent
    return False


def _own(scope) -> set[str]:
    return {a.name for a in scope.assignments}


def _is_taken(scope, name: str, but) -> bool:
    return any(
        a.name == name and a is not but
        for a in scope.assignments
        if type(a).__name__ != "BuiltinAssignment"
    )


def _walk(node):
    yield node
    for child in node.children:
        yield from _walk(child)


def rewrite(job: tuple[str, str, str]) -> tuple[str, str, list[str]]:
    root, mapping, module = job
    world = _world(root, mapping)
    path = world.root / world.paths[module]
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
    transformer = Rewrite(world, module)
    return module, wrapper.visit(transformer).code, transformer.problems


_WORLDS: dict = {}


def _world(root: str, mapping: str) -> World:
    if (root, mapping) not in _WORLDS:
        _WORLDS[root, mapping] = World(Path(root), json.loads(Path(mapping).read_text()))
    return _WORLDS[root, mapping]


def is_import(node) -> bool:
    if isinstance(node, cst.SimpleStatementLine):
        return all(isinstance(s, cst.Import | cst.ImportFrom) for s in node.body)
    return (
        isinstance(node, cst.If)
        and isinstance(node.test, cst.Name)
        and node.test.value == "TYPE_CHECKING"
    )


def is_docstring(node) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def merge(codes: list[tuple[str, str]]) -> str:
    """One module of several: the first docstring, all imports, then the rest in order."""
    heads, imports, bodies = [], [], []
    for name, code in codes:
        tree = cst.parse_module(code)
        statements = list(tree.body)
        header = "".join(line.comment.value + "\n" for line in tree.header if line.comment)
        doc = ""
        if statements and is_docstring(statements[0]):
            doc = cst.Module([statements.pop(0)]).code.strip()
        imports.append("".join(cst.Module([s]).code for s in statements if is_import(s)))
        rest = cst.Module([s for s in statements if not is_import(s)]).code.strip("\n")
        heads.append((header, doc))
        bodies.append((name, doc, rest))
    lines = [heads[0][1], "", "\n".join(imports)]
    for at, (name, doc, rest) in enumerate(bodies):
        if at and doc:
            text = doc.strip('"').strip()
            lines += [
                "",
                "# MERGED\n"
                + "\n".join(
                    f"# {part}".rstrip()
                    for line in text.splitlines()
                    for part in (textwrap.wrap(line, 96) or [""])
                ),
                "",
            ]
        lines += ["", rest, ""]
    return "\n".join(lines) + "\n"


def clashes(new: str, codes: list[tuple[str, str]]) -> list[str]:
    import ast

    owners = defaultdict(set)
    for name, code in codes:
        for node in ast.parse(code).body:
            for bound, source in _bindings(node, name):
                owners[bound].add(source)
    return [
        f"{new}: {bound} is {sorted(sources)}"
        for bound, sources in owners.items()
        if len(sources) > 1
    ]


def _bindings(node, name: str):
    import ast

    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, name
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0], f"import {alias.name}"
    elif isinstance(node, ast.If):
        for inner in node.body:
            yield from _bindings(inner, name)


def main() -> None:
    root, mapping = sys.argv[1], sys.argv[2]
    is_dry = "--dry" in sys.argv
    world = _world(root, mapping)
    problems = [f"no such module {old}" for old in world.modules if old not in world.paths]
    import ast

    for key in world.names:
        module, _, name = key.partition(":")
        if module not in world.paths:
            problems.append(f"names: no such module {key}")
            continue
        tree = ast.parse((world.root / world.paths[module]).read_text())
        bound = {b for n in tree.body for b, s in _bindings(n, module) if s == module}
        if name not in bound:
            problems.append(f"names: no such name {key}")
    with ProcessPoolExecutor(2) as pool:
        done = list(pool.map(rewrite, [(root, mapping, m) for m in world.paths], chunksize=8))
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    order = [m for m in world.modules if m in world.paths]
    codes = {module: code for module, code, _ in done}
    for module in [*order, *(m for m in world.paths if m not in world.modules)]:
        groups[world.new_module(module)].append((module, codes[module]))
    for _, _, found in done:
        problems += found
    for new, members in groups.items():
        if len(members) > 1:
            problems += clashes(new, members)
    print("\n".join(problems))
    if is_dry:
        return
    write(world, groups)


def write(world: World, groups) -> None:
    root = world.root
    moved = {}
    for new, members in groups.items():
        old_path = str(world.paths[members[0][0]])
        is_package = old_path.endswith("__init__.py")
        stays = len(members) == 1 and members[0][0] == new
        moved[new] = old_path if stays else module_path(new)
        if is_package and not stays:
            assert len(members) == 1, members
            moved[new] = module_path(new).removesuffix(".py") + "/__init__.py"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    )
    for new, members in groups.items():
        for module, _ in members:
            if str(world.paths[module]) != moved[new]:
                (root / world.paths[module]).unlink()
    for new, members in groups.items():
        target = root / moved[new]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(members[0][1] if len(members) == 1 else merge(members))
    for old, new in world.files.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        if (root / old).exists():
            (root / old).rename(root / new)
    for line in listed.stdout.splitlines():
        path = root / world.files.get(line, line)
        if (
            path.suffix
            in (".md", ".toml", ".h", ".c", ".txt", ".ts", ".tsx", ".mjs", ".ipynb", ".json")
            or path.name == "Makefile"
        ):
            if path.exists() and path.name != "package-lock.json":
                text = path.read_text()
                new = world.text(text)
                if new != text:
                    path.write_text(new)
    for folder in ("src/clairai", "tests"):
        for sub in [root / folder, *(p for p in (root / folder).rglob("*") if p.is_dir())]:
            if "__pycache__" in sub.parts or "node_modules" in sub.parts:
                continue
            has = [p for p in sub.glob("*.py") if p.name != "__init__.py"]
            init = sub / "__init__.py"
            subs = [p for p in sub.iterdir() if p.is_dir() and any(p.rglob("*.py"))]
            if (has or subs) and not init.exists():
                init.write_text("")
            if not has and not subs and init.exists() and len(init.read_text()) < 200:
                init.unlink()


main()
