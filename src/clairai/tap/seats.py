"""Takes keys of rows and programs; gives each a place in a table of fixed size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Place(Generic[Key]):
    """Where something is; if it is new there, it is yet to be written."""

    index: int
    is_new: bool = False
    evicted: Key | None = None  # whose place it was until now


class Seats(Generic[Key]):
    """What nobody uses keeps its place until that is needed; the longest unused goes first."""

    def __init__(self, what: str, first: int, number: int) -> None:
        """`what` they are, for messages; places are `number` from `first` on."""
        self._what, self._number = what, number
        self._free = list(range(first + number - 1, first - 1, -1))
        self._index: dict[Key, int] = {}
        self._users: dict[Key, int] = {}
        self._unused: OrderedDict[Key, None] = OrderedDict()

    def __getitem__(self, key: Key) -> int:
        return self._index[key]

    def take(self, key: Key) -> Place[Key]:
        """One more user of `key`."""
        index = self._index.get(key)
        if index is not None:
            self._unused.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
            return Place(index)
        evicted = None
        if not self._free:
            evicted = self._evict()
        index = self._index[key] = self._free.pop()
        self._users[key] = 1
        return Place(index, is_new=True, evicted=evicted)

    def leave(self, key: Key) -> None:
        """One user less."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._unused[key] = None

    def forget(self, key: Key) -> None:
        """If nobody uses it, its place is free."""
        if key in self._unused:
            del self._unused[key]
            self._free.append(self._index.pop(key))

    def _evict(self) -> Key:
        if not self._unused:
            raise RuntimeError(
                f"all {self._number} {self._what} are in use; requests beyond that are to be "
                f"refused at admission: please report this"
            )
        key = next(iter(self._unused))
        self.forget(key)
        return key
