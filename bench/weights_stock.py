"""How long vLLM's own `ipc` weight transfer takes.

distributed/weight_transfer/ipc_engine.py: IPCWeightTransferEngine.trainer_send_weights, 0.26;
IPCTrainerWeightTransferEngine, 0.28 to 0.32. Its handles are pickled, as its own HTTP mode does it:
VLLM_ALLOW_INSECURE_SERIALIZATION=1. In 0.26 the module imports ray whatever the mode is; where
there is none an empty module of that name stands in, and nothing of it is called.
"""

from __future__ import annotations

import base64
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.weights_shape import random_tensors, shapes_of

ENVIRONMENT: Final = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_PLUGINS": "",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # the core has the stand-in too
}


def stand_in_for_ray() -> None:
    """Runs in the engine's process before vLLM is imported there."""
    if find_spec("ray") is None:
        sys.modules["ray"] = module_from_spec(ModuleSpec("ray", None))


def send(llm: Any, model: Path, rounds: int, is_packed: bool) -> dict[str, Any]:
    """Runs in the engine's front process, which is the trainer here."""
    import torch

    found = _measure(llm, random_tensors(shapes_of(model), "cuda", seed=1), rounds, is_packed)
    torch.cuda.empty_cache()
    return found


def _measure(llm: Any, held: dict[str, Any], rounds: int, is_packed: bool) -> dict[str, Any]:
    import torch

    nbytes = sum(each.nbytes for each in held.values())
    send = _prepare(llm, held, is_packed)
    _timed(send)  # warms
    free_before = torch.cuda.mem_get_info()[0]
    seconds = [_timed(send) for _ in range(rounds)]
    left = free_before - torch.cuda.mem_get_info()[0]
    return {
        "seconds": round(median(seconds), 4),
        "GB/s": round(nbytes / median(seconds) / 1e9, 2),
        "bytes a call not given back": left // rounds,
    }


def _prepare(llm: Any, held: dict[str, Any], is_packed: bool) -> Callable[[], None]:
    """What sends all of `held` once, as this release does it."""
    from vllm.distributed.weight_transfer import ipc_engine

    if not hasattr(ipc_engine, "IPCTrainerWeightTransferEngine"):
        return partial(_send_once, llm, held, is_packed)
    trainer = ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
        ipc_engine.IPCTrainerInitInfo(rank=0, packed=is_packed),
        client=Client(llm),
        source=list(held.items()),
    )
    return partial(trainer.send_weights)


def _send_once(llm: Any, held: dict[str, Any], is_packed: bool) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    llm.start_weight_update()
    IPCWeightTransferEngine.trainer_send_weights(
        iter(held.items()),
        {"send_mode": lambda info: _update(llm, asdict(info)), "packed": is_packed},
    )
    llm.finish_weight_update()


class Client:
    """How a trainer of 0.28 or later speaks to an LLM that it holds itself."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        _update(self._llm, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version
        self._llm.finish_weight_update()


def _update(llm: Any, info: Mapping[str, Any]) -> None:
    fields = {name: value for name, value in info.items() if value is not None}
    handles = pickle.dumps(fields.pop("ipc_handles"))
    fields["ipc_handles_pickled"] = base64.b64encode(handles).decode()
    llm.update_weights({"update_info": fields})


def _timed(act: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s
