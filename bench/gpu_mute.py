"""Gives a worker with taps (V2 runner) a second set of decode graphs without them.

Two engines differ by several percent on one GPU for reasons of their own. So the cost of taps is
taken in one engine, between two sets of graphs of the same compiled model: one as it serves, one
captured again while every tap does nothing and the runner's own methods are back in place. Two sets
of the same graphs may differ too, by where in the GPU's memory they lie: so there can be several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from clairai.compat.tap_proof import WatchedSite
from clairai.engine.score.fused_norm import FusedNormSite

WRAPPED: Final = (
    "execute_model",
    "prepare_inputs",
    "sample",
    "sample_tokens",
)  # if clairai wraps them


class Silence:
    """Stands for a tap and for steering: does nothing."""

    def read(self, hidden: Any) -> None:
        pass

    def apply(self, x: Any, residual: Any) -> None:
        pass


class SilentNorm:
    """Stands for a norm of ours: vLLM's own, as its compiler makes it.

    ir/ops/layernorm.py fused_add_rms_norm, 0.26:43, is plain torch, which vLLM compiles with the
    same compiler for any number of tokens.
    """

    def __init__(self, epsilon: float, width: int, dtype: torch.dtype) -> None:
        # Not when this module is imported: that is in processes which are forked later.
        from clairai.engine.score.norm_kernel import norm_twin

        self._epsilon, self._norm = epsilon, torch.compile(norm_twin, dynamic=True)
        for num_tokens in (2, 3, 5):  # compiled now, outside of any capture
            rows_TD = torch.zeros(num_tokens, width, device="cuda", dtype=dtype)
            self.norm(rows_TD, rows_TD.clone(), rows_TD[0])

    def norm(self, x: Any, residual: Any, weight: Any) -> Any:
        return self._norm(x, residual, weight, self._epsilon)


@dataclass(frozen=True)
class Ways:
    """What differs between serving with taps and without."""

    graphs: dict[bool, list[Any]]  # sets of them
    named: dict[bool, dict[str, Any]]
    methods: dict[str, Any]


def capture_silent(worker: Any) -> None:
    """Capture all decode graphs again, without taps; runs in the worker, like all here."""
    runner = worker.model_runner
    named = worker.vllm_config.compilation_config.static_forward_context
    tapped = {key: value for key, value in named.items() if key.startswith("clairai.")}
    worker.bench_ways = Ways(
        graphs={True: [runner.cudagraph_manager.graphs], False: [{}]},
        named={True: tapped, False: {key: _silent(value) for key, value in tapped.items()}},
        methods={name: vars(runner)[name] for name in WRAPPED if name in vars(runner)},
    )
    _capture(worker, is_on=False, set_number=0)
    serve_with_taps(worker, True)


def capture_more(worker: Any, num_tokens: Sequence[int]) -> None:
    """Another set of both ways, of graphs of these sizes, in other places of the GPU's memory."""
    ways = worker.bench_ways
    for is_on, sets in ways.graphs.items():
        sets.append({})
        _capture(worker, is_on=is_on, set_number=-1, num_tokens=num_tokens)
        sets[-1] = sets[0] | sets[-1]
    serve_with_taps(worker, True)


def _capture(
    worker: Any, *, is_on: bool, set_number: int, num_tokens: Sequence[int] | None = None
) -> None:
    """v1/worker/gpu/cudagraph_utils.py CudaGraphManager.graphs, pool, _capture_descs (0.26)."""
    serve_with_taps(worker, is_on, set_number)
    publisher, found = (
        worker.clairai_step_publisher._publisher,
        worker.model_runner.cudagraph_manager,
    )
    publisher.disable_graphs = _do_nothing  # when graphs without taps are captured
    drafter = getattr(worker.model_runner, "speculator", None)
    if drafter is not None:
        drafter.capture = _do_nothing  # it has no taps, and keeps its graphs
    descriptions, pool = found._capture_descs, found.pool
    found.pool = torch.cuda.graph_pool_handle()
    found._capture_descs = {
        mode: [one for one in sizes if num_tokens is None or one.num_tokens in num_tokens]
        for mode, sizes in descriptions.items()
        if mode.name == "FULL"
    }
    worker.model_runner.capture_model()
    found._capture_descs, found.pool = descriptions, pool
    del publisher.disable_graphs
    if drafter is not None:
        del drafter.capture


def _do_nothing(*given: Any, **named: Any) -> None:
    """In place of DevicePublisher.disable_graphs, and of a drafter's capture."""


def _silent(named: Any) -> Silence | SilentNorm:
    site = named.site if isinstance(named, WatchedSite) else named
    if not isinstance(site, FusedNormSite):
        return Silence()
    stash_RD = site._stash_RD
    return SilentNorm(site._norm._kept[3], stash_RD.shape[1], stash_RD.dtype)


def serve_with_taps(worker: Any, is_on: bool, set_number: int = 0) -> None:
    ways, runner = worker.bench_ways, worker.model_runner
    worker.vllm_config.compilation_config.static_forward_context.update(ways.named[is_on])
    runner.cudagraph_manager.graphs = ways.graphs[is_on][set_number]
    for name, method in ways.methods.items():
        if is_on:
            runner.__dict__[name] = method
        else:
            runner.__dict__.pop(name, None)
