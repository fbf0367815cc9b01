"""Requests that come at once begin one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from clairai.proxy.http_protocol import Turns


def rounds_of(give: Callable[[Turns, Callable[[str], None]], None]) -> list[str]:
    """What begins, with a mark after each round of the event loop."""

    async def run() -> list[str]:
        seen: list[str] = []
        give(Turns(), seen.append)
        for _ in range(6):
            seen.append("|")
            await asyncio.sleep(0)
        return seen

    return asyncio.run(run())


def test_the_first_begins_at_once_and_each_other_in_a_round_of_its_own() -> None:
    def give(turns: Turns, note: Callable[[str], None]) -> None:
        for name in "abc":
            turns.take(partial(note, name))

    assert "".join(rounds_of(give)).startswith("a|b|c|")


def test_one_that_comes_later_does_not_wait_for_a_turn_that_nobody_has() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        turns = Turns()
        turns.take(partial(seen.append, "a"))
        for _ in range(3):
            await asyncio.sleep(0)
        turns.take(partial(seen.append, "b"))
        return seen

    assert asyncio.run(run()) == ["a", "b"]


def fail() -> None:
    raise ValueError("planted")


def test_one_that_fails_does_not_hold_up_the_others() -> None:
    async def run() -> list[str]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: seen.append("!"))
        turns = Turns()
        turns.take(partial(seen.append, "a"))
        turns.take(fail)
        turns.take(partial(seen.append, "c"))
        for _ in range(4):
            await asyncio.sleep(0)
        return seen

    seen: list[str] = []
    assert asyncio.run(run()) == ["a", "!", "c"]


def test_one_that_takes_another_turn_goes_to_the_end() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        turns = Turns()

        def again() -> None:
            seen.append("a")
            turns.take(partial(seen.append, "later"))

        turns.take(again)
        turns.take(partial(seen.append, "b"))
        for _ in range(4):
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(run()) == ["a", "later", "b"]
