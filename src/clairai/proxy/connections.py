"""Counts the open connections of the proxy, and says which of them may send requests.

Near the bound some connections are kept for GET /health: whoever watches the proxy learns that it
is alive while others hold all connections.
"""

from __future__ import annotations

import ipaddress
import os
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

NUM_RESERVED: Final = 8  # connections beyond the bound, that may ask for health alone
# Descriptors for anything but clients: the ring, upstream's health, logs, files being read.
_SPARE_FILES: Final = 32 + 2 * NUM_RESERVED
_MOST_AT_ONCE: Final = 64
_FEWEST: Final = 4
_PEER_SHARE: Final = 0.75  # of all connections: one peer never has them all


class Allowance(Enum):
    """What a connection may do."""

    ANY = "any"
    HEALTH = "health"
    NONE = "none"


@dataclass(eq=False)
class OpenConnection:
    """One connection; `refuse` closes it, to make room for another that may ask for health."""

    peer: str
    allowance: Allowance
    refuse: Callable[[], None]


class Connections:
    """The open connections, in all and by peer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_by_peer = max(1, int(most * _PEER_SHARE))
        self._by_peer: Counter[str] = Counter()
        self._num_reserved = 0
        # Reserved ones that have not asked yet, the oldest first.
        self._silent: OrderedDict[OpenConnection, None] = OrderedDict()

    @property
    def most_at_once(self) -> int:
        """How many to accept before the first of them is looked at."""
        return max(1, min(_MOST_AT_ONCE, self._most // 8))

    @property
    def is_full(self) -> bool:
        """True if the next connection may ask for health alone, whoever opens it."""
        return self._by_peer.total() >= self._most

    @property
    def num_open(self) -> int:
        return self._by_peer.total() + self._num_reserved

    def has_room(self, peer: str) -> bool:
        """True if the next connection of this peer may send any request."""
        return not self.is_full and self._by_peer[peer] < self._most_by_peer

    def open(self, peer: str, refuse: Callable[[], None]) -> OpenConnection:
        """Count a connection, and say what it may do; call `close` when it has ended."""
        if self.has_room(peer):
            self._by_peer[peer] += 1
            return OpenConnection(peer, Allowance.ANY, refuse)
        if self._num_reserved >= NUM_RESERVED and self._silent:
            self._evict()
        if self._num_reserved >= NUM_RESERVED:
            return OpenConnection(peer, Allowance.NONE, refuse)
        self._num_reserved += 1
        connection = OpenConnection(peer, Allowance.HEALTH, refuse)
        self._silent[connection] = None
        return connection

    def note_request(self, connection: OpenConnection) -> None:
        """The connection has sent a whole head: it is not closed for another."""
        self._silent.pop(connection, None)

    def close(self, connection: OpenConnection) -> None:
        allowance, connection.allowance = connection.allowance, Allowance.NONE
        self._silent.pop(connection, None)
        if allowance is Allowance.HEALTH:
            self._num_reserved -= 1
        if allowance is not Allowance.ANY:
            return
        self._by_peer[connection.peer] -= 1
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]

    def _evict(self) -> None:
        connection = next(iter(self._silent))
        self.close(connection)
        connection.refuse()


def most_connections(limit: int) -> int:
    """As many as the limit, or as this process has descriptors for: each may need one upstream."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limit
    num_used = len(os.listdir("/proc/self/fd"))
    return max(_FEWEST, min(limit, (soft - num_used - _SPARE_FILES) // 2))


@lru_cache(maxsize=1024)
def peer_name(host: str | None) -> str:
    """Addresses that one machine can choose from are one peer: a network of IPv6."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host or "local"
    if address.version == 6 and not address.is_loopback:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
