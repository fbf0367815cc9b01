"""How long vLLM's own `ipc` weight transfer takes.

distributed/weight_transfer/ipc_engine.py IPCWeightTransferEngine, 0.26. Its handles are pickled, as
its own HTTP mode does it: VLLM_ALLOW_INSECURE_SERIALIZATION=1. The module imports ray whatever the
mode is; where there is none an empty module of that name stands in, and nothing of it is called.
"""

from __future__ import annotations

import base64
import pickle
import sys
import time
from collections.abc import Callable
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
    send = partial(_send, llm, held, is_packed)
    _timed(send)  # warms
    free_before = torch.cuda.mem_get_info()[0]
    seconds = [_timed(send) for _ in range(rounds)]
    left = free_before - torch.cuda.mem_get_info()[0]
    return {
        "seconds": round(median(seconds), 4),
        "GB/s": round(nbytes / median(seconds) / 1e9, 2),
        "bytes a call not given back": left // rounds,
    }


def _send(llm: Any, held: dict[str, Any], is_packed: bool) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    llm.start_weight_update()
    IPCWeightTransferEngine.trainer_send_weights(
        iter(held.items()), {"send_mode": lambda info: _update(llm, info), "packed": is_packed}
    )
    llm.finish_weight_update()


def _update(llm: Any, info: Any) -> None:
    fields = {
        "names": info.names,
        "dtype_names": info.dtype_names,
        "shapes": info.shapes,
        "packed": info.packed,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(info.ipc_handles)).decode(),
    }
    if info.tensor_sizes is not None:
        fields["tensor_sizes"] = info.tensor_sizes
    llm.update_weights({"update_info": fields})


def _timed(act: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s
