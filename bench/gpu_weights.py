"""How long new weights, probes and vectors take, and what they leave behind.

The engine core is a process of its own, as when it serves; the sender is another. On a GPU the
weights are sent from the same GPU, beside the measured speed of a copy within it and beside vLLM's
own `ipc` weight transfer; a machine without one sends them through host memory. All numbers are
made up, by both sides: time does not depend on them.
Run: python -m bench.gpu_weights [--shape llama-3.1-8b] [--small qwen3-0.6b] [--rounds 5]
     [--parts model banks many pause stock stock_pause]

Beside vLLM's own `ipc`, and the pause that clients see of both, in one run:
     python -m bench.gpu_weights --parts model stock pause stock_pause
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import clairai
from bench import weights_pause, weights_sends, weights_stock
from bench.weights_sends import NUM_PROBES, TRANSFERS
from bench.weights_shape import hollow, layers_of
from tests.engine.process import ENVIRONMENT, EngineProcess

PARTS: Final = ("model", "banks", "many", "pause", "stock", "stock_pause")
# Which engine each part needs: parts of one engine follow each other.
ENGINE_OF: Final = {"model": "ours", "banks": "ours", "many": "small"}
Starting = Mapping[str, Future[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--small", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    asked = parser.parse_args()
    found: dict[str, Any] = {"shape": asked.shape, "device": asked.device}
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        bench = Bench(asked, Path(name), opened)
        for part in asked.parts:
            found[part] = bench.measure(part)
    sys.stdout.write(json.dumps(found) + "\n")


class Bench:
    """Engines of all parts start at once and are measured one after the other."""

    def __init__(self, asked: argparse.Namespace, folder: Path, opened: ExitStack) -> None:
        self._asked, self._folder, self._opened = asked, folder, opened
        self._models = {
            name: hollow(shape, folder / name)
            for name, shape in (("model", asked.shape), ("small", asked.small))
        }
        wanted = dict.fromkeys(ENGINE_OF.get(part, part) for part in asked.parts)
        pool = opened.enter_context(ThreadPoolExecutor(len(wanted)))
        starts = {name: getattr(self, f"_start_{name}") for name in wanted}
        self._starting: Starting = {n: pool.submit(start) for n, start in starts.items()}
        opened.callback(self._stop)

    def measure(self, part: str) -> dict[str, Any]:
        """A part that fails is said, and the others go on."""
        wait(self._starting.values())  # an engine that starts takes memory and time of the others
        began_s = time.perf_counter()
        try:
            engine = self._starting[ENGINE_OF.get(part, part)].result()
            found: dict[str, Any] = getattr(self, f"_measure_{part}")(engine)
        except Exception as error:
            traceback.print_exc()
            found = {"failed": str(error)[-2000:]}
        for what, value in found.items():
            sys.stdout.write(f"| {part} | {what} | {value} |\n")
        sys.stdout.write(f"| {part} | took s | {time.perf_counter() - began_s:.1f} |\n")
        sys.stdout.flush()
        return found

    def _start_ours(self) -> EngineProcess:
        model = self._models["model"]
        return self._engine(model, "ours", steering=True, points=["post_block.*"])

    def _start_small(self) -> EngineProcess:
        return self._engine(self._models["small"], "small", points=["post_block.0"])

    def _start_stock(self) -> EngineProcess:
        runtime = self._runtime("stock")
        return EngineProcess(
            runtime=runtime,
            environment=self._variables | weights_stock.ENVIRONMENT,
            plant=weights_stock.stand_in_for_ray,
            weight_transfer_config={"backend": "ipc"},
            **self._arguments(self._models["model"]),
        )

    def _start_pause(self) -> Any:
        return self._start_server("pause", "clairai_ipc")

    def _start_stock_pause(self) -> Any:
        backend = weights_pause.vllm_backend(self._asked.device)
        return self._start_server("stock_pause", backend, **weights_pause.FOR_TRAINERS)

    def _start_server(self, name: str, backend: str, **more: str) -> Any:
        variables = {**ENVIRONMENT, **self._variables, **more}
        if self._asked.device == "cuda":
            variables.pop("VLLM_CPU_KVCACHE_SPACE")
        runtime = self._runtime(name)
        return weights_pause.start(self._models["model"], runtime, variables, backend)

    @property
    def _variables(self) -> dict[str, str]:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    def _runtime(self, name: str) -> Path:
        runtime = self._folder / f"run-{name}"
        runtime.mkdir(mode=0o700)
        return runtime

    def _engine(self, model: Path, name: str, **config: Any) -> EngineProcess:
        runtime = self._runtime(name)
        taps = clairai.config(capacity=NUM_PROBES, runtime_dir=str(runtime), **config)
        return EngineProcess(
            runtime=runtime,
            environment=self._variables,
            weight_transfer_config={"backend": "clairai_ipc"},
            additional_config=taps,
            **self._arguments(model),
        )

    def _arguments(self, model: Path) -> dict[str, Any]:
        given: dict[str, Any] = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,  # loading is the same, and starts are sooner
            "max_model_len": 512,
            "max_num_seqs": 8,
        }
        if self._asked.device == "cuda":
            given |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
        return given

    def _measure_model(self, engine: EngineProcess) -> dict[str, Any]:
        model, asked = self._models["model"], self._asked
        found: dict[str, Any] = engine.call(
            weights_sends.send_model, model, asked.device, asked.rounds
        )
        return found

    def _measure_banks(self, engine: EngineProcess) -> dict[str, Any]:
        layers = layers_of(self._models["model"])
        found: dict[str, Any] = engine.call(weights_sends.send_banks, layers, self._asked.rounds)
        return found

    def _measure_many(self, engine: EngineProcess) -> dict[str, Any]:
        found: dict[str, Any] = engine.call(
            weights_sends.send_many,
            self._models["small"],
            self._asked.device,
            TRANSFERS,
        )
        return found

    def _measure_pause(self, server: Any) -> dict[str, Any]:
        device, rounds = self._asked.device, self._asked.rounds
        runtime = self._folder / "run-pause"
        return weights_pause.measure(server, self._models["model"], runtime, device, rounds)

    def _measure_stock_pause(self, server: Any) -> dict[str, Any]:
        device, rounds = self._asked.device, self._asked.rounds
        runtime, send = self._folder / "run-stock_pause", weights_pause.send_by_vllm
        return weights_pause.measure(server, self._models["model"], runtime, device, rounds, send)

    def _measure_stock(self, engine: EngineProcess) -> dict[str, Any]:
        model, rounds = self._models["model"], self._asked.rounds
        return {
            name: engine.call(weights_stock.send, model, rounds, is_packed)
            for name, is_packed in (("its own tensors", False), ("packed", True))
        }

    def _stop(self) -> None:
        for starting in self._starting.values():
            if starting.exception() is None:
                engine = starting.result()
                (engine.close if isinstance(engine, EngineProcess) else engine.kill)()


if __name__ == "__main__":
    main()
