"""Keeps one client's large requests from delaying the others.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from clairai.fields.request_body import LARGE_BYTES

Result = TypeVar("Result")


class LargeBodies:
    """Reads large bodies beside the event loop, one at a time.

    Several threads would take the interpreter's lock from the event loop in turns.
    """

    def __init__(self) -> None:
        self._reading = asyncio.Lock()

    async def run(self, body: bytes, work: Callable[[], Result]) -> Result:
        """`work` reads or writes this body."""
        if len(body) <= LARGE_BYTES:
            return work()
        async with self._reading:
            return await asyncio.to_thread(work)
