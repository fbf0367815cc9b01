"""vLLM's log: the stage of a start, the cause of an end, and its size."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from clairai.errors import ConfigError
from clairai.launch import engine_log as log_module
from clairai.launch import user_output
from clairai.launch.engine_log import EngineLog
from clairai.launch.user_output import show_start_progress

PREFIX = "(EngineCore pid=5) INFO 11-15 03:55:40 [core.py:20] "


def written(path: Path, text: str) -> EngineLog:
    """The log of a server that has written this."""
    log = EngineLog(path)
    with log.create() as file:
        file.write(text.encode())
    return log


def test_the_log_says_what_vllm_is_doing_without_its_prefix(tmp_path: Path) -> None:
    assert EngineLog(tmp_path / "log").newest() == ""
    log = written(tmp_path / "log", f"{PREFIX}Loading weights\n\n")
    assert log.newest() == "Loading weights"


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path: Path) -> None:
    log = written(tmp_path / "log", "shards:  10%\rshards:  50%\rshards: 100%\r\n")
    assert log.newest() == "shards: 100%"


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("", "importing vLLM"),
        (f"{PREFIX}Initializing a V1 LLM engine (v0.32.0)", "setting up"),
        (f"{PREFIX}Starting to load model /models/tiny...", "loading the weights"),
        ("Loading safetensors checkpoint shards:  50% Completed | 1/2", "loading the weights"),
        (f"{PREFIX}Enforce eager set, disabling torch.compile, CUDAGraphs", "importing vLLM"),
        (f"{PREFIX}Dynamo bytecode transform time: 3.10 s", "compiling"),
        (f"{PREFIX}CPU KV cache size: 23,296 tokens", "warming up"),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%", "capturing graphs"),
        (f"{PREFIX}Starting vLLM server on unix:/run/me/api.sock", "opening its server"),
    ],
)
def test_a_stage_is_recognized_by_vllms_lines_and_repeats_none_of_them(
    tmp_path: Path, line: str, stage: str
) -> None:
    log = written(tmp_path / "log", f"{line}\nanything else\n")
    assert log.stage() == stage


def test_a_log_is_private_and_new_for_each_server(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "log")
    log.path.write_text("an older server\n")
    with log.create() as file:
        file.write(b"a newer one\n")
    assert log.lines() == ["a newer one"]
    assert (tmp_path / "log.old").read_text() == "an older server\n"
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_long_log_is_cut_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_BYTES", 20)
    monkeypatch.setattr(log_module, "_SPARE_BYTES", 2)
    log = EngineLog(tmp_path / "log")
    log.trim()  # not there yet
    with log.create() as file:
        file.write(b"line one\n")
        file.flush()
        log.trim()
        assert log.lines() == ["line one"]
        file.write(b"line two, and\n")
        file.flush()
        log.trim()
        file.write(b"three\n")
    dropped = len("line one\nline two, and\n") - 18
    note = (
        f"[clairai] 18 bytes of this log are in log.old; {dropped} bytes of it were dropped so far"
    )
    assert log.lines() == [note, "three"]
    assert (tmp_path / "log.old").read_text() == "one\nline two, and\n"
    assert stat.S_IMODE((tmp_path / "log.old").stat().st_mode) == 0o600


def test_a_place_that_cannot_have_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --vllm-log another file"):
        EngineLog(tmp_path / "missing" / "log").create()


def test_without_a_terminal_each_stage_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(user_output, "time", SimpleNamespace(monotonic=lambda: now_s))
    log = EngineLog(tmp_path / "log")
    said: list[str] = []
    with log.create() as file, show_start_progress(None, log, said.append) as tick:
        tick()
        tick()
        file.write(f"{PREFIX}Starting to load model /secret/path...\n".encode())
        file.flush()
        now_s += 7.0
        tick()
        tick()
    assert said == ["vLLM is importing vLLM, 0 s", "vLLM is loading the weights, 7 s"]


def test_on_a_terminal_one_line_moves_and_nothing_is_printed(tmp_path: Path) -> None:
    log = written(tmp_path / "log", f"{PREFIX}Starting to load model tiny...\n")
    with (tmp_path / "screen").open("w") as screen:
        console = Console(file=screen, force_terminal=True, width=60)
        with show_start_progress(console, log, lambda line: pytest.fail(line)) as tick:
            tick()
    assert "loading the weights: Starting to load model tiny" in (tmp_path / "screen").read_text()
