"""An engine's speed while its reader is stopped, and what the reader lost.

One engine, 64 requests at once, 32 layers x 16 probes, a reader in a process of its own that is
stopped with SIGSTOP for 10 s at once, between times in which it reads.
Run: python -m bench.gpu_pauses
"""

from __future__ import annotations

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
from typing import Any, Final

import numpy as np

from bench.gpu_engines import Case, decode_times, engines
from clairai.library.engine_control import ask_engine
from clairai.ring.attach import RingReader
from clairai.wire import control_messages
from tests.engine.process import EngineProcess

CASE: Final = Case("32 layers x 16", ("post_block.*",), 16)
BATCH: Final = 64
NUM_NEW: Final = 256
PAUSE_S: Final = 10.0
TURNS: Final = ((False, PAUSE_S / 2), (True, PAUSE_S), (False, PAUSE_S / 2))  # is it stopped


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        engines("llama-3.1-8b", [CASE], Path(folder)) as running,
    ):
        found = measure(running[CASE.name])
    sys.stdout.write(json.dumps(found) + "\n")


def measure(engine: EngineProcess) -> dict[str, Any]:
    taken: dict[bool, list[float]] = {False: [], True: []}
    engine.call(decode_times, BATCH, NUM_NEW)  # warms
    before = engine.call(describe).published
    with _reader(engine.call(describe).socket) as (pid, pipe):
        for is_stopped, seconds in TURNS:
            os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
            taken[is_stopped] += _for(engine, seconds)
        os.kill(pid, signal.SIGCONT)
        published = engine.call(describe).published - before
        pipe.send(published)
        counts = pipe.recv()
    ratio = float(np.median(taken[True]) / np.median(taken[False]))
    found = {"published": published, **counts, "time a token, reader stopped": round(ratio, 4)}
    found["unaccounted"] = published - counts["delivered"] - counts["lost"]
    for name, value in found.items():
        sys.stdout.write(f"| reader stopped {PAUSE_S:.0f} s | {name} | {value} |\n")
    sys.stdout.flush()
    return found


def describe(llm: Any) -> control_messages.Description:
    """Runs in the engine's process."""
    return ask_engine(llm, control_messages.Describe(), control_messages.Description)


def _for(engine: EngineProcess, seconds: float) -> list[float]:
    """Seconds a step takes, of all requests for at least so long."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        found += engine.call(decode_times, BATCH, NUM_NEW).tolist()
    return found


@contextlib.contextmanager
def _reader(socket: str) -> Iterator[tuple[int, Connection]]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=read, args=(socket, theirs))
    process.start()
    theirs.close()  # so that a reader that dies is seen
    pipe.recv()  # attached
    assert process.pid is not None
    yield process.pid, pipe
    process.join()


def read(socket: str, pipe: Connection) -> None:
    """Take all that comes until told how many were published; runs in the reader's process."""
    with RingReader.attach(socket, start="newest") as reader:
        pipe.send(True)
        end = None
        while end is None or reader.statistics().delivered + reader.statistics().lost < end:
            if not reader.poll():
                time.sleep(1e-3)
            if end is None and pipe.poll(0):
                end = pipe.recv()
        counts = reader.statistics()
    pipe.send({"delivered": counts.delivered, "lost": counts.lost, "torn": counts.torn})


if __name__ == "__main__":
    main()
