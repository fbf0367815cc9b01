"""What the ranks of an engine tell each other, through vLLM's groups for host data.

get_tp_group().cpu_group               distributed/parallel_state.py     0.26:381   0.32:448
GPUModelRunner.execute_model_state     v1/worker/gpu_model_runner.py     0.26:940   0.32:952   V1
GPUModelRunner.execute_model_state     v1/worker/gpu/model_runner.py     0.26:256   0.32:354   V2

vLLM itself uses that group from the same thread, in the same order on every rank. Between
`execute_model` and `sample_tokens` the runner keeps what the model returned: the stream behind its
last norm. Runs in: every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from clairai.engine.rank_check import RankCheck


class _Gathered:
    """An all-gather in the background."""

    def __init__(self, numbers: torch.Tensor, group: Any) -> None:
        size = torch.distributed.get_world_size(group)
        self._every = [torch.empty_like(numbers) for _ in range(size)]
        self._work = torch.distributed.all_gather(self._every, numbers, group=group, async_op=True)

    def wait(self) -> list[torch.Tensor]:
        self._work.wait()
        return self._every


def gather_bytes(own: bytes, group: Any) -> list[bytes]:
    """What each rank of the group gives, in their order; torch's own way to do it pickles."""
    num_ranks = torch.distributed.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    torch.distributed.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8)
    parts = [torch.zeros_like(padded) for _ in range(num_ranks)]
    torch.distributed.all_gather(parts, padded, group=group)
    return [part.numpy().tobytes()[: int(n)] for part, n in zip(parts, sizes, strict=True)]


def make_step_check(worker: Any) -> Callable[[int], None] | None:
    """What is called after a step with its number of tokens; None for an engine of one rank."""
    if worker.vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    group, runner = get_tp_group().cpu_group, worker.model_runner
    check = RankCheck(lambda numbers: _Gathered(numbers, group))

    def check_step(num_tokens: int) -> None:
        state = getattr(runner, "execute_model_state", None)
        check.after_step(getattr(state, "hidden_states", None), num_tokens)

    return check_step
