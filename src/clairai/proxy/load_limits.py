"""Keeps one client's large requests from delaying the others, and bounds the memory of all bodies.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, Protocol, TypeVar

from clairai.fields.request_body import LARGE_BYTES
from clairai.fields.turns import run_in_turns
from clairai.proxy.proxy_settings import Limits
from clairai.proxy.responses import HttpRefusal

Result = TypeVar("Result")
_MAX_CLIENTS: Final = 4096  # whose rates are known; of more, those that were quiet longest are not


class LargeBodies:
    """Reads large bodies beside the event loop, one at a time, and leaves it Python's lock mostly.

    Several threads would take the lock from the event loop in turns.
    """

    def __init__(self) -> None:
        self._reading = asyncio.Lock()

    async def run(self, body: bytes, work: Callable[[], Result]) -> Result:
        """`work` reads or writes this body."""
        if len(body) <= LARGE_BYTES:
            return work()
        async with self._reading:
            return await asyncio.to_thread(run_in_turns, work)


class Places:
    """Counts the requests that upstream works on."""

    def __init__(self) -> None:
        self._num_taken = 0

    @property
    def num_taken(self) -> int:
        return self._num_taken

    def add(self, amount: int) -> None:
        self._num_taken += amount


class BodyBudget:
    """The bytes of all bodies that are being received or passed on, in all and by client."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.bodies_bytes
        self._most_by_client = limits.client_bodies_bytes
        self._held: Counter[str] = Counter()
        self._num_held = 0

    @contextmanager
    def hold(self, client: str) -> Iterator[Callable[[int], None]]:
        """A function that takes bytes of the budget, or raises HttpRefusal; they are given back."""
        num_taken = 0

        def take(nbytes: int) -> None:
            nonlocal num_taken
            if self.held_by(client) + nbytes > self._most_by_client:
                raise _overloaded(f"your requests have {self._most_by_client} bytes in them")
            if self.held_in_all() + nbytes > self._most:
                raise _overloaded(f"the requests in the proxy have {self._most} bytes in them")
            num_taken += nbytes
            self.add(client, nbytes)

        try:
            yield take
        finally:
            self.add(client, -num_taken)

    def held_by(self, client: str) -> int:
        return self._held[client]

    def held_in_all(self) -> int:
        return self._num_held

    def add(self, client: str, nbytes: int) -> None:
        self._num_held += nbytes
        self._held[client] += nbytes
        if not self._held[client]:
            del self._held[client]


class RateBucket(Protocol):
    """Bytes that may be read at once: a burst after a rest, and so many more each second."""

    def wait_s(self, nbytes: int, now_s: float) -> float:
        """How long until so many bytes may be read; 0 if they may now."""

    def take(self, nbytes: int) -> None:
        """Count them; at the time of the last `wait_s`."""


class Bucket(RateBucket):
    """Bytes that may be read at once: `burst` after a rest, and `rate` more each second."""

    def __init__(self, *, rate: int, burst: int, now_s: float) -> None:
        self._rate, self._burst = rate, burst
        self._nbytes, self._at_s = float(burst), now_s

    def wait_s(self, nbytes: int, now_s: float) -> float:
        self._nbytes = min(self._burst, self._nbytes + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        return max(0.0, (nbytes - self._nbytes) / self._rate)

    def take(self, nbytes: int) -> None:
        self._nbytes -= nbytes


class ByteRates:
    """How many bytes of JSON are read a second, of each client and of all."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._all = self.bucket_of_all()
        self._clients: OrderedDict[str, RateBucket] = OrderedDict()

    def bucket_of_all(self) -> RateBucket:
        limits = self._limits
        return Bucket(rate=limits.json_rate, burst=limits.json_burst, now_s=self._clock())

    def bucket_of(self, client: str) -> RateBucket:
        """A new one."""
        del client
        rate, burst = self._limits.client_json_rate, self._limits.client_json_burst
        return Bucket(rate=rate, burst=burst, now_s=self._clock())

    def check(self, client: str, nbytes: int) -> None:
        """HttpRefusal if a body of this size would have to wait."""
        limits, now_s = self._limits, self._clock()
        wait_s = self._bucket(client).wait_s(nbytes, now_s)
        if wait_s > 0:
            raise _too_fast(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"one client may send {limits.client_json_rate} bytes of JSON a second",
                wait_s,
            )
        wait_s = self._all.wait_s(nbytes, now_s)
        if wait_s > 0:
            raise _too_fast(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the proxy reads {limits.json_rate} bytes of JSON a second",
                wait_s,
            )

    def take(self, client: str, nbytes: int) -> None:
        """As `check`; the bytes are counted."""
        self.check(client, nbytes)
        self._clients[client].take(nbytes)
        self._all.take(nbytes)

    def _bucket(self, client: str) -> RateBucket:
        bucket = self._clients.pop(client, None) or self.bucket_of(client)
        self._clients[client] = bucket
        if len(self._clients) > _MAX_CLIENTS:
            self._clients.popitem(last=False)
        return bucket


def _too_fast(status: HTTPStatus, reason: str, wait_s: float) -> HttpRefusal:
    wait = str(max(1, math.ceil(wait_s)))
    message = f"{reason}; send less, or try again in {wait} s"
    return HttpRefusal(status, message, code="overloaded", headers={"Retry-After": wait})


def _overloaded(reason: str) -> HttpRefusal:
    return HttpRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"{reason}, the most at once; try later",
        code="overloaded",
        headers={"Retry-After": "1"},
    )
