"""Tracks which version of the weights each request began with.

Runs in: the API server. The version is sent with the first token, and by then the weights may have
changed: a request can have ended in the engine while its tokens are on their way. So after a
change, before the next request starts, the worker is asked about all requests that still wait for
their first token. Nothing else is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clairai.wire.weights_messages import DescribeWeights, FindVersions, Versions, WeightsState

AskEngine = Callable[[Any, Any], Awaitable[Any]]


class WeightVersions:
    """The current version, and those of requests that wait for their first token.

    `changing` is held while this server changes the weights. `is_shared`: other API servers can
    change them too.
    """

    def __init__(
        self, ask: AskEngine, changing: asyncio.Lock, *, accepts_weights: bool, is_shared: bool
    ) -> None:
        self._ask, self._changing = ask, changing
        self._accepts_weights, self._is_shared = accepts_weights, is_shared
        self._waiting: dict[int, int | None] = {}  # versions by stream; None: not known yet
        self._uncertain: set[int] = set()  # waiting streams that the worker must be asked about
        self._state: WeightsState | None = None
        self._num_other_calls = 0  # in progress
        self._num_invalidations = 0

    @property
    def can_change(self) -> bool:
        """False in an engine whose weights never change, and have no version."""
        return self._accepts_weights

    @contextmanager
    def waiting(self, stream: int | None) -> Iterator[None]:
        """While a request is in the engine; None for one without a single stream.

        If two requests name one stream, the core refuses the second: it must not end the first's.
        """
        if stream is None or not self._accepts_weights or stream in self._waiting:
            yield
            return
        self._waiting[stream] = None
        try:
            yield
        finally:
            self._drop_stream(stream)

    async def version_of(self, stream: int | None) -> int | None:
        """The version that a request began with, when its first token is here; None if unknown."""
        if stream is None or not self._accepts_weights:
            return None
        await self._learn_current()
        found = self._waiting.get(stream)
        if found is None and self._is_current(stream):
            assert self._state is not None
            found = self._state.version
        elif found is None:
            (found,) = await self._find((stream,))
        self._drop_stream(stream)
        return found

    async def state(self) -> WeightsState | None:
        """The weights that serve now; None in an engine whose weights never change."""
        if not self._accepts_weights:
            return None
        if self._state is None or self._is_shared:
            return await self._describe()
        return self._state

    async def after_change(self) -> None:
        """Weights have changed and no request runs: all that have begun used the old weights."""
        if not self._accepts_weights:
            return
        streams = tuple(self._waiting)
        found = zip(streams, await self._find(streams), strict=True)
        state = await self._describe()
        self._waiting |= {one: version for one, version in found if one in self._waiting}
        self._uncertain.difference_update(streams)
        self._state = state

    @contextmanager
    def other_call(self) -> Iterator[None]:
        """While somebody else calls the engine: the call may change the weights."""
        self._num_other_calls += 1
        self.invalidate()
        try:
            yield
        finally:
            self._num_other_calls -= 1
            self.invalidate()

    def invalidate(self) -> None:
        """The weights may change: until they are known again, the worker is asked each time."""
        self._state = None
        self._num_invalidations += 1
        self._uncertain.update(stream for stream, known in self._waiting.items() if known is None)

    def _is_current(self, stream: int) -> bool:
        """True if the request certainly began with the weights in `_state`."""
        is_certain = stream not in self._uncertain and not self._is_shared
        return is_certain and self._state is not None and not self._num_other_calls

    async def _learn_current(self) -> None:
        """Ask for the current weights if they are unknown and no change is in progress."""
        if self._state is not None or self._is_shared or self._changing.locked():
            return
        async with self._changing:
            before = self._num_invalidations
            found = await self._describe()
            if before == self._num_invalidations:
                self._state = found

    async def _find(self, streams: tuple[int, ...]) -> tuple[int | None, ...]:
        reply: Versions = await self._ask(FindVersions(streams), Versions)
        return reply.versions

    async def _describe(self) -> WeightsState:
        state: WeightsState = await self._ask(DescribeWeights(), WeightsState)
        return state

    def _drop_stream(self, stream: int) -> None:
        self._waiting.pop(stream, None)
        self._uncertain.discard(stream)
