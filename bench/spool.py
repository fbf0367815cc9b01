"""Scores of many requests through a real ring and a real spool process, without an engine.

Requests decode together, a row each in every step, as fast as the spool takes them. Then
`clairai.scores` finds all rows, every value is read, and one answer in a hundred is compared.
Memory is the most that the spool process ever had, and that of this process without files.
`--busy N` has so many other processes compute all the time, at a higher priority than the spool.
Run: python -m bench.spool [--requests N] [--tokens 300] [--columns 512] [--batch 256] [--busy 4]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import clairai
from tests.support.spooled_llm import PROMPT, SpooledLlm, expected_of, spooled_llm

RING_NBYTES = 64 << 20  # the default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    with (
        busy_processes(options.busy),
        tempfile.TemporaryDirectory() as folder,
        spooled_llm(Path(folder), num_columns=options.columns, ring_nbytes=RING_NBYTES) as llm,
    ):
        measure(llm, options.requests, options.tokens, options.batch)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(llm: SpooledLlm, num_requests: int, num_tokens: int, batch: int) -> None:
    with llm.connect() as client:
        pid = client.process
    own_mib = memory_mib("self", "RssAnon:")
    begin_s = time.perf_counter()
    outputs = llm.generate(num_requests, num_tokens, batch=batch)
    generated_s = time.perf_counter()
    spool_cpu_s = cpu_s(pid)
    outputs_mib = memory_mib("self", "RssAnon:")
    found = clairai.scores(llm, outputs)
    scored_s = time.perf_counter()
    num_rows = sum(int(np.isfinite(scores.scores_NP.sum(axis=1)).sum()) for (scores,) in found)
    read_s = time.perf_counter()
    for output, (scores,) in list(zip(outputs, found, strict=True))[::100]:
        np.testing.assert_array_equal(scores.scores_NP, expected_of(output, llm.num_columns))
    if num_rows != num_requests * (PROMPT + num_tokens - 1):
        raise SystemExit(f"{num_rows} rows of {num_requests} requests")
    nbytes = num_rows * llm.num_columns * 4
    sys.stdout.write(
        f"rows {num_rows}, {nbytes / 1e9:.2f} GB of scores, all found\n"
        f"published and kept {nbytes / 1e6 / (generated_s - begin_s):.0f} MB/s, "
        f"{nbytes / 1e6 / spool_cpu_s:.0f} MB in a second of the spool's CPU; "
        f"of {generated_s - begin_s:.0f} s the writer waited {llm.room.waited_s:.0f} s\n"
        f"scores() {1e6 * (scored_s - generated_s) / num_rows:.2f} us a row, "
        f"values read {nbytes / 1e6 / (read_s - scored_s):.0f} MB/s\n"
        f"memory: spool process {memory_mib(pid, 'VmHWM:'):.0f} MiB at most, "
        f"this process {memory_mib('self', 'RssAnon:') - outputs_mib:.0f} MiB more after scores(), "
        f"outputs themselves {outputs_mib - own_mib:.0f} MiB\n"
    )


def cpu_s(process: int) -> float:
    """Of all threads, in the program and in the kernel."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: int | str, key: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


if __name__ == "__main__":
    main()
