"""Takes a folder on the disk to measure; gives the store's speed over the disk's own, in one run.

    python -m bench.store FOLDER

By turns: a plain file, written in 8 MiB pieces and synced; a store of as many bytes; a store filled
by 1,000 requests at once, their rows in turns. Rows are what `raw` makes of bfloat16 at width 4096,
offered under the policy `block`. What is timed ends when all is synced.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from clairai.store.rows import Block, Origin
from clairai.store.writer import Limits, Writer
from clairai.wire import DECODE, ROW

WIDTH = 4096
ROWS = 1024  # of a block: 8 MiB
NBYTES = 2 << 30
TURNS = 5
PIECE = 8 << 20


def main(folder: Path) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (ROWS, WIDTH), dtype=np.uint16)
    kinds: dict[str, Callable[[Path], float]] = {
        "plain file": lambda path: plain(path, values),
        "store, 1 request": lambda path: store(path, values, num_requests=1),
        "store, 1000 requests": lambda path: store(path, values, num_requests=1000),
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(TURNS):
        for kind, measure in kinds.items():
            path = folder / "bench-store"
            nbytes_per_s = NBYTES / measure(path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            speeds[kind].append(nbytes_per_s)
            print(f"turn {turn}: {kind}: {nbytes_per_s / 1e6:.0f} MB/s", flush=True)
    disk = statistics.median(speeds["plain file"])
    for kind, found in speeds.items():
        median = statistics.median(found)
        print(f"median: {kind}: {median / 1e6:.0f} MB/s, {median / disk:.3f} of the plain file")


def plain(path: Path, values: np.ndarray[tuple[int, int], np.dtype[np.uint16]]) -> float:
    piece = np.resize(values, PIECE // 2).tobytes()
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(NBYTES // PIECE):
            file.write(piece)
        os.fsync(file.fileno())
    return time.perf_counter() - start_s


def store(
    path: Path, values: np.ndarray[tuple[int, int], np.dtype[np.uint16]], num_requests: int
) -> float:
    origin = Origin.of(
        model="bench",
        weights="v1",
        dtype="bfloat16",
        width=WIDTH,
        encoder="raw",
        parameters={"dtype": "bfloat16"},
    )
    start_s = time.perf_counter()
    with Writer(path, policy="block", limits=Limits()) as writer:
        for step in range(NBYTES // values.nbytes):
            rows_N = np.zeros(ROWS, ROW)
            index_N = step * ROWS + np.arange(ROWS)
            rows_N["stream"], rows_N["position"] = index_N % num_requests, index_N // num_requests
            rows_N["phase"] = DECODE
            writer.offer(Block(origin, "post_block.15", rows_N, {"values": values}))
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main(Path(sys.argv[1]))
