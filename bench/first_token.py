"""Where the time until the first token goes: of vLLM alone, and through clairai.

Starts both as bench.serving_load does, with every process noting when a request reaches it
(bench.trace_stages), and loads them in turns with as many streams as asked for. For each way: the
median over requests of the time at each stage, after the client has sent the request, and what it
took since the stage before. Notes cost microseconds; compare the first tokens with those of
bench.serving_load.
Run: python -m bench.first_token [--streams 1 16] [--tokens 48] [--requests 6] [--turns 2]
     [--shape llama-3.1-8b] [--probes 16] [--out build/first-token] [--vllm MORE OPTIONS OF VLLM]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from bench import serving_load
from bench.load_clients import PATH, Load, Seen, Stream
from bench.trace_stages import HEADER, STAGES, VARIABLE, Noted, read_notes
from clairai.launch.engine_command import is_cpu_build

SENT, CAME = "client sends it", "client has the first token"
ORDER: Final = (SENT, *(stage.name for stage in STAGES), CAME)
TRACING: Final = Path(__file__).parent / "tracing"


class TracedStream(Stream):
    """One connection that gives each of its requests an id."""

    def __init__(self, load: Load, seen: Seen, ids: Iterator[int], notes: list[Noted]) -> None:
        super().__init__(load, seen)
        self._ids, self._notes, self._id = ids, notes, ""

    def ask(self) -> None:
        self._id = f"trace{next(self._ids)}"
        raw = self._load.body
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"{HEADER}: {self._id}\r\nContent-Length: {len(raw)}\r\n\r\n"
        self._request = head.encode() + raw
        super().ask()

    def on_message_complete(self) -> None:  # called by the parser
        if self._first_ns:
            self._notes.append(Noted(SENT, self._id, self._sent_ns))
            self._notes.append(Noted(CAME, self._id, self._first_ns))
        super().on_message_complete()


async def load(work: Load, ids: Iterator[int]) -> list[Noted]:
    """All streams at once, from this process."""
    loop, address = asyncio.get_running_loop(), urlsplit(work.url)
    notes: list[Noted] = []
    streams: list[TracedStream] = []
    for _ in range(work.streams):
        _, stream = await loop.create_connection(
            lambda: TracedStream(work, Seen(), ids, notes),
            str(address.hostname),
            address.port or 80,
        )
        streams.append(stream)
    for stream in streams:
        stream.ask()
    faults = [fault for fault in await asyncio.gather(*(one.ended for one in streams)) if fault]
    if faults:
        raise RuntimeError(faults[0])
    return notes


def table(notes: Sequence[Noted]) -> list[dict[str, Any]]:
    """For each stage that requests went through: medians of its time, and of what it took."""
    times: dict[str, dict[str, int]] = defaultdict(dict)
    for note in notes:
        times[note.request][note.stage] = max(note.ns, times[note.request].get(note.stage, 0))
    whole = [one for one in times.values() if SENT in one and CAME in one]
    stages = [stage for stage in ORDER if any(stage in one for one in whole)]
    rows = []
    for before, stage in itertools.pairwise(stages):
        both = [one for one in whole if before in one and stage in one]
        since = [(one[stage] - one[SENT]) / 1e6 for one in both]
        took = [(one[stage] - one[before]) / 1e6 for one in both]
        rows.append(
            {
                "stage": stage,
                "at_ms": round(float(np.median(since)), 2),
                "took_ms": round(float(np.median(took)), 2),
                "took_p90_ms": round(float(np.percentile(took, 90)), 2),
                "requests": len(both),
            }
        )
    return rows


def measure(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    trace = options.out / "stages.tsv"
    paths = [str(TRACING), str(TRACING.parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ |= {VARIABLE: str(trace), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    folder = serving_load.model_folder(options.shape, work / "model")
    serving_load.write_probes(folder, work / "probes", options.probes)
    ids = itertools.count(1)
    with serving_load.serving(options, 1, work) as ways:
        for streams in options.streams:
            found = take_turns(ways, streams, options, ids)
            told = read_notes(trace)
            for way, notes in found.items():
                mine = {note.request for note in notes}
                rows = table([*notes, *(note for note in told if note.request in mine)])
                yield from ({"streams": streams, "way": way, **row} for row in rows)


def take_turns(
    ways: dict[str, Any], streams: int, options: argparse.Namespace, ids: Iterator[int]
) -> dict[str, list[Noted]]:
    """What clients noted of each way; the first turn warms up."""
    found: dict[str, list[Noted]] = {way: [] for way in ways}
    for turn in range(options.turns + 1):
        for way, (service, body) in ways.items():
            raw = json.dumps(body).encode()
            asked = Load(service.url, raw, streams, options.requests, options.tokens)
            notes = asyncio.run(load(asked, ids))
            found[way] += notes if turn else []
            time.sleep(serving_load.SETTLE_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=(1, 16))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--shape", default=None if is_cpu_build() else "llama-3.1-8b")
    parser.add_argument("--out", type=Path, default=Path("build/first-token"))
    parser.add_argument("--vllm", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.completion_processes, options.unscored = [1], False
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    with suppress(FileNotFoundError):
        (options.out / "stages.tsv").unlink()
    with (
        tempfile.TemporaryDirectory(prefix="load-") as name,
        (options.out / "table.jsonl").open("a") as lines,
    ):
        for row in measure(options, Path(name)):
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
