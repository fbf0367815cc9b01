"""The path of a score, kept true by who may import whom; lazy imports count."""

from __future__ import annotations

import pytest

from tests.shape.source import Module, is_importing, is_importing_at_start, ours, package

COMMON = {"errors", "wire", "wire_steer", "wire_capture", "wire_weights", "points"}
# What each part of clairai may import of clairai: arrows go down the path, never up.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "wire": {"wire_steer", "wire_capture", "wire_weights"},
    "wire_steer": set(),
    "wire_capture": set(),
    "wire_weights": set(),
    "points": {"errors"},
    "native": set(),
    "lent": {"errors", "wire", "ring.room"},
    "borrow": {"errors", "wire"},
    "steer": {*COMMON, "probe", "steer"},
    "capture": {*COMMON, "capture", "steer", "store.rows", "store.codecs", "ring.room"},
    "wanted": {"errors", "points", "steer", "capture"},
    "probe": {*COMMON, "probe"},
    "settings": {"errors", "points", "probe", "steer", "capture"},
    "ring": {"errors", "wire", "ring"},
    "store.codecs": {"errors", "points", "store.codecs"},  # decoders need numpy and no more
    "tap": {
        *COMMON,
        *("probe", "settings", "steer", "capture", "store.rows", "store.codecs", "tap"),
        *("ring.layout", "ring.writer", "ring.handshake", "ring.memory", "ring.cuda"),
        *("native", "borrow"),
    },
    "match": {*COMMON, "match"},
    "store": {*COMMON, "store"},
    "sidecar": {*COMMON, "ring", "match", "sidecar"},
    "stream": {*COMMON, "probe", "steer", "wanted", "ring", "match", "stream"},
    "compat": {
        *COMMON,
        *("probe", "settings", "steer", "capture", "wanted", "tap", "compat"),
        *("store.rows", "store.codecs"),
        *("ring.attach", "ring.reader"),  # stop rules read scores in the engine core
        *("weights", "ring.folder", "ring.cuda"),  # where new weights are taken
    },
    "weights": {
        *COMMON,
        *(
            "native",
            "borrow",
            "lent",
            "probe",
            "steer",
            "ring",
            "offline",
            "serve.calls",
            "weights",
        ),
    },
    "messages": {"errors"},
    "batch": {
        *COMMON,
        *("batch", "capture", "captured", "messages", "offline", "store", "wanted"),
        *("compat.llm", "train.engine"),
    },
    "train": {
        *COMMON,
        *("probe", "steer", "offline", "train"),
        *("compat.llm", "serve.launch", "demo.console", "demo.model"),
    },
}
WITHOUT_TORCH = (
    "ring",
    "match",
    "sidecar",
    "stream",
    "store",
    "probe",
    "steer",
    "capture",
    "wire",
    "errors",
)
MODULES = frozenset(module.name for module in package())


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def forbidden(module: Module, allowed: set[str], known: frozenset[str] = MODULES) -> set[str]:
    found = ours(module, known)
    return {name for name in found if not any(is_within(name, part) for part in allowed)}


def of(part: str) -> list[Module]:
    return [module for module in package() if is_within(module.name, part)]


def test_only_the_plugin_and_compat_import_vllm() -> None:
    importing = [module.name for module in package() if is_importing(module, "vllm")]
    assert [name for name in importing if name != "plugin" and not is_within(name, "compat")] == []
    assert importing  # the rule looks at something


TENSORS = (
    "weights.device_pack",
    "weights.device_sums",
    "weights.pack",
    "weights.routes",
    "weights.sources",
    "weights.sum_kernel",
    "weights.tensors",
)


def test_only_taps_compat_and_who_packs_weights_import_torch() -> None:
    importing = [module.name for module in package() if is_importing(module, "torch")]
    others = [n for n in importing if not is_within(n, "tap") and not is_within(n, "compat")]
    assert others == list(TENSORS)
    assert importing


EARLY = {
    "tap.brief": ["tap.commit", "tap.gpu_launch"],
    "tap.commit_kernel": ["tap.brief", "tap.gpu_launch"],
    "tap.score_kernel": ["tap.stash_kernel"],
    "tap.stash_kernel": ["tap.gpu_launch"],
    "tap.steer_kernel": ["tap.norm_kernel"],
}
KERNELS = (
    "tap.commit_kernel",
    "tap.norm_kernel",
    "tap.project_kernel",
    "tap.score_kernel",
    "tap.stash_kernel",
    "tap.steer_kernel",
    "weights.sum_kernel",
)


def test_only_the_kernels_import_triton_and_only_the_launch_of_one_imports_it_at_start() -> None:
    """A CPU engine has no Triton: what it imports must not need one."""
    importing = [module.name for module in package() if is_importing(module, "triton")]
    assert sorted(importing) == list(KERNELS)
    for kernel in (*KERNELS, "tap.brief", "tap.commit"):
        name = f"clairai.{kernel}"
        early = [m.name for m in package() if is_importing_at_start(m, name, MODULES)]
        assert early == EARLY.get(kernel, [])


def test_only_the_ring_in_gpu_memory_imports_cuda_and_only_when_it_is_used() -> None:
    importing = [module.name for module in package() if is_importing(module, "cuda")]
    assert importing == ["ring.cuda"]
    assert not any(is_importing_at_start(module, "cuda") for module in package())


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_comes_before_it_on_the_path(part: str) -> None:
    modules = of(part)
    assert modules
    assert {m.name: forbidden(m, MAY_IMPORT[part]) for m in modules} == {
        m.name: set() for m in modules
    }


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_a_reader_reaches_neither_torch_nor_vllm_by_any_road(part: str) -> None:
    by_name = {module.name: module for module in package()}
    pending = [module.name for module in of(part)]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        module = by_name[name]
        assert not is_importing(module, "torch"), name
        assert not is_importing(module, "vllm"), name
        pending += ours(module, MODULES) & by_name.keys()


PLANTED = [
    "import vllm",
    "import vllm.config as c",
    "from vllm import LLM",
    "from vllm.v1.engine import core",
    "def f():\n    from vllm import LLM",
    "if TYPE_CHECKING:\n    import vllm",
    "try:\n    import vllm\nexcept ImportError:\n    vllm = None",
    "import importlib\nimportlib.import_module('vllm.config')",
    "class A:\n    def f(self):\n        import os, vllm",
]


@pytest.mark.parametrize("text", PLANTED)
def test_an_import_of_vllm_is_found_wherever_it_hides(text: str) -> None:
    assert is_importing(Module("x", text), "vllm")


@pytest.mark.parametrize(
    ("text", "is_early"),
    [
        ("import cuda", True),
        ("from cuda.bindings import driver", True),
        ("if True:\n    import cuda", True),
        ("try:\n    import cuda\nexcept ImportError:\n    cuda = None", True),
        ("class A:\n    import cuda", True),
        ("def f():\n    import cuda", False),
        ("class A:\n    def f(self):\n        from cuda.bindings import driver", False),
        ("import cudax", False),
    ],
)
def test_an_import_at_the_start_is_told_from_one_that_waits(text: str, is_early: bool) -> None:
    assert is_importing_at_start(Module("x", text), "cuda") == is_early


@pytest.mark.parametrize("text", ["import vllmx", "from a.vllm import b", "'import vllm'", ""])
def test_what_only_looks_like_vllm_is_not_an_import_of_it(text: str) -> None:
    assert not is_importing(Module("x", text), "vllm")


@pytest.mark.parametrize(
    "text",
    [
        "from clairai.ring.reader import Ring",
        "from clairai.ring import reader",
        "def f():\n    import clairai.ring.reader",
        "from clairai import offline",
        "from clairai.match.ledger import Ledger",
        "import clairai",
    ],
)
def test_an_import_up_the_path_is_found(text: str) -> None:
    known = frozenset(("ring", "ring.reader", "offline", "match", "match.ledger"))
    assert forbidden(Module("tap.x", text), MAY_IMPORT["tap"], known)


@pytest.mark.parametrize(
    "text", ["from clairai import wire", "from clairai.ring.layout import HEADER", "import os"]
)
def test_an_import_down_the_path_is_allowed(text: str) -> None:
    known = frozenset(("wire", "ring", "ring.layout"))
    assert forbidden(Module("tap.x", text), MAY_IMPORT["tap"], known) == set()
