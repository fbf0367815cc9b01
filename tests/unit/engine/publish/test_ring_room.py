"""An engine that keeps scores waits for its spool, and for nobody who will not come."""

from __future__ import annotations

import itertools

import pytest

from clairai.engine.publish import ring_room
from clairai.engine.publish.ring_room import RingRoom
from clairai.ring.layout import RingShape

SHAPE = RingShape(slots=16, slot_bytes=4096, ahead=4)
ROOM = 12  # slots less those that the writer may be writing


class ToySpool:
    """Has read what it is told, one number at each look; the last stays."""

    def __init__(self, *num_read: int, returncode: int | None = None) -> None:
        self._num_read = list(num_read)
        self.num_looks = 0
        self.returncode = returncode

    @property
    def num_read(self) -> int:
        self.num_looks += 1
        return self._num_read.pop(0) if len(self._num_read) > 1 else self._num_read[0]


def room(spool: ToySpool) -> RingRoom:
    """Its clock goes on by a second at each look."""
    seconds = itertools.count()
    return RingRoom(SHAPE, spool, lambda: float(next(seconds)))


def test_a_ring_with_room_is_written_at_once_up_to_what_was_not_read() -> None:
    spool = ToySpool(100)
    assert room(spool).find_limit(110, 2) == 100 + ROOM
    assert spool.num_looks == 1


def test_a_step_waits_until_what_it_overwrites_was_read() -> None:
    made = room(ToySpool(100, 100, 100, 101, 105, 106))
    assert made.find_limit(112, 6) == 106 + ROOM
    assert made.waited_s > 0


def test_a_spool_that_goes_on_is_waited_for_however_slow_it_is() -> None:
    slowly = [at for at in range(100, 140) for _ in range(int(ring_room.STALL_S) - 2)]
    assert room(ToySpool(*slowly)).find_limit(112, 12) == 112 + ROOM


@pytest.mark.parametrize("spool", [ToySpool(100), ToySpool(100, returncode=1)])
def test_a_spool_that_hangs_or_has_died_is_not_waited_for_again(spool: ToySpool) -> None:
    made = room(spool)
    assert made.find_limit(112, 6) == 118
    waited_s = made.waited_s
    assert waited_s <= ring_room.STALL_S + 2
    assert made.find_limit(118, 6) == 124
    assert made.waited_s == waited_s
    spool._num_read = [130]  # it goes on, or another one does
    assert made.find_limit(124, 6) == 130 + ROOM


def test_a_step_that_is_larger_than_the_ring_waits_for_nothing() -> None:
    made = room(ToySpool(100))
    assert made.find_limit(100, ROOM + 1) == 100 + ROOM + 1
    assert made.waited_s == 0
