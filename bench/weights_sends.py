"""Times of sending to an LLM whose core is in another process, measured by this one.

On a GPU, memory that is free is that of all processes together: what a sender or an engine keeps
is missing there, whoever keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import clairai
from bench import weights_stages
from bench.weights_shape import random_tensors, shapes_of

NUM_PROBES: Final = 512
STAGES: Final = "stages: first at ms, times, ms in all"
TRANSFERS: Final = 100
COPY_BYTES: Final = 4 << 30
DEVICE_BUFFER_BYTES: Final = 512 << 20


def send_model(llm: Any, model: Path, device: str, rounds: int) -> dict[str, Any]:
    """Runs in the engine's front process, which is the trainer here, as all below."""
    found = _send_model(llm, model, device, rounds)
    _give_back(device)
    return found


def _send_model(llm: Any, model: Path, device: str, rounds: int) -> dict[str, Any]:
    from clairai.weights import Sender

    held = random_tensors(shapes_of(model), device, seed=1)
    sender = Sender(llm)
    first = sender.send(held)  # warms
    free_before = _free(device)
    warm = [sender.send(held) for _ in range(rounds)]
    left = free_before - _free(device)
    copied = _copy_bytes_per_s(device)
    nbytes, seconds = warm[0].nbytes, median(one.seconds for one in warm)
    alone_s = median(one.seconds - one.load_s for one in warm)
    return {
        "bytes": nbytes,
        "home": warm[0].home,
        "seconds": round(seconds, 4),
        "packed and verified s": round(median(one.packed_s for one in warm), 4),
        "vLLM's loading s": round(median(one.load_s for one in warm), 4),
        "GB/s": round(nbytes / seconds / 1e9, 2),
        "GB/s without vLLM's loading": round(nbytes / alone_s / 1e9, 2),
        "GB/s of a copy": round(copied / 1e9, 2),
        "of a copy": round(nbytes / seconds / copied, 4),
        "of a copy, without vLLM's loading": round(nbytes / alone_s / copied, 4),
        "digests": len({one.digest for one in (first, *warm)}),
        "bytes not given back": left,
        STAGES: weights_stages.of(lambda: sender.send(held)),
        **(_on_a_gpu(llm, held) if device == "cuda" else {}),
    }


def _on_a_gpu(llm: Any, held: dict[str, Any]) -> dict[str, Any]:
    return _pieces(held) | {
        f"ms without loading, buffers of {mib} MiB": _alone_ms(llm, held, mib << 20)
        for mib in (512, 1024, 2048, 4096, 16384)
    }


def _alone_ms(llm: Any, held: dict[str, Any], buffer_bytes: int) -> float:
    from clairai.weights import Sender

    sender = Sender(llm, buffer_bytes=buffer_bytes)
    sent = [sender.send(held) for _ in range(3)]
    return round(min(one.seconds - one.load_s for one in sent) * 1e3, 2)


def _pieces(held: dict[str, Any]) -> dict[str, Any]:
    """What the time goes to, each alone: the kernels, and the driver's memory."""
    import torch

    from clairai.local.gpu_memory import DeviceBlock
    from clairai.weights import device_checksum

    spans = [each.reshape(-1).view(torch.uint8) for each in held.values()]
    targets = [torch.empty_like(span) for span in spans]
    nbytes = sum(len(span) for span in spans)
    return {
        "GB/s copied and summed": round(
            nbytes / _best_s(device_checksum.copy_and_checksum, spans, targets) / 1e9
        ),
        "GB/s summed": round(nbytes / _best_s(device_checksum.checksums, spans) / 1e9),
        "ms to allocate and free 512 MiB": round(
            _best_s(lambda: DeviceBlock.create(DEVICE_BUFFER_BYTES, 0).close()) * 1e3, 3
        ),
    }


def _best_s(act: Callable[..., Any], *given: Any) -> float:
    return min(_timed(act, *given) for _ in range(5))


def _timed(act: Callable[..., Any], *given: Any) -> float:
    began_s = time.perf_counter()
    act(*given)
    return time.perf_counter() - began_s


def _copy_bytes_per_s(device: str) -> float:
    """Of memory to memory on the same device, bytes copied in a second."""
    import torch

    nbytes = COPY_BYTES if device == "cuda" else COPY_BYTES >> 3
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return nbytes / _best_s(copy)


def _give_back(device: str) -> None:
    """What torch keeps for the next time: others need it."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()


def _free(device: str) -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0


def send_many(llm: Any, model: Path, device: str, times: int) -> dict[str, Any]:
    """One after the other; on a GPU, what it has free in between: of all processes together."""
    from clairai.weights import Sender

    held = random_tensors(shapes_of(model), device, seed=1)
    sender = Sender(llm)
    warm = [sender.send(held) for _ in range(2)]
    free = [_free(device)]
    sent = []
    for _ in range(times):
        sent.append(sender.send(held))
        free.append(_free(device))
    return {
        "transfers": len(sent),
        "bytes of each": sent[0].nbytes,
        "home": sent[0].home,
        "tensors of each": sent[0].num_tensors,
        "ms of each": round(median(one.seconds for one in sent) * 1e3, 2),
        "of that vLLM's loading, ms": round(median(one.load_s for one in sent) * 1e3, 2),
        "ms without it": round(median(one.seconds - one.load_s for one in sent) * 1e3, 2),
        STAGES: weights_stages.of(lambda: sender.send(held)),
        "digests": len({one.digest for one in (*warm, *sent)}),
        "bytes not given back": free[0] - free[-1],
        "most at once": free[0] - min(free),
    }


def send_banks(llm: Any, layers: int, rounds: int) -> dict[str, Any]:
    """A full bank of probes, then a vector of every layer; times of the whole call, in ms."""
    from clairai.library.engine_control import ask_engine
    from clairai.points import Point
    from clairai.probe.model import Probe
    from clairai.vector.model import Vector
    from clairai.weights import Sender, bank
    from clairai.wire import control_messages

    width = ask_engine(llm, control_messages.Describe(), control_messages.Description).width
    rng = np.random.default_rng(2)
    rows_PD = rng.standard_normal((NUM_PROBES, width)).astype(np.float32)
    rows = {f"p{at}": row_D for at, row_D in enumerate(rows_PD)}
    point = Point("post_block", 0)
    clairai.ProbeBank(llm).add(*(Probe(name, point, row_D) for name, row_D in rows.items()))
    points = [Point("post_block", at) for at in range(layers)]
    clairai.VectorBank(llm).add(Vector("v", dict.fromkeys(points, rows_PD[0])))
    rows_LD = rng.standard_normal((layers, width)).astype(np.float32)
    one_by_one = {f"probe::{name}": row_D for name, row_D in rows.items()}
    sender, names = Sender(llm), list(rows)
    ways: dict[str, Callable[[], object]] = {
        f"{NUM_PROBES} probes": lambda: sender.send(bank(names, rows_PD)),
        f"{NUM_PROBES} probes, by redirect": lambda: clairai.ProbeBank(llm).redirect(
            names, rows_PD
        ),
        f"{NUM_PROBES} probes, a tensor for each": lambda: sender.send(one_by_one),
        f"a vector of {layers} layers": lambda: sender.send({"steer::v": rows_LD}),
    }
    found: dict[str, Any] = {}
    for way, act in ways.items():
        found[f"{way}, ms"] = _ms(act, rounds)
        found[f"{way}, {STAGES}"] = weights_stages.of(act)
    return found


def _ms(act: Callable[[], object], rounds: int) -> list[float]:
    """The median and the fastest of 2 that warm and three times `rounds` that count."""
    taken = [_timed(act) * 1e3 for _ in range(2 + 3 * rounds)][2:]
    return [round(median(taken), 2), round(min(taken), 2)]
