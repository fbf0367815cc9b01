"""Who may have a connection, and how many there may be."""

from __future__ import annotations

import resource

import pytest

from clairai.proxy.connections import (
    NUM_RESERVED,
    Allowance,
    Connections,
    most_connections,
    peer_name,
)


def allowances(connections: Connections, peer: str, count: int) -> list[Allowance]:
    return [connections.open(peer, lambda: None).allowance for _ in range(count)]


def test_one_peer_never_has_all_connections() -> None:
    connections = Connections(8)
    assert allowances(connections, "a", 7) == [Allowance.ANY] * 6 + [Allowance.HEALTH]
    assert allowances(connections, "b", 3) == [Allowance.ANY] * 2 + [Allowance.HEALTH]


def test_beyond_the_bound_health_has_a_few_and_then_there_is_none() -> None:
    connections = Connections(1)
    first = connections.open("a", lambda: None)
    asking = [connections.open("b", lambda: None) for _ in range(NUM_RESERVED)]
    for connection in asking:
        connections.note_request(connection)
    last = connections.open("b", lambda: None)
    assert [connection.allowance for connection in (first, *asking, last)] == [
        *(Allowance.ANY, *[Allowance.HEALTH] * NUM_RESERVED, Allowance.NONE)
    ]
    for connection in (last, first, asking[0]):
        connections.close(connection)
        connections.close(connection)  # once counts
    assert connections.num_open == NUM_RESERVED - 1
    assert connections.open("b", lambda: None).allowance is Allowance.ANY


def test_the_oldest_silent_connection_leaves_for_one_that_may_ask_for_health() -> None:
    connections, left = Connections(1), []
    opened = [connections.open("a", lambda at=at: left.append(at)) for at in range(12)]  # type: ignore[misc]
    assert left == [1, 2, 3]
    assert [connection.allowance for connection in opened[4:]] == [Allowance.HEALTH] * NUM_RESERVED
    assert connections.num_open == 1 + NUM_RESERVED


@pytest.mark.parametrize(("soft", "at_most"), [(128, 48), (64, 16), (10, 4)])
def test_there_are_no_more_than_the_process_has_descriptors_for(
    monkeypatch: pytest.MonkeyPatch, soft: int, at_most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert 4 <= most_connections(4096) <= at_most


def test_without_a_limit_of_descriptors_the_setting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert most_connections(4096) == 4096


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::1"),
        (None, "local"),
    ],
)
def test_a_network_that_one_machine_can_have_is_one_peer(host: str | None, name: str) -> None:
    assert peer_name(host) == name
