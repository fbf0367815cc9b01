"""The capture writer process: what it stores, and what is left when it or the engine dies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clairai
from clairai.capture import pipe_messages, remote
from clairai.capture.remote import RemoteBackend
from clairai.capture.staging_arena import ArenaRegion, StagingArena
from clairai.engine.capture.capture_plan import KeepThreshold
from clairai.engine.capture.encode import encode_twin
from clairai.store.codecs.registry import named
from clairai.wire import capture_messages
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import Rig, remote_rig
from tests.support.ring_engine import DEADLINE_S, until

FS = ("fs",)
POINTS = ("pre_attn.0", "post_block.0", "post_block.1")


def backend_of(made: Rig) -> RemoteBackend:
    assert isinstance(made.backend, RemoteBackend)
    return made.backend


def open_pidfd(process: int) -> int:
    """A descriptor that becomes readable when this process has ended."""
    return os.pidfd_open(process)


def wait_for_end(watched: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    assert poll.poll(1e3 * DEADLINE_S)
    os.close(watched)


def state_of(made: Rig) -> capture_messages.CaptureState:
    found = made.capture.answer(capture_messages.DescribeCapture())
    assert isinstance(found, capture_messages.CaptureState)
    return found


@pytest.mark.parametrize("name", ["raw", "rp8"])
def test_rows_reach_a_folder_through_another_process_to_the_bit(tmp_path: Path, name: str) -> None:
    encoder = named(name, {"dtype": "bfloat16"} if name == "raw" else {"k": 16})
    wanted = capture_plan(points=POINTS[1:], encoder=name, parameters=encoder.parameters, to=FS)
    with remote_rig({"folder": str(tmp_path / "s")}, dtype=torch.bfloat16) as made:
        made.enter("a", 7, replace_tags(wanted, '{"label":1}'))
        kept = [made.step(("x", 0, 2), ("a", 0, 5))]
        kept += [made.step(("x", at, 1), ("a", at, 1)) for at in range(5, 90)]
        told = made.ended("api-a", "kept")
        assert (told.rows, told.lost) == (2 * 90, 0)
        assert state_of(made).rows == 2 * 90
        assert made.copier.arena.used_nbytes == 0
    store = clairai.open(tmp_path / "s")
    assert store.request(7).tags == {"label": 1}
    for site, point in enumerate(POINTS[1:], 1):
        rows = store.rows(7, point=point)
        assert rows.position.tolist() == [*range(90)]
        assert rows.token_id.tolist() == [*range(1000, 1090)]
        bits = torch.cat([kept[0][site, 2:], *(step[site, 1:] for step in kept[1:])])
        arrays = {key: array.numpy() for key, array in encode_twin(bits, encoder).items()}
        assert np.array_equal(np.asarray(rows), encoder.decode(arrays, width=64))
    assert all(store.shard(entry).head.fidelity for entry in store.shards)


def replace_tags(given: Any, tags: str) -> Any:
    import msgspec

    return msgspec.structs.replace(given, tags=tags)


def test_rules_amendments_and_new_weights_take_effect_in_order(tmp_path: Path) -> None:
    held = capture_plan(hold=KeepThreshold("anger", 2.0), to=FS)
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        for name, stream in (("a", 1), ("b", 2)):
            made.enter(name, stream, held)
        made.step(("a", 0, 2), ("b", 0, 2))
        made.tables.bias_SK[1, 1] = 2.0
        made.backend.amend((1, 0), '{"applied":[]}')
        made.backend.set_weights("second")
        made.step(("a", 2, 1))
        assert made.ended("api-a", "kept").rows == 3
        told = made.ended("api-b", "discarded")
        assert (told.rows, told.discarded) == (0, 2)
        assert told.reason == "probe anger stayed below 2"
        assert made.scores.followed
    store = clairai.open(tmp_path / "s")
    assert [request.stream for request in store.requests()] == [1]
    assert store.request(1).steering == {"applied": []}
    assert {store.shard(entry).head.origin.weights for entry in store.shards} == {"w", "second"}


def capture_until_killed(folder: str, is_closing: bool) -> None:
    """In a process of its own: a hundred steps, then one whose rows are never copied."""
    with remote_rig({"folder": folder}) as made:
        made.enter("a", 7, capture_plan(to=FS))
        for step in range(100):
            made.step(("a", 8 * step, 8))
        made.copier._mark_copied = lambda _: lambda: None  # type: ignore[assignment,method-assign]
        made.step(("a", 800, 8))
        if is_closing:
            backend_of(made)._add(pipe_messages.CloseWriter())
            made.backend.send()
        sys.stdout.write(f"{backend_of(made).process}\n")
        sys.stdout.flush()
        sys.stdin.readline()


@pytest.mark.parametrize("is_closing", [False, True], ids=["in a step", "while it closes"])
def test_a_killed_engine_loses_no_row_that_was_copied(tmp_path: Path, is_closing: bool) -> None:
    given = f"{str(tmp_path / 's')!r}, {is_closing}"
    call = f"from tests.process.test_capture_writer import *; capture_until_killed({given})"
    engine = subprocess.Popen(
        [sys.executable, "-c", call], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with engine:
        assert engine.stdout is not None
        watched = open_pidfd(int(engine.stdout.readline()))
        engine.send_signal(signal.SIGKILL)
    assert engine.returncode == -signal.SIGKILL
    wait_for_end(watched)
    found = clairai.open(tmp_path / "s").rows(7, point="post_block.0")
    assert found.position.tolist() == [*range(800)]


def test_a_killed_writer_is_noticed_and_generation_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        made.enter("a", 1, capture_plan(to=FS))
        made.step(("a", 0, 8))
        assert made.ended("api-a", "kept").rows == 8
        made.enter("b", 2, capture_plan(points=POINTS, to=FS))
        made.enter("c", 3, capture_plan(to=FS))
        made.step(("b", 0, 8), ("c", 0, 3))
        until(lambda: made.told(2).rows == 24)
        backend = backend_of(made)
        backend._restart = None  # what the time until the next writer is like
        os.kill(backend.process, signal.SIGSTOP)
        made.step(("b", 8, 4))  # sent to the writer, which never takes them
        os.kill(backend.process, signal.SIGKILL)
        until(lambda: bool(backend.failure) and made.told(2).state == "failed")
        made.step(("b", 12, 1), ("c", 3, 1))
        made.enter("d", 4, capture_plan(to=FS))
        made.step(("d", 0, 2))
        assert made.told(1).state == "kept"  # it was safe before
        second, third, late = (made.told(stream) for stream in (2, 3, 4))
        assert (second.rows, second.dropped) == (24, 3 * 5)
        assert second.lost == 24 + 3 * 5  # what of it is on the disk is not known
        assert (third.state, third.rows, third.dropped) == ("failed", 3, 1)
        assert (late.state, late.rows, late.dropped) == ("failed", 0, 2)
        assert "the capture writer process has ended" in late.reason
        state = state_of(made)
        assert [(place.state, place.reason) for place in state.places] == [("failed", late.reason)]
        assert (state.rows, state.dropped) == (8 + 24 + 3, 15 + 1 + 2)
    assert "has ended" in caplog.text


def test_a_stopped_writer_blocks_nobody_and_rows_without_room_are_counted(
    tmp_path: Path,
) -> None:
    setting = {"folder": str(tmp_path / "s"), "staging_mib": 1}
    with remote_rig(setting) as made:
        made.enter("a", 1, capture_plan(points=POINTS, to=FS))
        os.kill(backend_of(made).process, signal.SIGSTOP)
        for step in range(200):
            made.step(("a", 32 * step, 32))
        dropped = made.told(1).dropped
        assert 0 < dropped < 200 * 32 * 3
        assert "raise staging_mib" in made.told(1).reason
        os.kill(backend_of(made).process, signal.SIGCONT)
        told = made.ended("api-a", "kept")
        assert (told.rows + told.dropped, told.dropped) == (200 * 32 * 3, dropped)


BLOCKING = {"kind": "fs", "policy": "block"}


def send_when_full(made: Rig, number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop the writer; when the engine waits for room, send it this signal."""
    arena, process, waited = made.copier.arena, backend_of(made).process, list[int]()
    os.kill(process, signal.SIGSTOP)

    def wait(nbytes: int, is_served: Callable[[], bool]) -> ArenaRegion | None:
        region = arena.allocate(nbytes)
        if region is None and not waited:
            waited.append(nbytes)
            os.kill(process, number)
        return region or StagingArena.wait_for_room(arena, nbytes, is_served)

    monkeypatch.setattr(arena, "wait_for_room", wait)
    return waited


def test_a_blocking_consumer_in_the_writer_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking = {**BLOCKING, "folder": str(tmp_path / "s")}
    with remote_rig({"consumers": {"fs": blocking}, "staging_mib": 1}) as made:
        made.enter("a", 1, capture_plan(points=POINTS, to=FS))
        waited = send_when_full(made, signal.SIGCONT, monkeypatch)
        for step in range(200):
            made.step(("a", 32 * step, 32))
        assert waited
        told = made.ended("api-a", "kept")
        assert (told.rows, told.lost) == (200 * 32 * 3, 0)


def test_generation_that_waits_for_the_writer_continues_when_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking = {**BLOCKING, "folder": str(tmp_path / "s")}
    with remote_rig({"consumers": {"fs": blocking}, "staging_mib": 1}) as made:
        made.enter("a", 1, capture_plan(points=POINTS, to=FS))
        waited = send_when_full(made, signal.SIGKILL, monkeypatch)
        for step in range(200):
            made.step(("a", 32 * step, 32))
        assert waited
        until(lambda: made.told(1).state == "failed")
        assert made.told(1).dropped == 200 * 32 * 3


def test_signals_to_the_process_group_do_not_end_the_writer(tmp_path: Path) -> None:
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        process = backend_of(made).process
        assert os.getsid(process) != os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, process) > os.getpriority(os.PRIO_PROCESS, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process, number)
        made.enter("a", 1, capture_plan(to=FS))
        made.step(("a", 0, 3))
        assert made.ended("api-a", "kept").rows == 3
        watched = open_pidfd(process)
    wait_for_end(watched)


def test_rows_of_requests_that_run_when_the_engine_closes_are_stored(tmp_path: Path) -> None:
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        made.enter("a", 1, capture_plan(to=FS))
        made.step(("a", 0, 3))
    assert len(clairai.open(tmp_path / "s").rows(1, point="post_block.0")) == 3


def await_next_writer(made: Rig) -> None:
    """Until rows of a new answer would be taken."""
    until(lambda: not state_of(made).failure, 60.0)


@pytest.mark.attack(450)
def test_a_killed_writer_is_replaced_and_the_next_capture_is_whole(tmp_path: Path) -> None:
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        made.enter("a", 1, capture_plan(to=FS))
        made.step(("a", 0, 8))
        assert made.ended("api-a", "kept").rows == 8
        made.backend.set_weights("second")
        first = backend_of(made).process
        os.kill(first, signal.SIGKILL)
        until(lambda: state_of(made).failure)
        await_next_writer(made)
        made.enter("b", 2, capture_plan(to=FS))
        assert backend_of(made).process != first
        made.step(("b", 0, 5))
        told = made.ended("api-b", "kept")
        assert (told.rows, told.lost) == (5, 0)
        state = state_of(made)
        assert (state.rows, state.dropped) == (8 + 5, 0)  # counted on, over both writers
        assert [place.state for place in state.places] == ["writing"]
    store = clairai.open(tmp_path / "s")
    for stream, count in ((1, 8), (2, 5)):
        assert store.rows(stream, point="post_block.0").position.tolist() == [*range(count)]
    weights = {entry: store.shard(entry).head.origin.weights for entry in store.shards}
    assert sorted(weights.values()) == ["second", "w"]


@pytest.mark.attack(451)
def test_rows_of_a_capture_that_lost_its_writer_are_counted_and_reach_no_other(
    tmp_path: Path,
) -> None:
    """An answer that goes on under the next writer has lost rows: none of the rest is stored."""
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        made.enter("a", 1, capture_plan(to=FS))
        made.step(("a", 0, 8))
        until(lambda: made.told(1).rows == 8 and not backend_of(made)._link.undelivered)
        os.kill(backend_of(made).process, signal.SIGKILL)
        until(lambda: state_of(made).failure)
        made.step(("a", 8, 1))
        await_next_writer(made)
        made.enter("b", 2, capture_plan(to=FS))
        for at in range(9, 19):
            made.step(("a", at, 1), ("b", at - 9, 1))
        told = made.ended("api-b", "kept")
        assert (told.rows, told.lost) == (10, 0)
        broken = made.told(1)
        assert (broken.state, broken.dropped) == ("failed", 1 + 10)
        assert "the capture writer process has ended" in broken.reason
        assert made.copier.arena.used_nbytes == 0
    store = clairai.open(tmp_path / "s")
    assert store.rows(2, point="post_block.0").position.tolist() == [*range(10)]
    assert [request.stream for request in store.requests()] == [2]


@pytest.mark.attack(452)
def test_a_suspended_writer_says_so_and_is_killed_and_replaced_when_it_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        process = backend_of(made).process
        watched = open_pidfd(process)
        with monkeypatch.context() as quick:  # the next writer is given its time
            quick.setattr(remote, "SILENT_S", 1.5)
            quick.setattr(remote, "END_S", 0.5)
            os.kill(process, signal.SIGSTOP)
            until(lambda: state_of(made).places[0].state == "stopped")
            reason = state_of(made).places[0].reason
            quick.setattr(remote, "GIVE_UP_S", 4.0)
            wait_for_end(watched)
        assert reason.startswith("the capture writer process does not")
        await_next_writer(made)
        made.enter("b", 2, capture_plan(to=FS))
        made.step(("b", 0, 5))
        assert made.ended("api-b", "kept").rows == 5


def test_a_writer_that_goes_on_in_time_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 1.5)
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        process = backend_of(made).process
        os.kill(process, signal.SIGSTOP)
        until(lambda: state_of(made).places[0].state == "stopped", 30.0)
        os.kill(process, signal.SIGCONT)
        until(lambda: state_of(made).places[0].state == "writing", 30.0)
        assert backend_of(made).process == process
        assert not state_of(made).failure


@pytest.mark.attack(453)
def test_writers_that_die_again_and_again_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_RESTARTS", 2)
    monkeypatch.setattr(remote, "MAX_PAUSE_S", 0.01)
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        backend = backend_of(made)

        def kill_the_next() -> bool:
            link = backend._next or backend._link
            with contextlib.suppress(ProcessLookupError):
                os.kill(link.process, signal.SIGKILL)
            return "too often" in state_of(made).failure

        until(kill_the_next, 60.0)
        made.enter("b", 2, capture_plan(to=FS))
        made.step(("b", 0, 5))
        told = made.told(2)
        assert (told.state, told.rows, told.dropped) == ("failed", 0, 5)


def test_an_engine_that_ends_while_a_writer_is_being_replaced_leaves_none(tmp_path: Path) -> None:
    with remote_rig({"folder": str(tmp_path / "s")}) as made:
        os.kill(backend_of(made).process, signal.SIGKILL)
        until(lambda: state_of(made).failure)
        await_next_writer(made)
        successor = backend_of(made)._next
        assert successor is not None
        watched = open_pidfd(successor.process)
    wait_for_end(watched)


def test_rows_that_a_dead_writer_never_took_leave_room_for_the_next(tmp_path: Path) -> None:
    with remote_rig({"folder": str(tmp_path / "s"), "staging_mib": 1}) as made:
        made.enter("a", 1, capture_plan(points=POINTS, to=FS))
        os.kill(backend_of(made).process, signal.SIGSTOP)
        for step in range(200):
            made.step(("a", 32 * step, 32))
        assert made.told(1).dropped  # the arena is full
        os.kill(backend_of(made).process, signal.SIGKILL)
        until(lambda: made.told(1).state == "failed")
        assert made.told(1).dropped == 200 * 32 * 3
        await_next_writer(made)
        made.enter("b", 2, capture_plan(points=POINTS, to=FS))
        made.step(("b", 0, 32), finished=("a",))  # as much as had no room before
        told = made.ended("api-b", "kept")
        assert (told.rows, told.lost) == (32 * 3, 0)
