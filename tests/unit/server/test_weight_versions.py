"""Which version of the weights each request has, with changes between and during requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from clairai.server.weight_versions import WeightVersions
from clairai.wire.weights_messages import DescribeWeights, FindVersions, Versions, WeightsState


class Worker:
    """An engine's worker: which streams began with which weights, and what was asked of it."""

    def __init__(self) -> None:
        self.version = 0
        self.began: dict[int, int] = {}
        self.asked: list[type] = []
        self.before_answer: Callable[[], None] = lambda: None

    def begin(self, *streams: int) -> None:
        self.began |= dict.fromkeys(streams, self.version)

    async def ask(self, control: Any, _: Any) -> Any:
        self.asked.append(type(control))
        reply: Any = WeightsState(self.version, "", "", "", "cpu", 0)
        if isinstance(control, FindVersions):
            reply = Versions(tuple(map(self.began.get, control.streams)))
        await asyncio.sleep(0)
        self.before_answer()
        return reply


@pytest.fixture
def worker() -> Worker:
    return Worker()


def weight_versions(
    worker: Worker, *, accepts_weights: bool = True, is_shared: bool = False
) -> WeightVersions:
    return WeightVersions(
        worker.ask, asyncio.Lock(), accepts_weights=accepts_weights, is_shared=is_shared
    )


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def changed(worker: Worker, made: WeightVersions) -> None:
    """As a commit does it: a pause, the worker, then this, then requests go on."""
    async with made._changing:
        made.invalidate()
        worker.version += 1
        await made.after_change()


def test_a_request_that_ended_before_the_change_has_the_old_version(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)
        with made.waiting(1), made.waiting(2), made.waiting(3):
            worker.begin(1)
            await changed(worker, made)
            worker.begin(2)
            await changed(worker, made)
            worker.begin(3)
            assert [await made.version_of(stream) for stream in (1, 2, 3)] == [0, 1, 2]

    run(work())


def test_no_version_is_assumed_while_the_weights_change(worker: Worker) -> None:
    """The first look at an engine may not overtake a change that is under way."""

    async def work() -> None:
        made = weight_versions(worker)
        with made.waiting(1), made.waiting(2):
            worker.begin(1, 2)
            async with made._changing:
                worker.version += 1
                assert await made.version_of(1) == 0
                await made.after_change()
            assert await made.version_of(2) == 0

    run(work())


def test_a_change_without_a_known_end_leaves_no_stale_version(
    worker: Worker,
) -> None:
    """The worker has changed, and its answer, or the question after it, was lost."""

    async def work() -> None:
        made = weight_versions(worker)
        await made.version_of(9)
        with made.waiting(1), made.waiting(2):
            worker.begin(1)
            async with made._changing:
                made.invalidate()
                worker.version += 1
            with made.waiting(3):
                worker.begin(2, 3)
                told = [await made.version_of(stream) for stream in (1, 2, 3)]
        assert told == [0, 1, 1]

    run(work())


def test_requests_that_waited_through_a_change_cost_no_question(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)
        with made.waiting(1), made.waiting(2):
            worker.begin(1)
            await changed(worker, made)
            worker.begin(2)
            worker.asked.clear()
            assert [await made.version_of(stream) for stream in (1, 2)] == [0, 1]
        assert worker.asked == []

    run(work())


def test_requests_cost_no_question_once_the_version_is_known(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)
        for stream in range(1, 6):
            with made.waiting(stream):
                worker.begin(stream)
                assert await made.version_of(stream) == 0
        assert worker.asked == [DescribeWeights]
        assert await made.state() is made._state
        await changed(worker, made)
        assert worker.asked == [DescribeWeights, FindVersions, DescribeWeights]

    run(work())


def test_a_call_by_others_makes_the_version_unknown(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)
        await made.version_of(9)
        with made.waiting(1), made.waiting(2), made.waiting(3):
            worker.begin(1)
            with made.other_call():
                worker.version = 7
                worker.begin(2)
                assert await made.version_of(2) == 7, "its token may come before their answer"
            worker.begin(3)
            assert [await made.version_of(stream) for stream in (3, 1)] == [7, 0]

    run(work())


def test_an_answer_overtaken_by_another_call_is_not_kept(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)

        def overtake() -> None:
            worker.before_answer = lambda: None
            with made.other_call():
                worker.version = 3
            worker.begin(2)

        with made.waiting(1), made.waiting(2):
            worker.begin(1)
            worker.before_answer = overtake
            assert await made.version_of(1) == 0
            assert await made.version_of(2) == 3

    run(work())


def test_one_of_several_servers_asks_each_time(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker, is_shared=True)
        for stream in (1, 2):
            with made.waiting(stream):
                worker.begin(stream)
                assert await made.version_of(stream) == worker.version
            worker.version += 1  # by another
        found = await made.state()
        assert found is not None
        assert found.version == 2

    run(work())


def test_an_engine_that_accepts_no_weights_is_never_asked(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker, accepts_weights=False)
        with made.waiting(1):
            assert await made.version_of(1) is None
        await made.after_change()
        assert await made.state() is None
        assert worker.asked == []

    run(work())


def test_several_prompts_in_one_request_have_no_one_version(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)
        with made.waiting(None):
            assert await made.version_of(None) is None

    run(work())


def test_nothing_is_kept_of_requests_that_have_ended(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)
        for stream in (1, 2, 3):
            with made.waiting(stream), made.other_call():
                pass
        assert not made._waiting
        assert not made._uncertain

    run(work())


def test_a_second_request_of_the_same_stream_does_not_end_the_first(worker: Worker) -> None:
    async def work() -> None:
        made = weight_versions(worker)
        with made.waiting(7):
            worker.begin(7)
            with made.waiting(7):  # the core refuses it
                pass
            await changed(worker, made)
            worker.began.clear()  # the first has ended, and the worker has forgotten it
            assert await made.version_of(7) == 0

    run(work())
