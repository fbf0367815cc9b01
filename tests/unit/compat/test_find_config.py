"""Whether an engine asks for clairai is read from vLLM's frames; other engines pay nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clairai import plugin
from clairai.compat import find_config, install
from clairai.compat.find_config import is_requested

Look = Callable[[], bool]

# The shapes of vLLM's own frames at the moment it loads plugins; `look` stands for the plugin load.
FRAMES = """
class EngineArgs:
    def __init__(self, additional_config):
        self.additional_config = additional_config
    def __post_init__(self, look):
        return look()
    def other_method(self, look):
        return look()

def init_worker(vllm_config, look):
    return look()

def add_cli_args(look):
    return look()

def load_general_plugins(look):
    return look()
"""


def module(name: str) -> Any:
    """A module of that name, whose functions are real frames of it."""
    made = ModuleType(name)
    exec(compile(FRAMES, f"{name}.py", "exec"), vars(made))  # noqa: S102  # the text above
    return made


vllm: Any = module("vllm.engine.arg_utils")


def looking(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Look:
    """A plugin load, as vLLM does it: two frames below whoever holds the config."""
    return lambda: vllm.load_general_plugins(lambda: is_requested(argv, environ or {}))


def holder(config: object) -> SimpleNamespace:
    return SimpleNamespace(additional_config=config)


ASKED: dict[str, object] = {"clairai": {"points": ["all"]}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [(ASKED, True), ({"clairai": None}, True), ({}, False), ({"x": 1}, False)],
)
def test_the_config_is_read_from_engine_args(config: object, expected: bool) -> None:
    assert vllm.EngineArgs(config).__post_init__(looking()) is expected


@pytest.mark.parametrize(("config", "expected"), [(ASKED, True), ({}, False)])
def test_the_config_is_read_from_a_workers_start(config: object, expected: bool) -> None:
    assert vllm.init_worker(holder(config), looking()) is expected


@pytest.mark.parametrize("config", [None, "clairai", ["clairai"], 3])
def test_a_config_that_is_no_dict_asks_for_nothing(config: object) -> None:
    assert vllm.EngineArgs(config).__post_init__(looking()) is False
    assert vllm.init_worker(holder(config), looking()) is False
    assert vllm.init_worker(None, looking()) is False


def test_self_counts_only_where_vllm_has_the_config_on_it() -> None:
    assert vllm.EngineArgs(ASKED).other_method(looking()) is False


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["vllm", "serve", "m", "--additional-config", '{"clairai": {}}'], True),
        (["vllm", "serve", "m", '--additional-config={"clairai": {}}'], True),
        (["vllm", "serve", "m", "--additional-config.clairai.points", "all"], True),
        (["vllm", "serve", "m"], False),
        ([], False),
        (["vllm", "serve", "--config"], False),
    ],
)
def test_a_command_line_is_read_where_there_is_no_config_yet(
    argv: list[str], expected: bool
) -> None:
    assert vllm.add_cli_args(looking(argv)) is expected


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"), [('additional-config: {"clairai": {}}', True), ("port: 8000", False)]
)
def test_a_config_file_of_the_command_line_is_read_too(
    tmp_path: Path, text: str, expected: bool, joined: bool
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    option = [f"--config={file}"] if joined else ["--config", str(file)]
    assert vllm.add_cli_args(looking(["vllm", "serve", "m", *option])) is expected


def test_a_config_file_that_cannot_be_read_is_left_to_vllm_to_report(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        assert vllm.add_cli_args(looking(["serve", "--config", str(path)])) is False


def test_a_config_file_is_read_only_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(" " * 100 + "clairai")
    argv = ["serve", "--config", str(file)]
    assert vllm.add_cli_args(looking(argv)) is True
    monkeypatch.setattr(find_config, "_MAX_CONFIG_FILE_BYTES", 50)
    assert vllm.add_cli_args(looking(argv)) is False


def test_the_innermost_frame_that_holds_a_config_decides() -> None:
    def inner_does_not_ask() -> Any:
        return vllm.EngineArgs({}).__post_init__(looking())

    def inner_asks() -> Any:
        return vllm.EngineArgs(ASKED).__post_init__(looking())

    assert vllm.init_worker(holder(ASKED), inner_does_not_ask) is False
    assert vllm.init_worker(holder({}), inner_asks) is True


def test_a_frame_that_holds_no_config_is_passed_over() -> None:
    outer = vllm.init_worker
    assert outer(holder(ASKED), lambda: vllm.init_worker(None, looking())) is True
    assert outer(holder({}), lambda: vllm.add_cli_args(looking(["clairai"]))) is True


@pytest.mark.parametrize("name", ["vllm_lens.patch", "vllmx", "myvllm.engine", "__main__", "vllm"])
def test_only_frames_of_vllm_count(name: str) -> None:
    other = module(name)
    environ = {"TARGET_LAYER": "3"}
    assert other.init_worker(holder(ASKED), lambda: is_requested(["clairai"], environ)) is False
    assert other.add_cli_args(lambda: is_requested(["clairai"], environ)) is False


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PROBE_MODEL": "org/Tiny"}, True),
        ({"TARGET_LAYER": "0"}, True),
        ({"VLLM_ACT_CAPTURE": "1"}, True),
        ({"VLLM_ACT_CAPTURE": "yes"}, True),  # which is refused, rather than ignored
        ({"VLLM_ACT_CAPTURE": "0"}, False),
        ({"VLLM_ACT_CAPTURE": "0", "TARGET_LAYER": "3"}, True),
        ({"VLLM_ACT_MODE": "rp8", "PROBE_MODEL": "", "TARGET_LAYER": ""}, False),
        ({}, False),
    ],
)
def test_a_variable_of_the_environment_asks_like_the_key(
    environ: dict[str, str], expected: bool
) -> None:
    assert vllm.add_cli_args(looking(["vllm", "serve", "m"], environ)) is expected
    assert vllm.EngineArgs({}).__post_init__(looking((), environ)) is expected


def test_without_a_frame_of_vllm_nothing_is_requested() -> None:
    assert is_requested(["vllm", "serve", '{"clairai": {}}'], {"TARGET_LAYER": "3"}) is False


@pytest.mark.parametrize(
    ("is_asked", "switch", "expected"),
    [(True, "0", 1), (True, "1", 0), (False, "0", 0), (False, "1", 0)],
)
def test_hooks_are_installed_only_on_request_and_not_if_disabled(
    is_asked: bool, switch: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[None] = []
    monkeypatch.setattr(find_config, "is_requested", lambda _argv, _environ: is_asked)
    monkeypatch.setattr(install, "install_hooks", lambda: armed.append(None))
    monkeypatch.setenv("CLAIRAI_DISABLE", switch)
    plugin.register()
    assert len(armed) == expected


IMPORTS_NEITHER = """
import sys
{statements}
heavy = sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "vllm"}})
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


def run(statements: str) -> subprocess.CompletedProcess[str]:
    program = IMPORTS_NEITHER.format(statements=statements)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )


def test_an_unused_plugin_imports_neither_torch_nor_vllm() -> None:
    done = run("import clairai.plugin; clairai.plugin.register(); clairai.plugin.register()")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "clairai",
        "clairai.ring.reader",
        "clairai.ring.attach",
        "clairai.match.row_collector",
        "clairai.library.config",
        "clairai.library.probe_bank",
        "clairai.library.scores",
        "clairai.cli",
        "clairai.plugin",
        "clairai.sidecar.run_sidecar",
        "clairai.launch.serve",
    ],
)
def test_importing_a_reader_imports_neither_torch_nor_vllm(name: str) -> None:
    done = run(f"import {name}")
    assert done.returncode == 0, done.stderr


def test_the_check_for_heavy_imports_can_fail() -> None:
    done = run("from types import ModuleType; sys.modules['torch.nn'] = ModuleType('torch.nn')")
    assert done.returncode == 1
    assert "imported ['torch']" in done.stderr
