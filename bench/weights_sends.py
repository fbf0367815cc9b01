"""Takes an LLM in its own process, its core in another; gives times of sending, by this process.

On a GPU, memory that is free is that of all processes together: what a sender or an engine keeps
is missing there, whoever keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest import mock

import numpy as np

import clairai
from bench.weights_shape import random_tensors, shapes_of
from clairai.weights import Sent

NUM_PROBES: Final = 512
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
    first = Sender(llm).send(held)  # warms
    free_before = _free(device)
    warm = [Sender(llm).send(held) for _ in range(rounds)]
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
        "ms of each stage": stages(llm, held),
        **(_on_a_gpu(llm, held) if device == "cuda" else {}),
    }


def stages(llm: Any, held: dict[str, Any]) -> dict[str, float]:
    """What one send spends its time on; packing and offering overlap."""
    from clairai.weights import Sender
    from clairai.weights.pack import Packer
    from clairai.weights.port import Port
    from clairai.weights.ways import InProcess

    taken: dict[str, float] = {}

    def timed(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*given: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return original(*given)
            finally:
                taken[name] = taken.get(name, 0.0) + (time.perf_counter() - began_s) * 1e3

        return mock.patch.object(owner, name, call)

    with ExitStack() as patched:
        for name in ("state", "plan", "commit"):
            patched.enter_context(timed(InProcess, name))
        patched.enter_context(timed(Packer, "pack"))
        patched.enter_context(timed(Port, "offer"))
        sent = Sender(llm).send(held)
    taken["of the commit, loading"] = sent.load_s * 1e3
    taken["all"] = sent.seconds * 1e3
    return {name: round(value, 2) for name, value in taken.items()}


def _on_a_gpu(llm: Any, held: dict[str, Any]) -> dict[str, Any]:
    return _pieces(held) | {
        f"ms without loading, buffers of {mib} MiB": _alone_ms(llm, held, mib << 20)
        for mib in (128, 512, 2048, 16384)
    }


def _alone_ms(llm: Any, held: dict[str, Any], buffer_bytes: int) -> float:
    from clairai.weights import Sender

    sender = Sender(llm, buffer_bytes=buffer_bytes)
    sent = [sender.send(held) for _ in range(3)]
    return round(min(one.seconds - one.load_s for one in sent) * 1e3, 2)


def _pieces(held: dict[str, Any]) -> dict[str, Any]:
    """What the time goes to, each alone: the kernels, and the driver's memory."""
    import torch

    from clairai.ring.cuda import DeviceBlock
    from clairai.weights import device_sums

    spans = [each.reshape(-1).view(torch.uint8) for each in held.values()]
    targets = [torch.empty_like(span) for span in spans]
    nbytes = sum(len(span) for span in spans)
    return {
        "GB/s copied and summed": round(nbytes / _best_s(device_sums.copy, spans, targets) / 1e9),
        "GB/s summed": round(nbytes / _best_s(device_sums.checksums, spans) / 1e9),
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
    warm = [Sender(llm).send(held) for _ in range(2)]
    free = [_free(device)]
    sent = []
    for _ in range(times):
        sent.append(Sender(llm).send(held))
        free.append(_free(device))
    return {
        "transfers": len(sent),
        "bytes of each": sent[0].nbytes,
        "home": sent[0].home,
        "ms of each": round(median(one.seconds for one in sent) * 1e3, 2),
        "digests": len({one.digest for one in (*warm, *sent)}),
        "bytes not given back": free[0] - free[-1],
        "most at once": free[0] - min(free),
    }


def send_banks(llm: Any, layers: int, rounds: int) -> dict[str, Any]:
    """A full bank of probes, then a vector of every layer; times of the whole call, in ms."""
    from clairai import wire
    from clairai.offline import ask
    from clairai.points import Point
    from clairai.probe.model import Probe
    from clairai.steer.vector import Vector
    from clairai.weights import bank

    width = ask(llm, wire.Describe(), wire.Description).width
    rng = np.random.default_rng(2)
    rows_PD = rng.standard_normal((NUM_PROBES, width)).astype(np.float32)
    rows = {f"p{at}": row_D for at, row_D in enumerate(rows_PD)}
    point = Point("post_block", 0)
    clairai.ProbeBank(llm).add(*(Probe(name, point, row_D) for name, row_D in rows.items()))
    points = [Point("post_block", at) for at in range(layers)]
    clairai.VectorBank(llm).add(Vector("v", dict.fromkeys(points, rows_PD[0])))
    rows_LD = rng.standard_normal((layers, width)).astype(np.float32)
    one_by_one = {f"probe::{name}": row_D for name, row_D in rows.items()}
    return {
        f"{NUM_PROBES} probes, ms": _sent_ms(llm, bank(list(rows), rows_PD), rounds),
        f"{NUM_PROBES} probes, a tensor for each, ms": _sent_ms(llm, one_by_one, rounds),
        f"a vector of {layers} layers, ms": _sent_ms(llm, {"steer::v": rows_LD}, rounds),
    }


def _sent_ms(llm: Any, named: dict[str, Any], rounds: int) -> float:
    from clairai.weights import Sender

    sender = Sender(llm)
    sender.send(named)
    sent: list[Sent] = [sender.send(named) for _ in range(rounds)]
    return round(median(one.seconds for one in sent) * 1e3, 2)
