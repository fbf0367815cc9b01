"""How long an engine takes to start on a GPU: with taps and without, cold and warm.

From the call of LLM(...) until it can be asked, in a process of its own. Cold: nothing compiled is
there, of vLLM, of torch or of Triton; warm: the same start again. Beside the time, by vLLM's own
count: how many pieces of the model it compiled, how many artefacts it saved for them all (equal
layers share one), and how many it loaded; and how many files it left in its compile cache that were
not there before. A warm start saves nothing and leaves no new file.
Run: python -m bench.gpu_startup [--shape llama-3.1-8b] [--starts cold warm] [--arms alone tapped]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench import gpu_compiled
from bench.gpu_engines import Case, engines
from tests.engine.process import EngineFailed

POINTS: Final = {"alone": (), "tapped": ("post_block.*",)}
NUM_PROBES: Final = 16
HEAD: Final = (
    *("start", "engine", "seconds", "pieces", "saved", "loaded"),
    *("models compiled", "models loaded", "new files"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--starts", nargs="*", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--arms", nargs="*", choices=[*POINTS], default=[*POINTS])
    options = parser.parse_args()
    sys.stdout.write(f"| {' | '.join(HEAD)} |\n{'| --- ' * len(HEAD)}|\n")
    with tempfile.TemporaryDirectory() as folder:
        found = [
            measure(options.shape, start, arm, Path(folder))
            for start in options.starts
            for arm in options.arms
        ]
    sys.stdout.write(json.dumps({"shape": options.shape, "starts": found, **added(found)}) + "\n")


def measure(shape: str, start: str, arm: str, folder: Path) -> dict[str, Any]:
    """One start; a start that fails is said, and the others go on."""
    cache = folder / arm
    before = compiled_files(cache)
    case = Case(f"{arm} {start}", POINTS[arm], NUM_PROBES, environment=caches(cache))
    try:
        with engines(shape, [case], folder, plant=time_start) as running:
            seconds, counts = running[case.name].call(started)
    except EngineFailed as error:
        sys.stdout.write(f"| {start} | {arm} | failed: {str(error).strip()[-200:]} |\n")
        sys.stdout.flush()
        return {"start": start, "arm": arm, "failed": str(error)[-2000:]}
    counts["new_files"] = len(compiled_files(cache) - before)
    cells = " | ".join(str(count) for count in counts.values())
    sys.stdout.write(f"| {start} | {arm} | {seconds:.1f} | {cells} |\n")
    sys.stdout.flush()
    return {"start": start, "arm": arm, "seconds": round(seconds, 2), **counts}


def caches(folder: Path) -> dict[str, str]:
    """Where everything that is compiled is kept."""
    return {
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def compiled_files(folder: Path) -> set[Path]:
    """compilation/backends.py VllmBackend.__call__, decorators.py: where vLLM keeps them."""
    found = folder.glob("vllm/torch_compile_cache/**/*")
    return {path for path in found if path.is_file() and path.parent.name != "locks"}


def added(found: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds that taps add to each kind of start."""
    seconds = {(one["start"], one["arm"]): one["seconds"] for one in found if "seconds" in one}
    both = [start for start, arm in seconds if arm == "tapped" and (start, "alone") in seconds]
    difference = {
        f"{start}_added_s": round(seconds[start, "tapped"] - seconds[start, "alone"], 2)
        for start in both
    }
    for name, value in difference.items():
        sys.stdout.write(f"| {name} | {value} |\n")
    return difference


def time_start() -> None:
    """Have every LLM of this process know how long it took; runs before the engine starts."""
    from vllm import LLM

    original = LLM.__init__

    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        begin_s = time.perf_counter()
        original(self, *args, **kwargs)
        self.bench_start_s = time.perf_counter() - begin_s

    LLM.__init__ = timed


def started(llm: Any) -> tuple[float, dict[str, int]]:
    return llm.bench_start_s, llm.collective_rpc(gpu_compiled.counts)[0]


if __name__ == "__main__":
    main()
