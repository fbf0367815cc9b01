"""Allocated regions of the arena never overlap, and all of it can be freed."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.capture.staging_arena import ALIGNMENT, ArenaRegion, StagingArena

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
