"""Kernels of a decode step on a GPU by name: how often each runs and how long, of two engines.

Two profiles of one batch with answers of different lengths differ by decode steps alone, so what
the longer one has more is theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.gpu_engines import decode_times

PROFILED_TOKENS: Final = (9, 25)
Kernels = Mapping[str, tuple[int, float]]  # by name: how often, and microseconds in all
Step = dict[str, tuple[float, float]]  # the same of one decode step


@dataclass(frozen=True)
class Difference:
    """One kernel in a decode step of two engines."""

    name: str
    kind: str
    first_calls: float
    other_calls: float
    first_us: float
    other_us: float


def profile_step(llm: Any, batch: int) -> Step:
    """The kernels of a step in which `batch` requests decode; runs in the engine's process."""
    shorter, longer = (_profile(llm, batch, num_new) for num_new in PROFILED_TOKENS)
    return kernels_of_a_step(shorter, longer)


def _profile(llm: Any, batch: int, num_new: int) -> Kernels:
    llm.collective_rpc(start_profiler)
    decode_times(llm, batch, num_new)
    found: Kernels = llm.collective_rpc(stop_profiler)[0]
    return found


def start_profiler(worker: Any) -> None:
    import torch

    torch.cuda.synchronize()
    worker.bench_profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    )
    worker.bench_profiler.start()


def stop_profiler(worker: Any) -> Kernels:
    import torch

    torch.cuda.synchronize()
    worker.bench_profiler.stop()
    found: dict[str, tuple[int, float]] = {}
    for one in worker.bench_profiler.events():
        if one.device_type == torch.autograd.DeviceType.CUDA:
            calls, us = found.get(one.name, (0, 0.0))
            found[one.name] = (calls + 1, us + one.time_range.elapsed_us())
    return found


def count_norms(worker: Any) -> dict[str, int]:
    """How many norms there are of each class; a tapped one has a class of its own."""
    names = [type(module).__name__ for module in worker.model_runner.get_model().modules()]
    return {name: names.count(name) for name in sorted(set(names)) if "Norm" in name}


def kernels_of_a_step(shorter: Kernels, longer: Kernels) -> Step:
    steps = PROFILED_TOKENS[1] - PROFILED_TOKENS[0]
    found = {}
    for name, (calls, us) in longer.items():
        calls_before, us_before = shorter.get(name, (0, 0.0))
        if calls > calls_before:
            found[name] = ((calls - calls_before) / steps, (us - us_before) / steps)
    return found


def compare(first: Step, other: Step) -> list[Difference]:
    """Every kernel of either, the largest difference in time first."""
    found = []
    for name in {*first, *other}:
        (first_calls, first_us), (other_calls, other_us) = (
            step.get(name, (0.0, 0.0)) for step in (first, other)
        )
        numbers = [round(one, 2) for one in (first_calls, other_calls, first_us, other_us)]
        found.append(Difference(name, kind_of(name), *numbers))
    return sorted(found, key=lambda one: -abs(one.other_us - one.first_us))


# The compiler names a kernel after the operations in it; that of a quantisation by rows has a
# maximum, which nothing else in these models has.
KINDS: Final = (
    (
        "clairai",
        re.compile(r"^(norm|norm_steered|steer|score_\w+|copy_to_stash|sum_slices|publish_\w+)$"),
    ),
    ("quantises", re.compile(r"^triton.*amax|fp8_quant|per_token_quant")),
    ("attention", re.compile(r"flash|attention|reshape_and_cache|merge_attn", re.IGNORECASE)),
    ("multiplies", re.compile(r"cutlass|gemm|nvjet|cublas|sm90_|scaled_mm", re.IGNORECASE)),
    ("compiled", re.compile(r"^triton_")),
)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "other")


def sum_by_kind(differences: Sequence[Difference]) -> dict[str, dict[str, float]]:
    """Of a step; `all` is the GPU's time, whatever the host did between its kernels."""
    found: dict[str, dict[str, float]] = {}
    for one in differences:
        for kind in (one.kind, "all"):
            sums = found.setdefault(kind, {})
            for field in ("first_calls", "other_calls", "first_us", "other_us"):
                sums[field] = round(sums.get(field, 0.0) + getattr(one, field), 2)
    return found
