"""A real writer on a real disk, killed with SIGKILL or on a filesystem that is too small."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from clairai.store import read
from clairai.store.disk import LocalDisk
from clairai.store.recover import verify
from clairai.store.write import Writer, WriterLimits
from tests.support.row_blocks import block, values

ROUNDS = 12
NUM_ROWS = 40
LIMITS = WriterLimits(shard_nbytes=20_000, seal_after_s=0.01, reserve_nbytes=0)


def write_until_killed(path: str, first: int) -> None:
    """Runs in a process of its own, and prints the number of each stream when it is committed."""
    with Writer(path, policy="block", limits=LIMITS) as writer:
        stream = first
        while True:
            writer.offer(block(stream, NUM_ROWS))
            if stream % 3 == 0:
                writer.flush()
                sys.stdout.write(f"{stream}\n")
                sys.stdout.flush()
            stream += 1


def _killed(path: Path, first: int, num_commits: int, after_s: float) -> int:
    """Killed a moment after so many commits; the last stream that was reported as committed."""
    call = (
        f"from tests.process.test_store_crash import *; write_until_killed({str(path)!r}, {first})"
    )
    writer = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    said = [writer.stdout.readline() for _ in range(num_commits)]
    time.sleep(after_s)  # the moment of the kill is what is tried
    writer.send_signal(signal.SIGKILL)
    said += writer.stdout.readlines()
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()
    whole = [int(line) for line in said if line.endswith("\n")]
    return whole[-1]


def test_sigkill_at_random_moments_loses_no_committed_row_and_the_next_writer_continues(
    tmp_path: Path,
) -> None:
    moment = random.Random(1)  # noqa: S311 - a test, not a secret
    first = 1
    committed: list[int] = []
    for number in range(ROUNDS):
        last = _killed(tmp_path / "s", first, 1 + number, moment.random() * 0.05)
        committed += range(first, last + 1)
        first = last + 1_000
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(first, NUM_ROWS))
    assert [one.fault for one in verify(LocalDisk(tmp_path / "s")) if one.fault] == []
    store = read.open(tmp_path / "s")
    found = {request.stream: request for request in store.requests()}
    assert {stream: found[stream].rows for stream in committed} == dict.fromkeys(
        committed, NUM_ROWS
    )
    for stream in random.Random(2).sample(committed, 50):  # noqa: S311
        expected = values(stream, np.arange(NUM_ROWS), "post_block.3")
        assert np.array_equal(store.rows(stream), expected)
    assert not any(name.endswith(".tmp") for name in os.listdir(tmp_path / "s"))


def fill_a_tiny_disk(path: str) -> None:
    """On a filesystem of 4 MiB: writing stops with a reason, and continues when room is made."""
    ballast = Path(path) / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    limits = WriterLimits(
        shard_nbytes=200_000,
        seal_after_s=0.01,
        retry_s=0.01,
        reserve_nbytes=100_000,
        queue_nbytes=400_000,
    )
    with Writer(Path(path) / "s", limits=limits) as writer:
        stream, longest_s = 0, 0.0
        while writer.state.name != "stopped" or not writer.counts.dropped:
            before_s = time.perf_counter()
            writer.offer(block(stream, 500))
            longest_s = max(longest_s, time.perf_counter() - before_s)
            stream += 1
            if stream > 200:
                time.sleep(0.001)  # the disk's thread has a turn
        reason, full = writer.state.reason, writer.counts
        assert not [one.fault for one in verify(LocalDisk(Path(path) / "s")) if one.fault]
        ballast.unlink()
        writer.flush()
        counts = writer.counts
    assert counts.offered == 500 * stream
    assert counts.accepted + counts.dropped == counts.offered
    assert counts.committed == counts.accepted
    assert counts.committed > full.committed
    store = read.open(Path(path) / "s")
    assert sum(request.rows for request in store.requests()) == counts.committed
    sys.stdout.write(f"{reason}\n{longest_s:.6f}\n")


def test_a_tiny_filesystem_that_is_full_stops_the_writer_with_a_reason_and_it_continues(
    tmp_path: Path,
) -> None:
    script = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1"'
    call = "import sys; from tests.process.test_store_crash import *; fill_a_tiny_disk(sys.argv[1])"
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, call]
    trial = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if trial.returncode:
        pytest.skip("no filesystem can be mounted here; test_store_writer has one that says ENOSPC")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    reason, longest_s = done.stdout.splitlines()
    assert "the disk is full" in reason
    # Whoever offers rows never waits for the disk: it is full until nothing more is offered.
    assert float(longest_s) < 10
