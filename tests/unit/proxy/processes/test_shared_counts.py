"""Limits that all processes of a proxy share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from clairai.proxy.load_limits import ByteRates
from clairai.proxy.processes.shared_counts import (
    SharedBankChanges,
    SharedBodyBudget,
    SharedByteRates,
    SharedCounts,
    SharedPlaces,
    SharedScoreBudget,
)
from clairai.proxy.proxy_settings import Limits
from clairai.proxy.responses import HttpRefusal

LIMITS = Limits(
    bodies_bytes=100,
    client_bodies_bytes=60,
    client_json_rate=10,
    client_json_burst=50,
    json_rate=20,
    json_burst=80,
)


@pytest.fixture
def pair() -> Iterator[tuple[SharedCounts, SharedCounts]]:
    """The counts as two processes see them."""
    first, fd = SharedCounts.create(3)
    try:
        yield first, SharedCounts(fd, number=2, num_processes=3)
    finally:
        os.close(fd)


def test_places_of_all_processes_are_one_count(pair: tuple[SharedCounts, SharedCounts]) -> None:
    here, there = map(SharedPlaces, pair)
    here.add(2)
    there.add(3)
    there.add(-1)
    assert here.num_taken == there.num_taken == 4


def test_a_change_of_the_bank_is_seen_by_all(pair: tuple[SharedCounts, SharedCounts]) -> None:
    here, there = map(SharedBankChanges, pair)
    here.add()
    pair[0].clear(2)  # a process that ends changes nothing
    here.add()
    assert (here.num, there.num) == (2, 2)


def test_what_a_dead_process_held_is_given_back(pair: tuple[SharedCounts, SharedCounts]) -> None:
    here, there = map(SharedPlaces, pair)
    here.add(2)
    there.add(3)
    with SharedBodyBudget(LIMITS, pair[1]).hold("a") as take:
        take(50)
        pair[0].clear(2)
        assert (here.num_taken, SharedBodyBudget(LIMITS, pair[0]).held_in_all()) == (2, 0)


def test_bodies_in_all_processes_have_one_bound(pair: tuple[SharedCounts, SharedCounts]) -> None:
    here, there = (SharedBodyBudget(LIMITS, counts) for counts in pair)
    with here.hold("a") as a, there.hold("a") as again, there.hold("b") as b:
        a(40)
        with pytest.raises(HttpRefusal, match="your requests"):
            again(21)
        b(60)
        with pytest.raises(HttpRefusal, match="requests in the proxy"):
            a(1)
    assert here.held_in_all() == there.held_by("a") == 0


def test_scores_of_all_processes_have_one_bound(pair: tuple[SharedCounts, SharedCounts]) -> None:
    here, there = (SharedScoreBudget(10, counts) for counts in pair)
    here.held += 6
    there.held += 3
    assert here.has_room
    there.held += 1
    assert not here.has_room
    here.held -= 1
    assert there.has_room


def test_a_rate_used_in_one_process_is_used_in_the_other(
    pair: tuple[SharedCounts, SharedCounts],
) -> None:
    here, there = (SharedByteRates(LIMITS, counts, clock=lambda: 1000.0) for counts in pair)
    here.take("a", 50)
    with pytest.raises(HttpRefusal, match="one client"):
        there.take("a", 1)
    there.take("b", 30)
    with pytest.raises(HttpRefusal, match="the proxy reads"):
        here.take("c", 1)


def test_a_shared_rate_is_that_of_one_process(pair: tuple[SharedCounts, SharedCounts]) -> None:
    """The same bytes at the same times are let in, and refused for as long."""
    now_s = 1000.0
    one = ByteRates(LIMITS, clock=lambda: now_s)
    shared = SharedByteRates(LIMITS, pair[0], clock=lambda: now_s)
    for pause_s, nbytes in [(0.0, 30), (0.5, 25), (0.0, 10), (3.0, 30), (9.0, 50), (0.1, 2)]:
        now_s += pause_s
        found = []
        for rates in (one, shared):
            try:
                rates.take("a", nbytes)
                found.append("")
            except HttpRefusal as refusal:
                found.append(refusal.message)
        assert found[0] == found[1]


def test_nobody_can_choose_clients_that_share_a_count(
    pair: tuple[SharedCounts, SharedCounts],
) -> None:
    another, fd = SharedCounts.create(3)
    os.close(fd)
    names = [f"10.0.0.{n}" for n in range(64)]
    indices = [pair[0].client_index(name) for name in names]
    assert indices == [pair[1].client_index(name) for name in names]
    assert indices != [another.client_index(name) for name in names]


def test_a_beat_is_seen_by_others(pair: tuple[SharedCounts, SharedCounts]) -> None:
    assert pair[0].last_beat_s(2) == 0
    pair[1].beat()
    assert pair[0].last_beat_s(2) > 0
    assert pair[0].last_beat_s(1) == 0
