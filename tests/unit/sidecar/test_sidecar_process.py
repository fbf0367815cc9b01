"""What `clairai sidecar`, as a process, prints for real rings in a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clairai.local.heartbeat import read_process_state
from clairai.ring.writer import RingWriter
from clairai.wire.ring_messages import ROW, Bank, ProbeInfo
from tests.support.ring_engine import DEADLINE_S, running_engine, until

COMMAND = (sys.executable, "-m", "clairai.cli", "sidecar")


def _bank_of(version: int) -> Bank | None:
    return Bank(1, (ProbeInfo("kind", "post_block.0"),)) if version == 1 else None


def _publish(writer: RingWriter, positions: range, *, num_rows: int = 1) -> None:
    for position in positions:
        rows = np.zeros(num_rows, ROW)
        rows["stream"], rows["position"], rows["phase"] = 7, position, 1
        writer.publish(rows, np.ones((num_rows, 1), np.float32), bank_version=1, step=position)


@contextmanager
def _sidecar(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """The process, and the files of what it printed and said."""
    out, err = folder / "out", folder / "err"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        command = [*COMMAND, "--runtime-dir", str(folder), *arguments]
        process = subprocess.Popen(command, stdout=to_out, stderr=to_err)
    try:
        yield process, out, err
    finally:
        process.kill()
        process.wait()


def _lines(out: Path) -> list[dict[str, Any]]:
    """Whole lines only; at least one, for a test that looks at the last before there is any."""
    whole, _, _ = out.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()] or [{}]


def _await_row(out: Path, position: int) -> None:
    until(lambda: _lines(out)[-1].get("position") == position)


def _ended(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    process.send_signal(number)
    return process.wait(DEADLINE_S)


def test_it_waits_and_prints_every_row_of_one_engine_after_another(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with _sidecar(tmp_path, "--json", "--events") as (process, out, err):
        until(lambda: f"waiting for an engine in {tmp_path}" in err.read_text())
        for positions in (range(3), range(3, 6)):
            with running_engine(tmp_path, bank_of=_bank_of) as engine:
                _publish(engine.writer, positions)
                _await_row(out, positions[-1])
            until(lambda: _lines(out)[-1].get("event") == "detached")
        assert _ended(process, signal.SIGTERM) == 0
    told = _lines(out)
    assert [line["position"] for line in told if "position" in line] == [0, 1, 2, 3, 4, 5]
    assert [line["event"] for line in told if "event" in line] == ["attached", "detached"] * 2
    assert "engine gone; 3 records delivered, 0 lost; waiting" in err.read_text()


def test_loss_is_an_event_and_a_line_on_stderr(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running_engine(tmp_path, bank_of=_bank_of) as engine:
        with _sidecar(tmp_path, "--json", "--events") as (process, out, err):
            until(lambda: "attached" in err.read_text())
            process.send_signal(signal.SIGSTOP)
            until(lambda: _is_suspended(process))  # else it may read what comes next
            _publish(engine.writer, range(20))
            process.send_signal(signal.SIGCONT)
            _await_row(out, 19)
            assert _ended(process, signal.SIGINT) == 0
        told = _lines(out)
    lost = sum(line["records"] for line in told if line.get("event") == "lost")
    printed = [line["position"] for line in told if "position" in line]
    assert printed == [*range(20 - len(printed), 20)]
    assert lost == 20 - len(printed) > 0
    assert f"this engine has lost {lost} in all" in err.read_text()


def _is_suspended(process: subprocess.Popen[bytes]) -> bool:
    state = read_process_state(process.pid)
    return state is not None and state.letter == "T"


def test_a_record_with_unknown_columns_is_lost_and_not_guessed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with (
        running_engine(tmp_path, bank_of=lambda _: None) as engine,
        _sidecar(tmp_path, "--json", "--events") as (process, out, err),
    ):
        _publish(engine.writer, range(2))
        until(lambda: "this engine has lost 2 in all" in err.read_text())
        assert _ended(process, signal.SIGTERM) == 0
    assert {line["event"] for line in _lines(out)} == {"attached", "lost", "detached"}
    assert (_lines(out)[-1]["delivered"], _lines(out)[-1]["lost"]) == (0, 2)


def test_without_json_a_log_gets_plain_lines(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with (
        running_engine(tmp_path, bank_of=_bank_of) as engine,
        _sidecar(tmp_path) as (process, out, _),
    ):
        _publish(engine.writer, range(3))
        until(lambda: "3 rows · 3 records, 0 lost" in out.read_text())
        assert _ended(process, signal.SIGTERM) == 0
    assert "toy on vLLM 0.0.0" in out.read_text()
    assert "\x1b" not in out.read_text()


def test_newest_begins_after_what_is_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running_engine(tmp_path, bank_of=_bank_of) as engine:
        _publish(engine.writer, range(3))
        with _sidecar(tmp_path, "--json", "--from", "newest") as (process, out, err):
            until(lambda: "attached" in err.read_text())
            _publish(engine.writer, range(3, 5))
            until(lambda: len(_lines(out)) == 2)
            assert _ended(process, signal.SIGTERM) == 0
    assert [line["position"] for line in _lines(out)] == [3, 4]


def test_a_reader_that_leaves_ends_it_also_before_the_next_row(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running_engine(tmp_path, bank_of=_bank_of) as engine:
        _publish(engine.writer, range(3))
        command = [*COMMAND, "--runtime-dir", str(tmp_path), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0


def test_it_ends_when_told_to_even_if_nobody_reads_its_pipe(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running_engine(tmp_path, bank_of=_bank_of) as engine:
        command = [*COMMAND, "--runtime-dir", str(tmp_path), "--json"]
        reading, writing = os.pipe()
        process = subprocess.Popen(command, stdout=writing, stderr=subprocess.DEVNULL)
        os.close(writing)
        # More than a pipe holds, then an end that must not wait for a reader.
        until(lambda: _is_full(engine.writer, reading))
        assert _ended(process, signal.SIGTERM) == 0
        os.close(reading)


def _is_full(writer: RingWriter, reading: int) -> bool:
    import array
    import fcntl
    import termios

    _publish(writer, range(4), num_rows=100)
    held = array.array("i", [0])
    fcntl.ioctl(reading, termios.FIONREAD, held)
    return held[0] > 60_000
