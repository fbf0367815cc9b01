"""Processes of an engine that are killed, suspended or hang while streams run.

Within seconds health says what and since when, streams end with an error, and the engine comes back
where that was asked for. A toy stands in the place of vLLM; what beats and watches is real.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.launch import process_guard
from tests.process.fault_injection import close_connections
from tests.process.served import OpenStream, Serve, Served, until
from tests.process.served import serve as serve

pytestmark = pytest.mark.timeout(240)

# On a busy machine; it takes 3 s if a process is suspended. Nobody else ends these streams: an
# engine that only makes no progress has minutes.
NOTICED_S = 50.0
STALL_LIMIT_S = 20.0
BEAT_S = 2.0  # so old the last beat may be when a core begins to hang
RESTART = ("--on-death", "restart")


def serving_streams(serve: Serve, *options: str) -> tuple[Served, list[OpenStream]]:
    """An engine with a core, a worker and three running streams, one of them with scores."""
    served = serve(*options, behaviour="processes,endless")
    served.await_ready()
    fields: tuple[dict[str, Any], ...] = ({}, {}, {"clairai": {"probes": "all"}})
    return served, [OpenStream(served, **more) for more in fields]


def check_streams_end(streams: list[OpenStream], since_s: float) -> None:
    for stream in streams:
        assert stream.wait_for_error()["code"] == "engine-gone"
        assert b"[DONE]" not in stream.raw
        assert stream.ended_s is not None
        assert stream.ended_s - since_s < NOTICED_S


def await_reason(served: Served, reason: str) -> dict[str, Any]:
    """The first health with this reason: what follows may have another."""
    found: list[dict[str, Any]] = []

    def is_told() -> bool:
        found.append(served.health())
        return reason in (found[-1].get("reason") or "")

    until(is_told)
    return found[-1]


def check_restarted(served: Served, old_pids: list[int]) -> None:
    until(lambda: served.said().count("is served on") == 2)
    served.await_status("ready")
    assert not set(old_pids) & set(served.engine_pids())
    assert len(list(served.runtime.glob("s-*"))) == 1


@pytest.mark.attack(410)
@pytest.mark.parametrize("role", ["worker", "engine-core"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
def test_streams_end_and_the_engine_is_started_again(
    serve: Serve, role: str, number: signal.Signals
) -> None:
    served, streams = serving_streams(serve, *RESTART)
    pids, began_s = served.engine_pids(), time.monotonic()
    os.kill(served.beat_of(role).pid, number)
    check_streams_end(streams, began_s)
    check_restarted(served, pids)
    served.end()
    served.check_nothing_left()


@pytest.mark.attack(406)
def test_a_core_whose_connections_are_closed_is_replaced_although_everything_beats(
    serve: Serve,
) -> None:
    served, streams = serving_streams(serve, *RESTART)
    pids, began, began_s = served.engine_pids(), time.time(), time.monotonic()
    close_connections(served.beat_of("engine-core").pid)
    health = await_reason(served, "has lost its connection to the engine core")
    assert health["status"] != "ready"
    assert "the API server" in health["reason"]
    assert began <= health["since"] < began + NOTICED_S
    check_streams_end(streams, began_s)
    check_restarted(served, pids)


@pytest.mark.attack(411)
def test_health_says_what_is_suspended_and_since_when(serve: Serve) -> None:
    served, streams = serving_streams(serve, *RESTART)
    pid, began = served.beat_of("worker").pid, time.time()
    os.kill(pid, signal.SIGSTOP)
    health = await_reason(served, f"a worker (process {pid}) is suspended")
    noticed = time.time()
    assert noticed - began < NOTICED_S
    assert health["status"] != "ready"
    assert began <= health["since"] <= noticed
    check_streams_end(streams, time.monotonic())


@pytest.mark.attack(412)
def test_without_a_restart_a_suspended_worker_ends_the_service_with_a_reason(
    serve: Serve,
) -> None:
    served, streams = serving_streams(serve)
    os.kill(served.beat_of("worker").pid, signal.SIGSTOP)
    check_streams_end(streams, time.monotonic())
    assert served.process.wait(60) == 3
    assert "is suspended" in served.said()
    served.check_nothing_left()


@pytest.mark.attack(413)
def test_a_core_that_hangs_is_told_in_health_and_ended_after_the_limit(serve: Serve) -> None:
    served, streams = serving_streams(serve, *RESTART, "--stall-limit", f"{STALL_LIMIT_S:g}")
    pids, began_s = served.engine_pids(), time.monotonic()
    hang = Path(f"{served.gate}.hang")
    hang.touch()
    degraded = await_reason(served, "makes no progress")
    assert degraded["status"] == "degraded"
    assert "the engine core" in degraded["reason"]
    assert streams[0].wait_for_error()["code"] == "engine-gone"
    # Not when that was noticed: it might have recovered.
    assert streams[0].ended_s is not None
    assert streams[0].ended_s - began_s > STALL_LIMIT_S - BEAT_S
    hang.unlink()
    check_restarted(served, pids)


def test_a_core_that_only_takes_long_is_not_ended(serve: Serve) -> None:
    served, streams = serving_streams(serve, *RESTART, "--stall-limit", "60")
    pids, hang = served.engine_pids(), Path(f"{served.gate}.hang")
    hang.touch()
    served.await_status("degraded")
    hang.unlink()
    served.await_status("ready")
    assert served.engine_pids() == pids
    assert all(stream.ended_s is None for stream in streams)


@pytest.mark.attack(414)
def test_a_suspended_api_server_is_replaced_and_new_requests_do_not_hang(serve: Serve) -> None:
    served, streams = serving_streams(serve, *RESTART)
    pids, began_s = served.engine_pids(), time.monotonic()
    os.kill(served.server_pid(), signal.SIGSTOP)
    refused = httpx.get(f"{served.url}/v1/models", timeout=60, trust_env=False)
    assert refused.status_code == 503
    assert time.monotonic() - began_s < NOTICED_S
    check_streams_end(streams, began_s)
    check_restarted(served, pids)


def guard_pid(served: Served) -> int:
    parents = process_guard._parent_pids()
    (guard,) = [pid for pid in served.engine_pids() if parents[pid] == served.process.pid]
    return guard


@pytest.mark.attack(415)
@pytest.mark.parametrize("options", [(), RESTART], ids=["end", "restart"])
def test_a_killed_guard_ends_streams_processes_and_folder(
    serve: Serve, options: tuple[str, ...]
) -> None:
    served, streams = serving_streams(serve, *options)
    pids, began_s = served.engine_pids(), time.monotonic()
    (folder,) = served.runtime.glob("s-*")
    os.kill(guard_pid(served), signal.SIGKILL)
    check_streams_end(streams, began_s)
    if options:
        check_restarted(served, pids)
        served.end()
    else:
        assert served.process.wait(60) == 3
        assert "the process guard was killed by SIGKILL" in served.said()
        assert not folder.exists()
    served.check_nothing_left()


def test_a_suspended_guard_is_woken_and_nobody_notices(serve: Serve) -> None:
    served, streams = serving_streams(serve)
    guard = guard_pid(served)
    os.kill(guard, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[0] != "T")
    assert all(stream.ended_s is None for stream in streams)
    served.end()
    served.check_nothing_left()


@pytest.mark.attack(416)
def test_a_launch_of_which_all_were_killed_leaves_no_folder_after_the_next_start(
    serve: Serve,
) -> None:
    first = serve(behaviour="processes")
    first.await_ready()
    (stale,) = first.runtime.glob("s-*")
    pids = first.engine_pids()
    os.kill(guard_pid(first), signal.SIGSTOP)  # so that it cannot clean up
    first.process.kill()
    first.process.wait()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not first.engine_pids())
    assert stale.exists()
    second = serve(behaviour="processes")
    second.await_ready()
    assert not stale.exists()


def test_the_folder_of_another_launch_that_runs_is_left_alone(serve: Serve) -> None:
    first, second = serve(behaviour="processes"), serve(behaviour="processes")
    first.await_ready()
    second.await_ready()
    assert len(list(first.runtime.glob("s-*/lock"))) == 2
    assert first.health()["status"] == "ready"


@pytest.mark.attack(417)
def test_a_suspended_service_is_reported_by_its_guard_and_goes_on_when_continued(
    serve: Serve,
) -> None:
    served, streams = serving_streams(serve)
    (log,) = served.runtime.glob("vllm-*.log")
    pids = served.engine_pids()
    served.process.send_signal(signal.SIGSTOP)
    until(lambda: "is suspended: nobody is answered until it goes on" in log.read_text())
    served.process.send_signal(signal.SIGCONT)
    until(lambda: "goes on\n" in log.read_text())
    length = len(streams[0].raw)
    until(lambda: len(streams[0].raw) > length)
    assert served.engine_pids() == pids
    assert served.health()["status"] == "ready"
