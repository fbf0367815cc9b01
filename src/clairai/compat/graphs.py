"""Takes a worker's model and its taps; gives graphs of it that publish their own steps, if it pays.

A graph of a whole forward is captured around the outermost module, whose hooks are Python's even
where its inside is compiled: V1 compilation/cuda_graph.py CUDAGraphWrapper, V2
v1/worker/gpu/cudagraph_utils.py capture(), 0.26. A piece of one begins and ends inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from clairai.tap.branch import Tail
from clairai.tap.outlet import Forwards, Inputs
from clairai.tap.tables import Tables

# Of weights. With fewer a step waits for the host, which launches a graph without branches sooner.
LARGE_BYTES: Final = 8 << 30


def publish_in_graphs(
    runner: Any, inputs: Callable[[], Inputs], tables: Tables, forwards: Forwards, last: str
) -> None:
    """`last` is the site behind the last block: nothing follows it that would hide our work."""
    model = runner.get_model()
    if _is_cut(model):
        return
    if sum(one.nbytes for one in model.parameters()) < LARGE_BYTES:
        tables.tail.stay_in_line()
    elif last in tables.sites:
        return  # beside the logits it costs next to nothing, and the GPU is what is waited for
    watch_forwards(model, inputs, tables.tail, forwards)


def watch_forwards(
    model: torch.nn.Module,
    inputs: Callable[[], Inputs],
    tail: Tail,
    forwards: Forwards,
    is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
) -> None:
    """A forward that is a graph publishes its own step; any that runs as Python is told of."""

    def begins(*_: Any) -> None:
        tail.begin(forwards.captured if is_capturing() else None)

    def ends(*_: Any) -> None:
        is_whole = tail.end()
        if not is_capturing():
            forwards.forwarded(inputs)
        elif not is_whole:
            forwards.keep_out()

    model.register_forward_pre_hook(begins)
    model.register_forward_hook(ends)


def _is_cut(model: torch.nn.Module) -> bool:
    """Whether a graph may end inside of a forward, or a compiler would take our hooks for vLLM's.

    compilation/breakable_cudagraph.py; GPUModelRunner.load_model calls Module.compile, 0.26:5385.
    """
    from vllm import envs

    is_breakable = bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
    return is_breakable or model._compiled_call_impl is not None
