"""`clairai.scores` over a real ring and a real spool process: complete, bounded, and never hung."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

import clairai
from clairai.engine.publish import ring_room
from clairai.errors import ConfigError, RequestError, RowsLostError
from clairai.library import scores as scores_module
from clairai.local.private_socket import socket_path
from clairai.match import stored_rows
from clairai.settings import SpoolSettings
from clairai.spool.server import MAX_CONNECTIONS
from clairai.wire import control_messages
from clairai.wire.spool_messages import SOCKET_KIND
from tests.support.ring_engine import DEADLINE_S, forked, until
from tests.support.spooled_llm import (
    PROMPT,
    Output,
    SpooledLlm,
    expected_of,
    output_of,
    spooled_llm,
)

MIB = 1 << 20
WIDE = 512  # columns of 32 layers with 16 probes each


def assert_complete(llm: SpooledLlm, outputs: Sequence[Output]) -> None:
    found = clairai.scores(llm, outputs)
    assert len(found) == len(outputs)
    for output, (scores,) in zip(outputs, found, strict=True):
        np.testing.assert_array_equal(scores.scores_NP, expected_of(output, llm.num_columns))


def spool_pid(llm: SpooledLlm) -> int:
    """The child of this process that is the spool."""
    with llm.connect() as client:
        return client.process


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_row_of_many_laps_of_the_ring_arrives(tmp_path: Path) -> None:
    with spooled_llm(tmp_path, num_columns=16, ring_nbytes=MIB // 8) as llm:
        outputs = llm.generate(300, 12, batch=32)
        assert llm.published > 10 * llm.engine.writer.statistics().slots
        assert_complete(llm, outputs)
        assert_complete(llm, outputs[7:11])


def test_memory_is_bounded_whatever_the_number_of_rows(tmp_path: Path) -> None:
    """128 MiB of scores pass through; neither process holds a quarter of that."""
    settings = SpoolSettings(memory_mib=16, folder=str(tmp_path))
    with spooled_llm(tmp_path, num_columns=WIDE, ring_nbytes=4 * MIB, settings=settings) as llm:
        warm = llm.generate(4, 20, batch=4)
        assert_complete(llm, warm)
        pid, spool_before, own_before = spool_pid(llm), peak_kib(spool_pid(llm)), own_kib()
        outputs = llm.generate(256, 256, batch=128)
        found = clairai.scores(llm, outputs)
        values = sum(float(np.nansum(scores.scores_NP[:, 7])) for (scores,) in found)
        expected = sum(float(np.nansum(expected_of(one, WIDE)[:, 7])) for one in outputs)
        assert values == expected
        nbytes = sum(scores.token_ids.size for (scores,) in found) * WIDE * 4
        assert nbytes > 128 * MIB
        assert peak_kib(pid) - spool_before < 32 << 10
        assert own_kib() - own_before < 32 << 10


def peak_kib(pid: int) -> int:
    """The most memory that a process ever had, its mappings of files included."""
    return _status(f"/proc/{pid}/status", "VmHWM:")


def own_kib() -> int:
    """Memory of this process now, without what is in files and can be read again."""
    return _status("/proc/self/status", "RssAnon:")


def _status(path: str, key: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def test_a_spool_that_is_starved_for_seconds_costs_time_and_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_room, "STALL_S", 600.0)  # the test says how long it is starved
    with spooled_llm(tmp_path) as llm, ThreadPoolExecutor() as pool:
        assert_complete(llm, llm.generate(3, 5))
        slots = llm.engine.writer.statistics().slots
        for _ in range(3):
            pid = spool_pid(llm)
            os.kill(pid, signal.SIGSTOP)
            generating = pool.submit(llm.generate, 100, 30, batch=4)
            until(lambda: llm.published == llm.spool.num_read + slots - 1)  # the ring is full
            assert not generating.done()
            os.kill(pid, signal.SIGCONT)
            assert_complete(llm, generating.result())
        assert llm.room.waited_s > 0


def test_a_spool_that_was_stopped_loses_a_number_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_room, "STALL_S", 0.2)
    with spooled_llm(tmp_path) as llm:
        before = llm.generate(3, 5)
        assert_complete(llm, before)
        pid = spool_pid(llm)
        os.kill(pid, signal.SIGSTOP)
        for position in range(2000):  # the engine waits once, and not for long
            llm.forward([(5000, position)])
        assert 0.2 <= llm.room.waited_s < 20  # for each of them it would be 400 s
        overrun = llm.add_request(5000, 1900)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(RowsLostError, match=r"[1-9]\d* records were overwritten before"):
            clairai.scores(llm, [overrun])
        assert_complete(llm, before)
        assert_complete(llm, llm.generate(3, 5))


def test_a_spool_that_was_killed_is_replaced_and_others_go_on(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        early = llm.generate(3, 5)
        assert_complete(llm, early)
        llm.generate(40, 40, batch=4)  # more than the ring holds
        late = llm.generate(2, 5)
        pid = spool_pid(llm)
        os.kill(pid, signal.SIGKILL)
        until(lambda: llm.spool.returncode is not None)
        assert_complete(llm, late)  # of the ring, by the next spool
        lost = r"7 of 8 rows of request 'request-1000' were lost: [1-9]\d* records were overwritten"
        with pytest.raises(RowsLostError, match=lost):
            clairai.scores(llm, early)
        assert spool_pid(llm) != pid
        assert_complete(llm, llm.generate(50, 30, batch=4))


def test_rows_of_two_spools_are_never_mixed_up(tmp_path: Path) -> None:
    """What was mapped of the first spool is not taken for a file of the second."""
    with spooled_llm(tmp_path) as llm:
        first = llm.generate(3, 5)
        held = clairai.scores(llm, first)
        os.kill(spool_pid(llm), signal.SIGKILL)
        until(lambda: llm.spool.returncode is not None)
        assert_complete(llm, llm.generate(30, 5))
        for output, (scores,) in zip(first, held, strict=True):
            np.testing.assert_array_equal(scores.scores_NP, expected_of(output, llm.num_columns))


def test_a_spool_ends_with_its_engine_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        outputs = llm.generate(3, 5)
        (kept,) = clairai.scores(llm, outputs[:1])[0]
        pid = spool_pid(llm)
    assert not is_running(pid)
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(kept.scores_NP, expected_of(outputs[0], 4))


def test_an_engine_that_dies_takes_its_spool_with_it(tmp_path: Path) -> None:
    with forked(_serve, tmp_path) as process:
        path = tmp_path / "spool.pid"
        until(lambda: path.exists() and path.read_text().endswith("\n"))
        pid = int(path.read_text())
        assert is_running(pid)
        process.kill()
        until(lambda: not is_running(pid))


def _serve(folder: Path) -> None:
    with spooled_llm(folder) as llm:
        llm.generate(3, 5)
        (folder / "spool.pid").write_text(f"{spool_pid(llm)}\n")
        signal.pause()


def test_two_engines_in_one_folder_have_their_own_rows(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as one, spooled_llm(tmp_path, num_columns=7) as other:
        first, second = one.generate(5, 9), other.generate(6, 4)
        assert_complete(one, first)
        assert_complete(other, second)


def test_a_request_that_the_engine_does_not_know_is_refused(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        outputs = [*llm.generate(2, 5), output_of(77, 5)]
        with pytest.raises(RequestError, match="1 of 3 requests are not known"):
            clairai.scores(llm, outputs)


def test_without_a_spool_the_newest_rows_come_from_the_ring(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        llm.keeps_scores = False
        outputs = llm.generate(3, 5)
        assert_complete(llm, outputs)
        llm.generate(40, 40, batch=4)
        with pytest.raises(RowsLostError, match="keep them with scores=True"):
            clairai.scores(llm, outputs)


def test_scores_share_the_files_that_they_map(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        outputs = llm.generate(20, 5)
        found = [clairai.scores(llm, [output]) for output in outputs]
        assert len(found) == 20
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped = [line for line in maps if f"{tmp_path}/" in line]
        assert len(mapped) == 1


def test_an_answer_that_lacks_rows_is_given_as_it_is_if_asked_for(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        whole = llm.generate(2, 5)
        nothing = llm.add_request(6000, 9)
        llm.forward([(7000, at) for at in range(6)])
        partly = llm.add_request(7000, 9)
        found = clairai.scores(llm, [whole[0], nothing, partly, whole[1]], on_loss="keep")
        assert [scores.missing for (scores,) in found] == [0, 11, 5, 0]
        assert found[1][0].names == ()
        np.testing.assert_array_equal(found[2][0].scores_NP[:6], expected_of(partly, 4)[:6])
        assert np.isnan(found[2][0].scores_NP[6:]).all()
        np.testing.assert_array_equal(found[3][0].scores_NP, expected_of(whole[1], 4))


def test_requests_are_sorted_in_parts_that_memory_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "TOKENS_AT_ONCE", 40)
    monkeypatch.setattr(stored_rows, "ROWS_AT_ONCE", 13)
    with spooled_llm(tmp_path) as llm:
        outputs = llm.generate(30, 9, batch=7)
        assert_complete(llm, outputs)
        assert_complete(llm, outputs[::-1])


def test_each_answer_is_reduced_to_a_number_for_each_probe(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        outputs = llm.generate(5, 9)
        reduced = clairai.scores(llm, outputs, reduce="max")
        for output, (found,) in zip(outputs, reduced, strict=True):
            expected = expected_of(output, 4)[PROMPT:-1]
            np.testing.assert_array_equal(found.values_P, expected.max(axis=0))
            assert (found.num_rows, found["p2"]) == (8, expected[:, 2].max())
        with pytest.raises(ConfigError, match="reduce is 'most'; use one of max, min"):
            clairai.scores(llm, outputs, reduce="most")  # type: ignore[call-overload]


def test_a_bar_says_how_many_rows_there_are_and_how_many_were_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with spooled_llm(tmp_path) as llm:
        outputs = [*llm.generate(4, 9), llm.add_request(6000, 9)]
        clairai.scores(llm, outputs, on_loss="keep", progress=True)
    shown = capsys.readouterr().err
    assert "Scores: 100%" in shown
    assert "5/5" in shown
    assert "lost=11, rows=44" in shown


class AsyncLlm:
    """As vLLM's AsyncLLM: calls of the engine are awaited."""

    def __init__(self, llm: SpooledLlm) -> None:
        self._llm = llm
        self.asked: list[type] = []

    async def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        self.asked.append(type(msgspec.msgpack.decode(args[0], type=control_messages.Control)))
        await asyncio.sleep(0)
        return self._llm.collective_rpc(method, args)


def test_many_requests_of_an_async_engine_are_read_at_once_and_stop_it_once(tmp_path: Path) -> None:
    """Only the first call asks the engine to finish what it publishes."""

    async def read(engine: AsyncLlm, outputs: Sequence[Output]) -> None:
        (first,) = await clairai.async_scores(engine, outputs[:1])
        found = await asyncio.gather(
            *(clairai.async_scores(engine, [output]) for output in outputs[1:])
        )
        for output, answers in zip(outputs, [first, *(one for (one,) in found)], strict=True):
            np.testing.assert_array_equal(answers[0].scores_NP, expected_of(output, 4))

    with spooled_llm(tmp_path) as llm:
        outputs = llm.generate(20, 9, batch=5)
        llm.connect().close()  # it has started
        engine = AsyncLlm(llm)
        asyncio.run(read(engine, outputs))
    assert engine.asked.count(control_messages.Describe) == 1
    assert engine.asked.count(control_messages.FindStreams) == 20


def test_an_async_engine_says_what_was_lost_and_has_its_spool_replaced(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        engine, early = AsyncLlm(llm), llm.generate(2, 9)
        asyncio.run(clairai.async_scores(engine, early))
        llm.generate(40, 40, batch=4)
        os.kill(spool_pid(llm), signal.SIGKILL)
        until(lambda: llm.spool.returncode is not None)
        with pytest.raises(RowsLostError, match="11 of 12 rows of request"):
            asyncio.run(clairai.async_scores(engine, early))
        later = llm.generate(2, 9)
        ((found,), _) = asyncio.run(clairai.async_scores(engine, later, reduce="last"))
        assert found.tokens_P.tolist() == [10, 10, 10, 10]


def test_a_request_that_is_not_finished_has_no_scores_yet(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        (output,) = llm.generate(1, 9)
        with pytest.raises(RequestError, match="'request-1000' is not finished"):
            clairai.scores(llm, [dataclasses.replace(output, finished=False)])


def test_peers_that_send_nonsense_are_disconnected_and_take_no_place(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        outputs = llm.generate(3, 5)
        llm.connect().close()
        path = socket_path(tmp_path, llm.engine.epoch, SOCKET_KIND)
        for _ in range(MAX_CONNECTIONS + 1):
            send_nonsense(path)
        assert_complete(llm, outputs)


def send_nonsense(path: Path) -> None:
    """Return when the spool has hung up."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(str(path))
        peer.sendall(b"\xff" * 8)
        with contextlib.suppress(ConnectionResetError):  # it has not read all of that
            assert peer.recv(1) == b""
