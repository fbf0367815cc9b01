"""Who may import whom, and which modules may need torch, Triton, CUDA, FastAPI or vLLM.

Imports inside functions count unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.shape.source import (
    Module,
    is_importing,
    is_importing_at_start,
    ours,
    ours_at_start,
    package,
)

COMMON = {"errors", "points", "wire"}
# What each room may import: a whole room, or single modules of one. Rooms further down may use
# those further up; the few single modules that go the other way are data types without logic.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "points": {"errors"},
    "wire": {"wire"},
    "local": {"errors", "wire", "local"},
    "probe": {*COMMON, "probe"},
    "vector": {*COMMON, "probe", "vector"},
    "ring": {"errors", "wire", "local", "ring"},
    "match": {*COMMON, "match"},
    "store.codecs": {"errors", "points", "store.codecs"},  # decoders need numpy and no more
    "store": {*COMMON, "store"},
    "fields": {*COMMON, "probe", "vector", "store.row_block", "store.codecs", "fields"},
    "capture": {
        *COMMON,
        *("local", "fields", "store.row_block", "store.codecs", "store.core_folders", "capture"),
        "engine.capture.capture_plan",
    },
    "settings": {"errors", "points", "probe", "vector", "capture.capture_settings"},
    "spool": {*COMMON, "local", "ring", "settings", "spool"},
    "engine": {
        *COMMON,
        *("local", "probe", "vector", "fields", "settings", "capture", "engine"),
        *("store.row_block", "store.codecs"),
        *("ring.layout", "ring.writer", "ring.server", "ring.memory", "spool.launch"),
        "match.choice_scores",  # stop rules match scores to tokens in the engine core
    },
    "compat": {
        *COMMON,
        *("local", "probe", "vector", "fields", "settings", "capture", "engine", "weights"),
        "store.codecs",
        "store.stored_streams",  # the engine core refuses stream ids that a folder holds
        *("ring.attach", "ring.reader", "match"),  # stop rules read scores in the engine core
        "compat",
    },
    "library": {
        *COMMON,
        *("local", "probe", "vector", "fields", "settings", "store", "ring", "match", "spool"),
        *("library", "compat.install", "compat.engine_cores"),
    },
    "weights": {
        *COMMON,
        *("local", "probe", "vector", "library", "weights"),
        "compat.weight_trainer",  # named here for users of vLLM's trainer interface
    },
    "integrations": {"errors", "library.http_client", "integrations"},
    "sidecar": {*COMMON, "local", "ring", "match", "sidecar"},
    "proxy": {
        *COMMON,
        *("local", "probe", "vector", "fields", "ring", "match", "proxy"),
        "weights.manifest",  # for the schema of a request
    },
    "server": {
        *COMMON,
        *("local", "probe", "vector", "fields", "store", "weights", "library", "server"),
        *("compat.api_server", "compat.core_link", "compat.engine_cores", "compat.install"),
    },
    "launch": {
        *COMMON,
        *("local", "probe", "vector", "settings", "library", "proxy", "launch"),
        "engine.steer.steering_registry",
    },
    "train": {
        *COMMON,
        *("probe", "vector", "library", "train"),
        *("compat.offline_llm", "launch.engine_command", "demo.console", "demo.model"),
    },
    "batch": {
        *COMMON,
        *("fields", "store", "library", "batch"),
        *("compat.offline_llm", "train.start_engine"),
    },
    "demo": {
        *COMMON,
        *("local", "fields", "ring", "match", "library", "sidecar", "launch", "demo"),
    },
}
# A reader of scores or of captured rows needs neither a GPU nor vLLM.
WITHOUT_TORCH = (
    *("errors", "points", "wire", "local", "probe", "vector", "ring", "match", "store"),
    *("fields", "capture", "settings", "spool", "sidecar", "proxy"),
)
# Besides compat and engine.
WITH_TORCH = (
    "weights.checksum_kernel",
    "weights.device_checksum",
    "weights.pack",
    "weights.torch_buffers",
    "weights.transport",
)
# Modules that cannot be imported without Triton, besides the kernels themselves.
GPU_ONLY = ("engine.publish.gpu_launcher",)
MODULES = frozenset(module.name for module in package())


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def forbidden(module: Module, allowed: set[str], known: frozenset[str] = MODULES) -> set[str]:
    found = ours(module, known)
    return {name for name in found if not any(is_within(name, part) for part in allowed)}


def of(part: str) -> list[Module]:
    return [module for module in package() if is_within(module.name, part)]


def reached_from(parts: tuple[str, ...]) -> set[str]:
    """The modules of these rooms, and all they import, directly or not."""
    by_name = {module.name: module for module in package()}
    pending = [module.name for part in parts for module in of(part)]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += ours(by_name[name], MODULES) & by_name.keys()
    return reached


def needing_at_start(is_first: Callable[[str], bool]) -> set[str]:
    """Modules that cannot be imported without one for whose name `is_first` is true."""
    at_start = {module.name: ours_at_start(module, MODULES) for module in package()}
    needing = set(filter(is_first, at_start))
    while more := {name for name, found in at_start.items() if found & needing} - needing:
        needing |= more
    return needing


def test_only_the_plugin_and_compat_import_vllm() -> None:
    importing = [module.name for module in package() if is_importing(module, "vllm")]
    assert [name for name in importing if name != "plugin" and not is_within(name, "compat")] == []
    assert importing  # the rule looks at something


def test_only_compat_the_engine_and_who_packs_weights_import_torch() -> None:
    importing = [module.name for module in package() if is_importing(module, "torch")]
    others = [n for n in importing if not is_within(n, "engine") and not is_within(n, "compat")]
    assert others == list(WITH_TORCH)
    assert len(importing) > len(others)


def test_only_the_api_server_and_the_proxy_import_fastapi() -> None:
    importing = {
        m.name for lib in ("fastapi", "starlette") for m in package() if is_importing(m, lib)
    }
    rooms = {name.partition(".")[0] for name in importing}
    assert rooms == {"plugin", "server", "proxy"}


def test_only_modules_named_kernel_import_triton() -> None:
    importing = {module.name for module in package() if is_importing(module, "triton")}
    assert importing == {name for name in MODULES if name.endswith("_kernel")}


def test_a_cpu_engine_imports_no_module_that_needs_triton() -> None:
    """A CPU build has no Triton: kernels are imported by functions that only a GPU reaches."""
    needing = needing_at_start(lambda name: name.endswith("_kernel"))
    assert {name for name in needing if not name.endswith("_kernel")} == set(GPU_ONLY)


def test_only_gpu_memory_imports_cuda_and_only_when_it_is_used() -> None:
    importing = [module.name for module in package() if is_importing(module, "cuda")]
    assert importing == ["local.gpu_memory"]
    assert not any(is_importing_at_start(module, "cuda") for module in package())


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(part: str) -> None:
    modules = of(part)
    assert modules
    assert {m.name: forbidden(m, MAY_IMPORT[part]) for m in modules} == {
        m.name: set() for m in modules
    }


def test_every_room_has_its_rule() -> None:
    free = {"", "plugin", "cli"}  # the outermost ones may import everything
    rooms = {name.partition(".")[0] for name in MODULES}
    assert rooms - free == {part.partition(".")[0] for part in MAY_IMPORT}


def test_what_a_rule_allows_exists() -> None:
    """A module that was renamed leaves no rule behind."""
    allowed = {name for names in MAY_IMPORT.values() for name in names}
    assert {part for part in (*allowed, *WITHOUT_TORCH) if not of(part)} == set()


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_a_reader_reaches_neither_torch_nor_vllm(part: str) -> None:
    by_name = {module.name: module for module in package()}
    for name in reached_from((part,)):
        assert not is_importing(by_name[name], "torch"), name
        assert not is_importing(by_name[name], "vllm"), name


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
        "from clairai import library",
        "from clairai.match.row_collector import RowCollector",
        "import clairai",
    ],
)
def test_a_forbidden_import_is_found(text: str) -> None:
    known = frozenset(("ring", "ring.reader", "library", "match", "match.row_collector"))
    assert forbidden(Module("engine.x", text), MAY_IMPORT["engine"], known)


@pytest.mark.parametrize(
    "text", ["from clairai import wire", "from clairai.ring.layout import HEADER", "import os"]
)
def test_an_allowed_import_is_not_reported(text: str) -> None:
    known = frozenset(("wire", "ring", "ring.layout"))
    assert forbidden(Module("engine.x", text), MAY_IMPORT["engine"], known) == set()


def test_what_needs_a_module_at_start_is_followed_through_others() -> None:
    needing = needing_at_start(lambda name: name == "errors")
    assert {"errors", "points", "settings"} <= needing
    assert "plugin" not in needing  # it imports nothing of ours before it is called
