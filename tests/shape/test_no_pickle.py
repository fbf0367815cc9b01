"""Nothing that arrives can run: no unpickling and no evaluation anywhere in the package."""

from __future__ import annotations

import ast

import pytest

from tests.shape.source import Module, imports, package

LIBRARIES = ("pickle", "cPickle", "_pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib")
BUILT_IN = ("eval", "exec", "__import__")
# Of torch.distributed and of vLLM's groups: they pickle what they send.
OBJECT_CALLS = (
    *("all_gather_object", "gather_object", "broadcast_object", "broadcast_object_list"),
    *("scatter_object_list", "send_object", "send_object_list", "recv_object", "recv_object_list"),
)
LOADERS = ("torch.load", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load", "yaml.load")


def dangers(module: Module) -> list[str]:
    """Imports and calls by which bytes or text become code, each with its line where it has one."""
    imported = {name.partition(".")[0] for name in imports(module, frozenset())}
    found = [f"imports {name}" for name in sorted(imported & set(LIBRARIES))]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in BUILT_IN:
            found.append(f"line {node.lineno}: {node.id}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in LOADERS:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Attribute) and node.attr in BUILT_IN[:2]:
            found += _built_in(node)
        elif isinstance(node, ast.Attribute) and node.attr in OBJECT_CALLS:
            found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "builtins"):
            names = [alias.name for alias in node.names if alias.name in ("load", *BUILT_IN)]
            found += [f"line {node.lineno}: {node.module}.{name}" for name in names]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(f"line {node.value.lineno}: allow_pickle")
    return found


def _built_in(node: ast.Attribute) -> list[str]:
    """`builtins.eval`, but not the `eval` of a torch module."""
    is_built_in = ast.unparse(node.value) in ("builtins", "__builtins__")
    return [f"line {node.lineno}: {ast.unparse(node)}"] if is_built_in else []


def test_pitfall_19_nothing_is_ever_unpickled() -> None:
    assert {module.name: dangers(module) for module in package() if dangers(module)} == {}
    assert len(package()) > 50  # the rule looks at something


@pytest.mark.parametrize(
    "text",
    [
        *(f"import {name}" for name in LIBRARIES),
        *(f"def f():\n    from {name} import loads" for name in LIBRARIES),
        "import importlib\nimportlib.import_module('pickle')",
        "import os, pickle as p",
        *(f"{name}('x')" for name in BUILT_IN),
        "f = eval",
        "import builtins\nbuiltins.exec('x')",
        "from builtins import eval as e",
        *(f"{name}(file)" for name in LOADERS),
        *(f"torch.distributed.{name}(found, own)" for name in OBJECT_CALLS),
        "def f():\n    return torch.load",
        "from torch import load",
        "np.fromfile(f, allow_pickle=True)",
    ],
)
def test_each_way_to_run_what_arrives_is_found(text: str) -> None:
    assert len(dangers(Module("planted", text))) >= 1


@pytest.mark.parametrize(
    "text", ["model.eval()", "json.loads(x)", "safetensors.numpy.load(x)", "'eval'", "loads(x)"]
)
def test_what_is_harmless_is_let_be(text: str) -> None:
    assert dangers(Module("harmless", text)) == []
