"""Counts that all processes of one proxy see, so that limits hold for all of them together.

They lie in shared memory. A count has a place for each process, which it alone writes, and the sum
of the places is the count: nobody waits for a lock, and what a dead process held is given back by
clearing its places. Two processes that look at the same moment may both take the last of a budget,
so a limit can be passed by one request for each process.

Runs in: every process of a proxy with completion processes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Callable
from typing import Final, Self

from clairai.proxy.completions.request_scores import ScoreBudget
from clairai.proxy.engine_facts import BankChanges
from clairai.proxy.load_limits import BodyBudget, ByteRates, Places, RateBucket
from clairai.proxy.proxy_settings import Limits

_WORD: Final = 8  # bytes: every count is one aligned word, which is read and written whole
_KEY_WORDS: Final = 4  # a secret key, so that nobody can choose clients that share a count
_CLIENTS: Final = 1024  # clients are told apart by so many counts; two may share one
# Words of one process.
_BEAT, _PLACES, _BODIES, _SCORES, _BANK_CHANGES, _CLIENT_BODIES = range(6)
_PROCESS_WORDS: Final = _CLIENT_BODIES + _CLIENTS
# Words of all processes: when each rate is used up to.
_RATE_WORDS: Final = 1 + _CLIENTS


class SharedCounts:
    """The counts as process `number` sees them; 0 is the first process."""

    def __init__(self, fd: int, *, number: int, num_processes: int) -> None:
        """Does not take over the descriptor."""
        self.number, self.num_processes = number, num_processes
        self._memory = mmap.mmap(fd, _num_bytes(num_processes))
        self._key = self._memory[: _KEY_WORDS * _WORD]
        view = memoryview(self._memory)
        self._counts, self._times = view.cast("q"), view.cast("d")
        self._rates = _KEY_WORDS + num_processes * _PROCESS_WORDS

    @classmethod
    def create(cls, num_processes: int) -> tuple[Self, int]:
        """New counts, and the descriptor by which other processes map them."""
        fd = os.memfd_create("clairai-proxy", os.MFD_CLOEXEC)
        os.ftruncate(fd, _num_bytes(num_processes))
        os.pwrite(fd, secrets.token_bytes(_KEY_WORDS * _WORD), 0)
        return cls(fd, number=0, num_processes=num_processes), fd

    def total(self, word: int) -> int:
        first = _KEY_WORDS + word
        return sum(self._counts[first : self._rates : _PROCESS_WORDS])

    def own(self, word: int) -> int:
        return self._counts[self._at(self.number, word)]

    def of_first(self, word: int) -> int:
        return self._counts[self._at(0, word)]

    def set_own(self, word: int, value: int) -> None:
        self._counts[self._at(self.number, word)] = value

    def clear(self, number: int) -> None:
        """Process `number` is gone, and holds nothing."""
        for word in range(_PROCESS_WORDS):
            self._counts[self._at(number, word)] = 0

    def beat(self) -> None:
        """This process makes progress."""
        self._times[self._at(self.number, _BEAT)] = time.monotonic()

    def last_beat_s(self, number: int) -> float:
        """On the clock of time.monotonic(), which all processes share; 0: it has not begun."""
        return self._times[self._at(number, _BEAT)]

    def client_index(self, client: str) -> int:
        digest = hashlib.blake2b(client.encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") % _CLIENTS

    def rate(self, index: int) -> float:
        return self._times[self._rates + index]

    def set_rate(self, index: int, used_to_s: float) -> None:
        self._times[self._rates + index] = used_to_s

    def _at(self, number: int, word: int) -> int:
        return _KEY_WORDS + number * _PROCESS_WORDS + word


def _num_bytes(num_processes: int) -> int:
    return (_KEY_WORDS + num_processes * _PROCESS_WORDS + _RATE_WORDS) * _WORD


class SharedBankChanges(BankChanges):
    """Seen by every process at once: nobody has to be told, and nobody can be late.

    Counted by the first process, which answers whoever changes the bank.
    """

    def __init__(self, counts: SharedCounts) -> None:
        super().__init__()
        self._counts = counts

    @property
    def num(self) -> int:
        return self._counts.of_first(_BANK_CHANGES)

    def add(self) -> None:
        assert self._counts.number == 0
        self._counts.set_own(_BANK_CHANGES, self._counts.own(_BANK_CHANGES) + 1)


class SharedPlaces(Places):
    """The requests that upstream works on, of all processes."""

    def __init__(self, counts: SharedCounts) -> None:
        super().__init__()
        self._counts = counts

    @property
    def num_taken(self) -> int:
        return self._counts.total(_PLACES)

    def add(self, amount: int) -> None:
        self._counts.set_own(_PLACES, self._counts.own(_PLACES) + amount)


class SharedScoreBudget(ScoreBudget):
    """How many scores all requests of all processes hold."""

    def __init__(self, limit: int, counts: SharedCounts) -> None:
        self._counts = counts
        super().__init__(limit)

    @property
    def held(self) -> int:
        """By this process."""
        return self._counts.own(_SCORES)

    @held.setter
    def held(self, held: int) -> None:
        self._counts.set_own(_SCORES, held)

    @property
    def has_room(self) -> bool:
        return self._counts.total(_SCORES) < self.limit


class SharedBodyBudget(BodyBudget):
    """The bytes of all bodies in all processes."""

    def __init__(self, limits: Limits, counts: SharedCounts) -> None:
        super().__init__(limits)
        self._counts = counts

    def held_by(self, client: str) -> int:
        return self._counts.total(_CLIENT_BODIES + self._counts.client_index(client))

    def held_in_all(self) -> int:
        return self._counts.total(_BODIES)

    def add(self, client: str, nbytes: int) -> None:
        for word in (_BODIES, _CLIENT_BODIES + self._counts.client_index(client)):
            self._counts.set_own(word, self._counts.own(word) + nbytes)


class SharedBucket(RateBucket):
    """A bucket whose state is one number: the time up to which its rate is used.

    Of two processes that take at the same moment one may go uncounted. Bytes a second are bounded
    for the sake of other clients' delays, which that does not change.
    """

    def __init__(self, counts: SharedCounts, index: int, *, rate: int, burst: int) -> None:
        self._counts, self._index = counts, index
        self._rate, self._burst = rate, burst
        self._now_s = 0.0

    def wait_s(self, nbytes: int, now_s: float) -> float:
        self._now_s = now_s
        used = (self._used_to_s() - now_s) * self._rate
        return max(0.0, (used + nbytes - self._burst) / self._rate)

    def take(self, nbytes: int) -> None:
        self._counts.set_rate(self._index, self._used_to_s() + nbytes / self._rate)

    def _used_to_s(self) -> float:
        return max(self._counts.rate(self._index), self._now_s)


class SharedByteRates(ByteRates):
    """How many bytes of JSON all processes read a second, of each client and of all."""

    def __init__(
        self,
        limits: Limits,
        counts: SharedCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        super().__init__(limits, clock)

    def bucket_of_all(self) -> RateBucket:
        limits = self._limits
        return SharedBucket(self._counts, 0, rate=limits.json_rate, burst=limits.json_burst)

    def bucket_of(self, client: str) -> RateBucket:
        rate, burst = self._limits.client_json_rate, self._limits.client_json_burst
        index = 1 + self._counts.client_index(client)
        return SharedBucket(self._counts, index, rate=rate, burst=burst)
