"""Takes a model; gives how long new weights, probes and vectors take to serve, and what is left.

The engine core is a process of its own, as when it serves; the sender is another. On a GPU the
weights are sent from the same GPU, beside the measured speed of a copy within it; a machine without
one sends them through host memory. Without --model
it is the demo's; --shape makes random weights of a shape of bench/shapes first.
Run: python -m bench.gpu_weights [--model FOLDER | --shape llama-3.1-8b] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import clairai
from clairai.weights import Sent
from tests.engine.models import real
from tests.engine.process import EngineProcess

NUM_PROBES: Final = 512
SHAPES: Final = Path(__file__).parent / "shapes"
COPY_BYTES: Final = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_weights(given.shape, folder / "model") if given.shape else given.model
        model = model or real()
        with _engine(model, folder / "run") as engine:
            for found in (
                engine.call(send_model, model, given.rounds),
                engine.call(send_banks, given.rounds),
            ):
                sys.stdout.write(json.dumps(found) + "\n")


def _engine(model: Path, runtime: Path) -> EngineProcess:
    runtime.mkdir(mode=0o700)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return EngineProcess(
        runtime=runtime,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        weight_transfer_config={"backend": "clairai_ipc"},
        additional_config=clairai.config(
            points=[f"post_block.{at}" for at in range(layers)],
            capacity=NUM_PROBES,
            steering=True,
            runtime_dir=str(runtime),
        ),
    )


def random_weights(shape: str, target: Path) -> Path:
    """A checkpoint of that shape in bfloat16, as many shards as Hugging Face would write."""
    import torch
    import transformers

    target.mkdir()
    config = transformers.AutoConfig.from_pretrained(SHAPES / shape)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    return target


def send_model(llm: Any, folder: Path, rounds: int) -> dict[str, Any]:
    """Runs in the engine's front process, which is the trainer here."""
    import torch
    from safetensors.torch import load_file

    from clairai.weights import Sender

    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = {
        name: tensor.to(device)
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    first = Sender(llm).send(held)  # warms
    free_before = _free(device)
    warm = [Sender(llm).send(held) for _ in range(rounds)]
    seconds = median(one.seconds for one in warm)
    return {
        "what": "a whole model",
        "bytes": warm[0].nbytes,
        "home": warm[0].home,
        "seconds": round(seconds, 4),
        "packed and verified s": round(median(one.packed_s for one in warm), 4),
        "vLLM's loading s": round(median(one.load_s for one in warm), 4),
        "GB/s": round(warm[0].nbytes / seconds / 1e9, 3),
        "GB/s without vLLM's loading": round(
            median(one.nbytes / (one.seconds - one.load_s) for one in warm) / 1e9, 3
        ),
        "GB/s of a copy": round(_copy_bytes_per_s(device) / 1e9, 3),
        "digests": len({one.digest for one in (first, *warm)}),
        "bytes of the device not given back": free_before - _free(device),
    }


def _free(device: str) -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0


def _copy_bytes_per_s(device: str) -> float:
    """Of memory to memory on the same device, bytes copied in a second."""
    import torch

    nbytes = COPY_BYTES if device == "cuda" else COPY_BYTES >> 3
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = []
    for _ in range(5):
        began_s = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began_s)
    return nbytes / min(taken)


def send_banks(llm: Any, rounds: int) -> dict[str, Any]:
    """A full bank of probes, then a vector of every layer; times of the whole call, in ms."""
    from clairai.points import Point
    from clairai.probe.model import Probe
    from clairai.steer.vector import Vector
    from clairai.weights import Sender

    rng = np.random.default_rng(2)
    point, width, layers = _about(llm)
    rows_PD = rng.standard_normal((NUM_PROBES, width)).astype(np.float32)
    names = [f"p{at}" for at in range(NUM_PROBES)]
    probes = [Probe(name, point, row_D) for name, row_D in zip(names, rows_PD, strict=True)]
    clairai.ProbeBank(llm).add(*probes)
    points = [Point("post_block", at) for at in range(layers)]
    clairai.VectorBank(llm).add(Vector("v", dict.fromkeys(points, rows_PD[0])))
    many = {f"probe::{name}": row_D for name, row_D in zip(names, rows_PD, strict=True)}
    one = {"steer::v": rng.standard_normal((layers, width)).astype(np.float32)}
    sender = Sender(llm)
    return {
        "what": "banks",
        f"{NUM_PROBES} probes, ms": _median_ms(lambda: sender.send(many), rounds),
        f"a vector of {layers} layers, ms": _median_ms(lambda: sender.send(one), rounds),
    }


def _median_ms(send: Callable[[], Sent], rounds: int) -> float:
    send()
    return round(median(send().seconds for _ in range(rounds)) * 1e3, 2)


def _about(llm: Any) -> tuple[Any, int, int]:
    from clairai import wire
    from clairai.offline import ask
    from clairai.points import Point

    described = ask(llm, wire.Describe(), wire.Description)
    return Point("post_block", 0), described.width, len(described.points)


if __name__ == "__main__":
    main()
