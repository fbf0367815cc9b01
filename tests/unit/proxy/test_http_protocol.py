"""Requests that come at once begin in order, a few in each round of the event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from clairai.proxy.http_protocol import REQUESTS_PER_ROUND, Turns


def rounds_of(num_requests: int) -> list[int]:
    """How many of the requests that come at once begin in each round of the event loop."""

    async def run() -> list[int]:
        seen: list[int] = []
        begun: list[int] = []
        turns = Turns()
        for number in range(num_requests):
            turns.take(partial(seen.append, number))
        while len(seen) < num_requests:
            begun.append(len(seen) - sum(begun))
            await asyncio.sleep(0)
        begun.append(len(seen) - sum(begun))
        assert seen == sorted(seen)
        return begun

    return asyncio.run(run())


def test_a_few_begin_at_once_and_the_others_in_rounds_of_as_many() -> None:
    most = REQUESTS_PER_ROUND
    found = rounds_of(2 * most + 3)
    assert found[0] == most
    assert [count for count in found if count] == [most, most, 3]


def test_no_request_waits_for_as_many_rounds_as_there_are_requests() -> None:
    assert len(rounds_of(256)) <= 2 * 256 / REQUESTS_PER_ROUND + 2


def test_one_that_comes_later_does_not_wait_for_a_turn_that_nobody_has() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        turns = Turns()
        for _ in range(REQUESTS_PER_ROUND):
            turns.take(partial(seen.append, "a"))
        for _ in range(3):
            await asyncio.sleep(0)
        turns.take(partial(seen.append, "b"))
        return seen

    assert asyncio.run(run()) == ["a"] * REQUESTS_PER_ROUND + ["b"]


def fill(turns: Turns) -> None:
    """Take all turns of this round."""
    for _ in range(REQUESTS_PER_ROUND):
        turns.take(lambda: None)


def fail() -> None:
    raise ValueError("planted")


def test_one_that_fails_does_not_hold_up_the_others() -> None:
    async def run() -> list[str]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: seen.append("!"))
        turns = Turns()
        fill(turns)
        turns.take(partial(seen.append, "a"))
        turns.take(fail)
        turns.take(partial(seen.append, "c"))
        for _ in range(4):
            await asyncio.sleep(0)
        return seen

    seen: list[str] = []
    assert asyncio.run(run()) == ["a", "!", "c"]


def test_one_that_takes_another_turn_begins_it_while_there_is_room() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        turns = Turns()

        def again() -> None:
            seen.append("a")
            turns.take(partial(seen.append, "later"))

        fill(turns)
        turns.take(again)
        turns.take(partial(seen.append, "b"))
        for _ in range(4):
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(run()) == ["a", "later", "b"]
