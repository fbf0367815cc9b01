"""Measure how fast the store writes, relative to a plain file on the same disk.

    python -m bench.store FOLDER

In turn: a plain file, written in pieces of 8 MiB and synced; stores of as many bytes, filled by one
request and by 1,000 at once. Rows are bfloat16 at width 4096, encoded as `raw` and offered with the
policy `block`. The time runs from before the folder is made until everything is synced.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.store.row_block import Origin, RowBlock
from clairai.store.write import Writer
from clairai.wire.ring_messages import DECODE, ROW
from scripts.numbers import stamp, table, write_section

WIDTH: Final = 4096
ROWS: Final = 1024  # of a step: 8 MiB
NBYTES: Final = 2 << 30
TURNS: Final = 5
ORIGIN: Final = Origin.of(
    model="bench",
    weights="v1",
    dtype="bfloat16",
    width=WIDTH,
    encoder="raw",
    parameters={"dtype": "bfloat16"},
)
EXPLANATION: Final = (
    f"{NBYTES >> 20} MiB of rows, `raw` at width {WIDTH}, {TURNS} turns of all kinds, the "
    "medians. The plain file is written in pieces of 8 MiB and synced once. A store is made, "
    "written in shards of 64 MiB, each synced and committed, and closed. A step is 1,024 rows."
)
Values = NDArray[np.uint16]


def main(folder: Path) -> None:
    began_s = time.monotonic()
    values = np.random.default_rng(0).integers(0, 1 << 16, (ROWS, WIDTH), dtype=np.uint16)
    kinds: dict[str, Callable[[Path], float]] = {
        "plain file": lambda path: plain(path, values),
        "store, one request": lambda path: stored(path, steps(values, num_requests=1)),
        "store, 1,000 requests, a block for each step": lambda path: stored(
            path, steps(values, num_requests=1000)
        ),
        "store, 1,000 requests, a block for each row": lambda path: stored(
            path, lone_rows(steps(values, num_requests=1000))
        ),
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(TURNS):
        for kind, measure in kinds.items():
            speed = NBYTES / measured(measure, folder / "bench-store") / 1e6
            speeds[kind].append(speed)
            print(f"turn {turn}: {kind}: {speed:.0f} MB/s", flush=True)
    medians = {kind: statistics.median(found) for kind, found in speeds.items()}
    lines = [
        (kind, f"{median:.0f}", f"{median / medians['plain file']:.2f}")
        for kind, median in medians.items()
    ]
    found = table(("kind", "MB/s", "of the plain file"), lines)
    print(found)
    took = f"{time.monotonic() - began_s:.0f} s"
    write_section(
        "Captures on disk", [stamp("python -m bench.store FOLDER", took=took), EXPLANATION, found]
    )


def measured(measure: Callable[[Path], float], path: Path) -> float:
    try:
        return measure(path)
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()  # what was deleted is not paid for by the next one


def plain(path: Path, values: Values) -> float:
    piece = values.tobytes()
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(NBYTES // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())
    return time.perf_counter() - start_s


def stored(path: Path, blocks: Iterator[RowBlock]) -> float:
    start_s = time.perf_counter()
    with Writer(path, policy="block") as writer:
        for block in blocks:
            writer.offer(block)
    return time.perf_counter() - start_s


def steps(values: Values, *, num_requests: int) -> Iterator[RowBlock]:
    for step in range(NBYTES // values.nbytes):
        rows_N = np.zeros(ROWS, ROW)
        index_N = step * ROWS + np.arange(ROWS)
        rows_N["stream"], rows_N["position"] = index_N % num_requests, index_N // num_requests
        rows_N["phase"] = DECODE
        yield RowBlock(ORIGIN, "post_block.15", rows_N, {"values": values})


def lone_rows(blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
    for block in blocks:
        for n in range(block.num_rows):
            values = block.arrays["values"][n : n + 1]
            yield RowBlock(block.origin, block.point, block.rows_N[n : n + 1], {"values": values})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
