"""Allocated regions of the arena never overlap, and all of it can be freed."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.capture import staging_arena
from clairai.capture.staging_arena import ALIGNMENT, ArenaRegion, StagingArena
from tests.support.ring_engine import until

NBYTES = 4096


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.none() | st.integers(1, NBYTES), max_size=60))
def test_allocated_regions_never_overlap_and_a_full_arena_gives_none(wanted: Any) -> None:
    arena, out = StagingArena.create(NBYTES), deque[ArenaRegion]()
    for nbytes in wanted:
        if nbytes is None:
            if out:
                arena.free(out.popleft().end)
            continue
        region = arena.allocate(nbytes)
        if region is None:
            assert out  # an empty arena has room for whatever fits in it
            continue
        assert region.start % ALIGNMENT == 0
        assert region.start + nbytes <= NBYTES
        for other in out:
            is_before = region.start + nbytes <= other.start
            assert is_before or region.start >= other.start + other.nbytes
        out.append(region)
    while out:
        arena.free(out.popleft().end)
    assert arena.used_nbytes == 0
    assert arena.allocate(NBYTES) is not None


def test_waiting_for_a_consumer_that_hangs_ends_and_is_not_tried_again_until_it_frees_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = StagingArena.create(NBYTES)
    full = arena.allocate(NBYTES)
    assert full is not None
    monkeypatch.setattr(staging_arena, "BLOCK_S", 0.05)
    assert arena.wait_for_room(NBYTES) is None
    monkeypatch.setattr(staging_arena, "BLOCK_S", 3600.0)
    assert arena.wait_for_room(NBYTES) is None  # at once
    freeing = threading.Timer(0.05, arena.free, (full.end,))
    freeing.start()
    until(lambda: arena.wait_for_room(NBYTES) is not None)
    freeing.join()


def test_what_a_dead_writer_has_not_read_is_free_again() -> None:
    arena = StagingArena.create(NBYTES)
    assert arena.allocate(NBYTES // 2) is not None
    assert arena.allocate(NBYTES) is None
    arena.discard_all()
    assert arena.used_nbytes == 0
    assert arena.allocate(NBYTES) is not None
