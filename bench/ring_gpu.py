"""Latency of a ring that the GPU writes, and a check that nothing is torn.

Both homes, each with a reader in a process of its own, attached as any reader is. Latency: from the
GPU's clock as it commits a step to the record in the reader's hands, the reader spinning. Stress:
records whose every field follows from their number, faster than a reader can take them, the reader
stopped for a while in between.
Run: python -m bench.ring_gpu [--records 100000000] [--homes host device]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from bench.ring_writer import NUM_COLUMNS, STREAM, Writer
from clairai.ring.attach import RingReader
from clairai.ring.reader import Record

NUM_LATENCIES: Final = 5000
PERIOD_S: Final = 1e-3
PAUSE_S: Final = 10.0


@triton.jit
def read_clock(out_ptr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, tl.extra.cuda.globaltimer())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000_000, help="0: latency alone")
    parser.add_argument("--homes", nargs="*", default=["host", "device"])
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for home in options.homes:
        found[home] = latency(home) | (stress(home, options.records) if options.records else {})
        for name, value in found[home].items():
            sys.stdout.write(f"| {home} | {name} | {value} |\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(found) + "\n")


def latency(home: str) -> dict[str, Any]:
    with _writer(home, ahead=1) as writer, _reader(writer, take_latencies) as reader:
        before = _clock_offset()
        writer.stamp_with(before.offset_ns)
        for _ in range(NUM_LATENCIES):
            begin_s = time.perf_counter()
            writer.write(num_rows=1)
            while time.perf_counter() - begin_s < PERIOD_S:
                pass
        now_N, stamp_N = reader.recv()
        after = _clock_offset()
    # The GPU's clock is a few millionths faster or slower: in seconds that is more than a latency.
    gained_ns = after.offset_ns - before.offset_ns
    elapsed_N = (now_N - before.at_ns) / (after.at_ns - before.at_ns)
    p50, p99 = np.percentile(now_N - stamp_N - gained_ns * elapsed_N, (50, 99)) / 1e3
    return {
        "latency p50 us": round(p50, 1),
        "latency p99 us": round(p99, 1),
        "clock uncertain by us": round(max(before.error_ns, after.error_ns) / 1e3, 1),
        "clock gained us": round(gained_ns / 1e3, 1),
    }


def stress(home: str, num_records: int) -> dict[str, Any]:
    with _writer(home, ahead=1024) as writer, _reader(writer, verify) as reader:
        begin_s = time.perf_counter()
        before = _write(writer, num_records // 3)
        paused = _write_while_stopped(writer, num_records // 3, reader.pid)
        _write(writer, num_records - writer.published)
        seconds = time.perf_counter() - begin_s
        reader.send(writer.published)
        counts = reader.recv()
    accounted = counts["delivered"] + counts["lost"]
    return {
        "published": writer.published,
        **counts,
        "unaccounted": writer.published - accounted,
        "million records a second": round(writer.published / seconds / 1e6, 2),
        "speed while the reader was stopped": round(paused / before, 4),
    }


def _write(writer: Writer, num_records: int) -> float:
    """Records a second."""
    first, begin_s = writer.published, time.perf_counter()
    while writer.published < first + num_records:
        writer.write(num_rows=writer.most_rows)
    writer.flush()
    return (writer.published - first) / (time.perf_counter() - begin_s)


def _write_while_stopped(writer: Writer, num_records: int, pid: int) -> float:
    os.kill(pid, signal.SIGSTOP)
    begin_s = time.perf_counter()
    speed = _write(writer, num_records)
    time.sleep(max(0.0, PAUSE_S - (time.perf_counter() - begin_s)))
    os.kill(pid, signal.SIGCONT)
    return speed


@contextlib.contextmanager
def _writer(home: str, ahead: int) -> Iterator[Writer]:
    with tempfile.TemporaryDirectory() as folder, Writer(Path(folder), home, ahead) as writer:
        writer.write(num_rows=1)  # compiles
        writer.flush()
        yield writer


class _Child:
    """A reader's process and the pipe to it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.pid = process.pid
        self.send, self.recv = pipe.send, pipe.recv


@contextlib.contextmanager
def _reader(writer: Writer, work: Any) -> Iterator[_Child]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=work, args=(str(writer.path), theirs, writer.per_record))
    process.start()
    pipe.recv()  # attached
    yield _Child(process, pipe)
    process.join()


def take_latencies(path: str, pipe: Connection, _per_record: int) -> None:
    """Spin until every record has come; runs in the reader's process."""
    with RingReader.attach(path, start="newest") as reader:
        pipe.send(True)
        found: list[tuple[int, int]] = []
        while len(found) < NUM_LATENCIES:
            records = reader.poll()
            now_ns = time.monotonic_ns()
            found += [(now_ns, record.stamp_ns) for record in records]
        pipe.send(np.array(found).T)


def verify(path: str, pipe: Connection, per_record: int) -> None:
    """Check every record that can be had; runs in the reader's process."""
    with RingReader.attach(path, start=1) as reader:
        pipe.send(True)
        wrong, end = 0, None
        while end is None or reader.statistics().lag:
            for record in reader.poll():
                wrong += not is_true(record, per_record)
            if end is None and pipe.poll(0):
                end = pipe.recv()
        counts = reader.statistics()
    found = {"delivered": counts.delivered + 1, "lost": counts.lost, "torn": counts.torn}
    pipe.send({**found, "wrong": wrong})  # + 1: the first, which only compiled the kernel


def is_true(record: Record, per_record: int) -> bool:
    """Every field follows from the record's number: see ring_writer.mark()."""
    n = 1 + (record.seq - 1) * per_record + np.arange(len(record.rows), dtype=np.int64)
    rows = record.rows
    scores = (n[:, None] + 17 * np.arange(NUM_COLUMNS)) % 8191
    return bool(
        len(rows) == per_record
        and (rows["stream"] == STREAM).all()
        and (rows["position"] == n % 2147483647).all()
        and (rows["token_id"] == n * 7919 % 2147483647).all()
        and (record.scores_RC == scores).all()
    )


class Clock(NamedTuple):
    """What to add to the GPU's clock to have the host's, by how much it may be wrong, and when."""

    offset_ns: int
    error_ns: int
    at_ns: int


def _clock_offset() -> Clock:
    """The quickest answer says it best."""
    seen = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    words = seen.numpy()
    best = Clock(0, 1 << 62, 0)
    for _ in range(300):
        words[0] = 0
        begin_ns = time.monotonic_ns()
        read_clock[(1,)](seen)
        while not words[0]:
            pass
        end_ns = time.monotonic_ns()
        if end_ns - begin_ns < 2 * best.error_ns:
            middle_ns = (begin_ns + end_ns) // 2
            best = Clock(middle_ns - int(words[0]), (end_ns - begin_ns) // 2, middle_ns)
    return best


if __name__ == "__main__":
    main()
