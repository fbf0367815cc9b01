"""The cause of a server's end, from what vLLM 0.32 really wrote when it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from clairai.launch.death_cause import KILLED_CORE, find_death_cause

LOGS = Path(__file__).parent / "logs"
CORE = "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1512]"
WORKER = "(Worker pid=8) ERROR 01-01 00:00:00 [multiproc_executor.py:1063]"
START = "(APIServer pid=6) INFO 01-01 00:00:00 [entry.py:140] Starting vLLM server"


def read_log(name: str) -> list[str]:
    return [line for line in (LOGS / name).read_text().split("\n") if line.strip()]


def test_the_error_of_the_fatal_step_is_named_and_not_the_request_refused_before() -> None:
    lines = read_log("fatal_step.txt")
    assert any("RequestError" in line for line in lines)
    assert find_death_cause(lines) == "ValueError: planted: the step failed"


def test_a_failed_start_is_explained_by_the_core_and_not_by_the_servers_after_it() -> None:
    cause = find_death_cause(read_log("failed_start.txt"))
    assert cause is not None
    assert cause.startswith("ValueError: No available memory for the cache blocks.")


def test_a_core_that_was_killed_left_no_error_and_none_is_named() -> None:
    assert find_death_cause(read_log("killed_core.txt")) == KILLED_CORE


def test_a_worker_that_was_killed_is_the_cause_of_the_cores_error() -> None:
    cause = "Worker proc VllmWorker-0 died unexpectedly"
    lines = read_log("killed_worker.txt")
    assert find_death_cause(lines) == cause
    coded = [line.replace("(exit code: None)", "(exit code: -9)") for line in lines]
    assert find_death_cause(coded) == f"{cause} (exit code: -9)"


def test_the_error_of_a_worker_stands_for_that_of_a_core_which_refers_to_it() -> None:
    lines = [
        START,
        f"{WORKER} WorkerProc hit an exception.",
        f"{WORKER} Traceback (most recent call last):",
        f"{WORKER} OverflowError: the number is too large",
        f"{CORE} EngineCore encountered a fatal error.",
        f"{CORE} RuntimeError: Worker failed with error '', please check the stack trace above",
    ]
    assert find_death_cause(lines) == "OverflowError: the number is too large"
    assert find_death_cause([START, *lines[4:]]) == lines[-1].removeprefix(f"{CORE} ")


def test_a_server_that_cannot_read_its_arguments_is_explained_by_its_last_traceback() -> None:
    lines = [
        START,
        "Traceback (most recent call last):",
        '  File "vllm/config.py", line 3, in check',
        '    raise ValueError("SyntaxError: not this")',
        "pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, no such model",
    ]
    assert find_death_cause(lines) == lines[4]


def test_a_traceback_that_the_server_survived_is_not_the_cause() -> None:
    survived = ["Traceback (most recent call last):", "KeyError: 'x'"]
    assert find_death_cause([START, *survived]) == "KeyError: 'x'"
    assert find_death_cause([START, *survived, START]) is None
    assert find_death_cause(["ERROR:    Exception in ASGI application", *survived]) is None


@pytest.mark.parametrize("lines", [[], ["one line"], [CORE], [f"{CORE} "], ["(" * 500]])
def test_a_log_without_an_error_has_no_cause(lines: list[str]) -> None:
    assert find_death_cause(lines) is None
