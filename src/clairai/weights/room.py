"""Whether there is memory for new weights beside the old ones; both sides ask before a transfer.

A transfer takes effect as a whole or not at all, so all of it is in memory before the first number
changes. The kernel refuses nobody that memory: it kills a process later, most likely the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from clairai.errors import WeightsRoomError
from clairai.local.free_memory import free_memory_bytes


@dataclass(frozen=True)
class LoadNeeds:
    """What loading takes beside the buffers of a transfer, at its peak."""

    host_nbytes: int = 0
    promised_nbytes: int = 0  # host memory that the engine has asked for and not used yet
    gpu_nbytes: int = 0
    gpu_free_nbytes: int = 0

    def for_many(self, count: int) -> LoadNeeds:
        """What as many processes take at once: they share the host, and each has its own GPU."""
        return replace(
            self,
            host_nbytes=self.host_nbytes * count,
            promised_nbytes=self.promised_nbytes * count,
        )


MeasureNeeds = Callable[[], LoadNeeds]


def require_engine_room(buffers_nbytes: int, needs: LoadNeeds) -> None:
    """WeightsRoomError unless an engine can hold these buffers in host memory, and load them.

    A sender may have packed its first buffer already; it is asked for twice then.
    """
    free = max(free_memory_bytes() - needs.promised_nbytes, 0)
    needed = buffers_nbytes + needs.host_nbytes
    if needed > free:
        raise WeightsRoomError(
            f"new weights need {needed} bytes of the engine's memory while they are loaded "
            f"({buffers_nbytes} for what is sent, {needs.host_nbytes} for vLLM's copies), and "
            f"{free} are free, without {needs.promised_nbytes} of its KV cache that it has not "
            f"used yet; lower VLLM_CPU_KVCACHE_SPACE or --gpu-memory-utilization, or free memory"
        )
    if needs.gpu_nbytes > needs.gpu_free_nbytes:
        raise WeightsRoomError(
            f"vLLM needs {needs.gpu_nbytes} bytes on the GPU while it loads new weights, and "
            f"{needs.gpu_free_nbytes} are free; lower --gpu-memory-utilization"
        )


def require_sender_room(nbytes: int) -> None:
    """WeightsRoomError unless this process can hold all buffers of a transfer."""
    free = free_memory_bytes()
    if nbytes > free:
        raise WeightsRoomError(
            f"these weights take {nbytes} bytes of shared memory, and {free} are free; free some, "
            f"or send them from another machine: through http two buffers are held at a time"
        )


def fit_buffer_bytes(usual: int, least: int) -> int:
    """The size of a buffer: less than usual where several would not fit into memory."""
    return min(usual, max(least, free_memory_bytes() // 8))
