"""Takes hand-overs and requests; gives the version of the weights that each request began with.

A version is told with the first token, and by then weights may have changed: a request can have
ended in the engine, and its tokens be on their way. So between the change and the first request
after it the worker is asked about all that wait for a first token; nothing is asked otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clairai.wire.weights_messages import DescribeWeights, FindVersions, Versions, WeightsState

AskEngine = Callable[[Any, Any], Awaitable[Any]]


class WeightVersions:
    """`changing` is held while this server changes the weights.

    `is_taking`: the engine takes weights at all; `is_shared`: through other servers too.
    """

    def __init__(
        self, ask: AskEngine, changing: asyncio.Lock, *, is_taking: bool, is_shared: bool
    ) -> None:
        self._ask, self._changing = ask, changing
        self._is_taking, self._is_shared = is_taking, is_shared
        self._waiting: dict[int, int | None] = {}  # for a first token: streams, versions if known
        self._unsure: set[int] = set()  # of them, those that have to be asked about
        self._state: WeightsState | None = None
        self._num_elsewhere = 0  # calls of others that go on
        self._num_forgotten = 0

    @contextmanager
    def waiting(self, stream: int | None) -> Iterator[None]:
        """A request is on its way to the engine; None has no single stream to ask about."""
        if stream is None or not self._is_taking:
            yield
            return
        self._waiting[stream] = None
        try:
            yield
        finally:
            self._forget_stream(stream)

    async def version_of(self, stream: int | None) -> int | None:
        """Of a request whose first token is here; None if there is nothing to tell."""
        if stream is None or not self._is_taking:
            return None
        await self._look()
        found = self._waiting.get(stream)
        if found is None and self._is_current(stream):
            assert self._state is not None
            found = self._state.version
        elif found is None:
            (found,) = await self._find((stream,))
        self._forget_stream(stream)
        return found

    async def state(self) -> WeightsState | None:
        """The weights that serve now; None in an engine that takes no others."""
        if not self._is_taking:
            return None
        if self._state is None or self._is_shared:
            return await self._described()
        return self._state

    async def settle(self) -> None:
        """Weights have changed and no request runs yet: what has begun began with the old ones."""
        if not self._is_taking:
            return
        streams = tuple(self._waiting)
        found = zip(streams, await self._find(streams), strict=True)
        state = await self._described()
        self._waiting |= {one: version for one, version in found if one in self._waiting}
        self._unsure.difference_update(streams)
        self._state = state

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Somebody else asks the engine for something: it may be other weights."""
        self._num_elsewhere += 1
        self.forget()
        try:
            yield
        finally:
            self._num_elsewhere -= 1
            self.forget()

    def forget(self) -> None:
        """Weights may change: until they are known again, each request is asked about."""
        self._state = None
        self._num_forgotten += 1
        self._unsure.update(stream for stream, known in self._waiting.items() if known is None)

    def _is_current(self, stream: int) -> bool:
        """Whether it began with the weights that serve now, as far as anybody here knows those."""
        is_sure = stream not in self._unsure and not self._is_shared
        return is_sure and self._state is not None and not self._num_elsewhere

    async def _look(self) -> None:
        """What serves now, if it is not known; nobody waits for a change that is under way."""
        if self._state is not None or self._is_shared or self._changing.locked():
            return
        async with self._changing:
            before = self._num_forgotten
            found = await self._described()
            if before == self._num_forgotten:
                self._state = found

    async def _find(self, streams: tuple[int, ...]) -> tuple[int | None, ...]:
        reply: Versions = await self._ask(FindVersions(streams), Versions)
        return reply.versions

    async def _described(self) -> WeightsState:
        state: WeightsState = await self._ask(DescribeWeights(), WeightsState)
        return state

    def _forget_stream(self, stream: int) -> None:
        self._waiting.pop(stream, None)
        self._unsure.discard(stream)
