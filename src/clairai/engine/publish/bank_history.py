"""The banks of probes that records name, described for readers of the ring.

Runs in: the worker. A record carries its bank's version; a reader asks the ring's server for the
rest. New weights are a new version too, with the same probes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from clairai.probe.bank import EngineBank
from clairai.wire.ring_messages import Bank

MAX_BANKS_KEPT: Final = 256
DESCRIBE_DELAY_S: Final = 0.02


class BankHistory:
    """The bank that serves, and those before it that a record may name."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, BankDescription] = OrderedDict()
        self._version = -1  # of the bank that serves
        self._since = 0  # records there were when it began to
        self._replaced: deque[BankDescription] = deque()  # not described yet
        self._describing = ThreadPoolExecutor(1, thread_name_prefix="clairai-bank")

    def add(self, bank: EngineBank, weights: int | None, published: int) -> None:
        """This bank serves from now on; `published` is how many records there are so far.

        Called before the first record with its version, and after the last one of the bank before.
        """
        self._release(published)
        self._version, self._since = bank.version, published
        self._kept[bank.version] = BankDescription(bank, weights)
        while len(self._kept) > MAX_BANKS_KEPT:
            self._kept.popitem(last=False)

    def describe(self, version: int) -> Bank | None:
        """What readers are told of this bank; None if it is not kept any more."""
        found = self._kept.get(version)
        return None if found is None else found.get()

    def _release(self, published: int) -> None:
        """Let go of the directions of the bank that is replaced."""
        before = self._kept.get(self._version)
        if before is None:
            return
        if published == self._since:  # no record has its version: no reader will ask
            del self._kept[self._version]
            return
        self._replaced.append(before)
        self._describing.submit(self._describe_replaced)

    def _describe_replaced(self) -> None:
        """After a delay: the caller that changed the bank is waiting for its reply."""
        if not self._replaced:  # the last call did it
            return
        time.sleep(DESCRIBE_DELAY_S)
        while self._replaced:
            self._replaced.popleft().get()

    def close(self) -> None:
        self._describing.shutdown()


class BankDescription:
    """What readers are told of a bank, made when it is first needed.

    Digests of hundreds of probes take a while; once they are made, the bank itself is let go.
    """

    def __init__(self, bank: EngineBank, weights: int | None) -> None:
        self._bank: EngineBank | None = bank
        self._weights = weights
        self._message: Bank | None = None
        self._making = threading.Lock()  # readers ask on the server's thread

    def get(self) -> Bank:
        with self._making:
            if self._bank is not None:
                self._message, self._bank = self._bank.to_message(self._weights), None
            assert self._message is not None
            return self._message
