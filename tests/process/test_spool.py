"""`clairai.scores` over a real ring and a real spool process: complete, bounded, and never hung."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import clairai
from clairai.errors import RequestError, RowsLostError
from clairai.settings import SpoolSettings
from tests.support.ring_engine import forked, until
from tests.support.spooled_llm import Output, SpooledLlm, expected_of, output_of, spooled_llm

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


def test_a_spool_that_was_stopped_loses_a_number_and_goes_on(tmp_path: Path) -> None:
    with spooled_llm(tmp_path) as llm:
        before = llm.generate(3, 5)
        assert_complete(llm, before)
        pid = spool_pid(llm)
        os.kill(pid, signal.SIGSTOP)
        for position in range(2000):  # the engine never waits
            llm.forward([(5000, position)])
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
        with pytest.raises(RowsLostError, match="all rows of request"):
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
