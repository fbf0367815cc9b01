"""Time per output token with captures over that of vLLM without clairai, on a GPU.

In one engine, by turns, as in bench/gpu_steering.py: captured requests through the graphs that tap,
plain requests through a second set of graphs in which nothing of clairai is. Then a lone prompt of
512 tokens with all layers raw: when rows are in host memory, and when the writer has copied them.
Run: python -m bench.gpu_capture [--rounds 8] [--batches 64] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import clairai
from bench import gpu_mute
from bench.gpu_engines import Case, decode_times, engines
from bench.gpu_overhead import NUM_NEW, decode_ratios, each_worker
from clairai.library.engine_control import ask_engine
from clairai.wire import capture_messages
from tests.engine.process import EngineProcess

PROMPT_LEN: Final = 512
NUM_LAYERS: Final = 32
LOOK_S: Final = 0.0002


@dataclass(frozen=True)
class Load:
    """What every request of a batch asks for."""

    name: str
    capture: Mapping[str, Any] | None


RP8: Final = {"encoder": {"name": "rp8", "k": 512, "seed": 0}}
LOADS: Final = {
    "capture 1 layer": (
        Load("unused", None),
        Load("rp8 k = 512", RP8),
        Load("raw", {"encoder": "raw"}),
    ),
    "capture 32 layers": (Load("unused", None), Load("rp8 k = 512", RP8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="*", default=[64])
    parser.add_argument("--cases", nargs="*", default=[*LOADS])
    parser.add_argument("--folder", type=Path, help="for the captures; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        chosen = [case for case in cases(Path(folder)) if case.name in options.cases]
        runtime = Path(folder) / "runtime"
        runtime.mkdir(mode=0o700)
        with engines("llama-3.1-8b", chosen, runtime) as running:
            found = [one for case in chosen for one in measure(running[case.name], case, options)]
    sys.stdout.write(json.dumps({"cases": found}) + "\n")


def cases(folder: Path) -> list[Case]:
    return [
        Case(
            name,
            ("post_block.15",) if "1 layer" in name else ("post_block.*",),
            1,
            {"capture": {"folder": str(folder / name.replace(" ", "-")), "staging_mib": 512}},
            probed=(),
        )
        for name in LOADS
    ]


def measure(engine: EngineProcess, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    engine.call(each_worker, gpu_mute.capture_silent)
    found = [
        _decode(engine, case, load, batch, options.rounds)
        for load in LOADS[case.name]
        for batch in options.batches
    ]
    if "32 layers" in case.name:
        found.append(_prefill(engine, options.rounds))
    state = engine.call(capture_state)
    sys.stdout.write(
        f"| {case.name} | {state.rows} rows, {state.dropped} dropped | "
        f"{state.places[0].state} {state.places[0].reason} |\n"
    )
    return found


def _decode(
    engine: EngineProcess, case: Case, load: Load, batch: int, rounds: int
) -> dict[str, Any]:
    def times(is_on: bool) -> Any:
        capture = load.capture if is_on else None
        return engine.call(decode_times, batch, NUM_NEW, ((),), capture)

    found = decode_ratios(engine, rounds, times)
    told = found.told(case.name, load.name, f"batch {batch}")
    return {"case": case.name, "load": load.name, "batch": batch, **told}


def _prefill(engine: EngineProcess, rounds: int) -> dict[str, Any]:
    """From the call of generate() on, in ms."""
    engine.call(each_worker, gpu_mute.serve_with_taps, True)
    engine.call(each_worker, note_times)
    found = [engine.call(prefill_ms, turn) for turn in range(rounds + 2)][2:]
    host, given, plain = np.median(np.array(found), axis=0)
    sys.stdout.write(
        f"| capture 32 layers | raw, a prompt of {PROMPT_LEN} | first token {plain:.1f} ms, "
        f"rows in host memory {host:.1f} ms, copied by the capture writer {given:.1f} ms |\n"
    )
    return {"load": "prefill", "host_ms": host, "given_ms": given, "first_token_ms": plain}


def note_times(worker: Any) -> None:
    """From now on, when rows are in host memory and when the writer has them; in the worker."""
    arena = worker.clairai_capture._copier.arena
    worker.bench_times = times = {"host": 0.0, "given": 0.0}

    def watch() -> None:
        copied = 0
        while True:  # until the worker ends
            if arena.last_copied > copied:
                copied, times["host"], times["given"] = arena.last_copied, time.perf_counter(), 0.0
            if not times["given"] and not arena.used_nbytes:
                times["given"] = time.perf_counter()
            time.sleep(LOOK_S)

    threading.Thread(target=watch, daemon=True).start()


def times_of(worker: Any) -> tuple[float, float]:
    return worker.bench_times["host"], worker.bench_times["given"]


def prefill_ms(llm: Any, turn: int) -> tuple[float, float, float]:
    """Rows in host memory, rows given, the first token; perf_counter is one clock for all."""
    from vllm import SamplingParams

    tokens = [100 + (turn * 7 + i) % 1000 for i in range(PROMPT_LEN)]
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        extra_args=clairai.request(capture={"positions": "prompt"}),
    )
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    first = time.perf_counter()
    ((capture,),) = clairai.captures(llm, outputs)
    assert capture.report.rows == PROMPT_LEN * NUM_LAYERS, capture.report
    ((host, given),) = llm.collective_rpc(times_of)
    return tuple(1e3 * (at - begin) for at in (host, given, first))  # type: ignore[return-value]


def capture_state(llm: Any) -> capture_messages.CaptureState:
    return ask_engine(llm, capture_messages.DescribeCapture(), capture_messages.CaptureState)


if __name__ == "__main__":
    main()
