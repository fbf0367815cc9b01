"""Ends the answers of an engine that hangs, where no launcher watches its processes.

Runs in: the proxy, on the event loop. With `clairai serve` the launcher sees every process and ends
the answers itself; `clairai proxy` only sees whether the engine core answers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from clairai.proxy.engine_facts import HealthCheck
from clairai.proxy.upstream import Upstream

LOOK_S: Final = 5.0
_log: Final = logging.getLogger(__name__)


class EngineWatch:
    """Looks while a request waits for upstream; an engine without requests is left alone."""

    def __init__(self, upstream: Upstream, health: HealthCheck, *, stall_s: float) -> None:
        self._upstream, self._health, self._stall_s = upstream, health, stall_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        pause_s = min(LOOK_S, self._stall_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            if not self._health.is_supervised and self._upstream.num_waiting:
                await self.look()

    async def look(self) -> None:
        """Hang up if the engine core has not answered for too long."""
        silent_s = await self._health.silent_s()
        if silent_s >= self._stall_s:
            _log.error("the engine core has not answered for %.0f s: answers end", silent_s)
            self._upstream.hang_up()
