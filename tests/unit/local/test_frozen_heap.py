"""What was there when a server began is not gone through again; garbage that it makes is freed."""

from __future__ import annotations

import gc
import weakref

from clairai.local.frozen_heap import frozen_heap


class Node:
    """A cycle, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_goes_through_what_came_later_alone() -> None:
    before = Node()
    with frozen_heap():
        node = Node()
        looked_at = {id(found) for found in gc.get_objects()}
        assert id(node) in looked_at
        assert id(before) not in looked_at
    assert any(found is before for found in gc.get_objects())


def test_garbage_that_is_made_while_it_serves_is_freed() -> None:
    with frozen_heap():
        gone = weakref.ref(Node())
        gc.collect()
        assert gone() is None
