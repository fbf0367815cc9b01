"""Several engine cores are asked as one: changes reach all or none, in one order for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clairai.engine.worker_control import answer_control
from clairai.errors import CoresDifferError
from clairai.server.core_group import CoreGroup
from clairai.wire import control_messages, ring_messages, steering_messages, weights_messages
from clairai.wire.capture_messages import (
    Captured,
    Captures,
    CaptureState,
    ConsumerStatus,
    DescribeCapture,
    FindCaptures,
    ListCaptures,
)
from clairai.wire.control_messages import AddProbes, BankState, Control, ControlReply
from tests.support import toy_publisher as toy


class Core:
    """An engine core with a real bank; only vLLM's way to it is left out."""

    def __init__(self, publisher: Any, number: int) -> None:
        self.publisher = publisher
        self._rng = np.random.default_rng(number)
        self.asked: list[Control] = []
        self.made: list[bytes] = []  # in the order in which it acted on them
        self.is_asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.fixed: ControlReply | None = None  # what it answers, whatever is asked

    async def call(self, message: bytes) -> list[bytes]:
        self.asked.append(msgspec.msgpack.decode(message, type=Control))
        self.is_asked.set()
        await self.answers.wait()
        for _ in range(self._rng.integers(5)):  # a message may overtake another on its way
            await asyncio.sleep(0)
        if self.fixed is not None:
            return [msgspec.msgpack.encode(self.fixed)]
        self.made.append(message)
        return [answer_control(self.publisher, message)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.publisher.bank.names))


@pytest.fixture
def cores(runtime: Path) -> Iterator[list[Core]]:
    with ExitStack() as stack:
        yield [Core(stack.enter_context(toy.running_publisher(runtime)), at) for at in range(2)]


def group(cores: list[Core], folder: Path) -> CoreGroup:
    return CoreGroup([core.call for core in cores], folder)


def read(reply: bytes) -> Any:
    return msgspec.msgpack.decode(reply, type=ControlReply)


def test_a_change_reaches_all_cores_with_one_version(cores: list[Core], tmp_path: Path) -> None:
    async def main() -> None:
        reply = read(await group(cores, tmp_path).ask(AddProbes((toy.file_of("a"),))))
        assert isinstance(reply, BankState)
        assert [core.publisher.bank.version for core in cores] == [reply.version] * 2

    asyncio.run(main())
    assert [core.names for core in cores] == [("a",)] * 2


def test_what_the_first_core_refuses_no_other_is_asked(cores: list[Core], tmp_path: Path) -> None:
    async def main() -> None:
        asked = control_messages.RemoveProbes(("nobody",))
        reply = read(await group(cores, tmp_path).ask(asked))
        assert isinstance(reply, ring_messages.Refusal)

    asyncio.run(main())
    assert [len(core.asked) for core in cores] == [1, 0]


def test_a_caller_that_leaves_does_not_end_a_change_between_two_cores(
    cores: list[Core], tmp_path: Path
) -> None:
    async def main() -> None:
        first, second = cores
        second.answers.clear()
        several = group(cores, tmp_path)
        asking = asyncio.ensure_future(several.ask(AddProbes((toy.file_of("a"),))))
        await second.is_asked.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        second.answers.set()
        assert first.publisher.bank.version == 1
        # What is left of the change is done before the next one.
        await several.ask(AddProbes((toy.file_of("b"),)))

    asyncio.run(asyncio.wait_for(main(), 20))
    assert [core.names for core in cores] == [("a", "b")] * 2


def test_changes_of_two_api_servers_come_to_all_cores_in_one_order(
    cores: list[Core], tmp_path: Path
) -> None:
    async def main() -> None:
        servers = [group(cores, tmp_path), group(cores, tmp_path)]
        await servers[0].ask(AddProbes((toy.file_of("a"),)))
        files = [toy.file_of("a", description=str(at)) for at in range(6)]
        changed = (
            servers[at % 2].ask(control_messages.ReplaceProbes((file,)))
            for at, file in enumerate(files)
        )
        replies = await asyncio.gather(*changed)
        assert len({read(reply).version for reply in replies}) == len(files)

    asyncio.run(asyncio.wait_for(main(), 20))
    first, second = cores
    assert first.made == second.made
    assert len(first.made) == 7


def test_cores_that_differ_are_not_changed_any_more(cores: list[Core], tmp_path: Path) -> None:
    async def main() -> None:
        several = group(cores, tmp_path)
        cores[1].fixed = ring_messages.Refusal("error", "no memory left")
        with pytest.raises(CoresDifferError, match=r"no memory left.*restart the engine"):
            await several.ask(AddProbes((toy.file_of("a"),)))
        with pytest.raises(CoresDifferError):
            await several.ask(AddProbes((toy.file_of("b"),)))

    asyncio.run(main())
    assert cores[0].names == ("a",)
    assert [len(core.asked) for core in cores] == [1, 1]


def test_the_core_that_knows_answers(cores: list[Core], tmp_path: Path) -> None:
    def ask(control: Control, *answers: ControlReply) -> Any:
        for core, answer in zip(cores, answers, strict=True):
            core.fixed = answer
        return read(asyncio.run(group(cores, tmp_path).ask(control)))

    nothing = steering_messages.RefusalReason("", "")
    why = steering_messages.RefusalReason("request", "it is wrong")
    assert ask(steering_messages.WhyRefused(1), nothing, why) == why
    assert ask(steering_messages.WhyRefused(1), nothing, nothing) == nothing
    versions = weights_messages.Versions
    asked = weights_messages.FindVersions((1, 2, 3))
    assert ask(asked, versions((5, None, None)), versions((None, 6, None))).versions == (5, 6, None)


def test_a_change_of_a_running_request_is_answered_by_the_cores_that_run_it(
    cores: list[Core], tmp_path: Path
) -> None:
    def ask(*answers: ControlReply) -> Any:
        return ask_cores(cores, tmp_path, steering_messages.ChangeSteering(1, b"[]"), *answers)

    absent = steering_messages.SteeringChanged((), b"[]")
    changed = steering_messages.SteeringChanged((4,), b"[]")
    refused = ring_messages.Refusal("vector", "no vector is named calm")
    assert ask(absent, changed) == changed
    assert ask(changed, changed).positions == (4, 4)  # answers of one request on both
    assert ask(absent, absent) == absent
    assert ask(absent, refused) == ask(refused, absent) == ask(refused, refused) == refused
    partly = ask(changed, refused)
    assert (type(partly), partly.code) == (ring_messages.Refusal, "vector")
    assert partly.reason == (
        "answers on engine core 1 are steered as before: no vector is named calm; those on "
        "others are changed from position 4 on"
    )


def ask_cores(cores: list[Core], folder: Path, control: Control, *answers: ControlReply) -> Any:
    for core, answer in zip(cores, answers, strict=True):
        core.fixed = answer
    return read(asyncio.run(group(cores, folder).ask(control)))


def captured(stream: int, choice: int, since: float) -> Captured:
    return Captured(stream, choice, "kept", ("post_block.0",), "raw", rows=5, since=since)


def test_captures_of_all_cores_are_one_list(cores: list[Core], tmp_path: Path) -> None:
    one, two, three = captured(1, 0, 10.0), captured(1, 1, 11.0), captured(2, 0, 10.5)
    ask = ask_cores
    found = ask(cores, tmp_path, FindCaptures(streams=(1, 2, 3)), Captures(((two,), (), ())),
                Captures(((one,), (three,), ())))  # fmt: skip
    assert found.found == ((one, two), (three,), ())  # answers in order; nothing of the third
    older = captured(4, 0, 9.0)
    lists = (Captures(((two,), (older,))), Captures(((three,), (one,))))
    assert ask(cores, tmp_path, ListCaptures(3), *lists).found == ((one, two), (three,), (older,))
    assert ask(cores, tmp_path, ListCaptures(1), *lists).found == ((one, two),)


def test_a_core_that_captures_nothing_speaks_for_all(cores: list[Core], tmp_path: Path) -> None:
    off = ring_messages.Refusal("capture-off", "this engine does not capture")
    for control in (FindCaptures(streams=(1,)), ListCaptures(), DescribeCapture()):
        assert ask_cores(cores, tmp_path, control, off, off) == off


def test_numbers_of_all_cores_are_added_up_and_consumers_named(
    cores: list[Core], tmp_path: Path
) -> None:
    first = CaptureState((ConsumerStatus("fs", "/c/engine-core-0"),), 10, 1, 0, 64, 8, 32)
    failed = ConsumerStatus("fs", "/c/engine-core-1", "failed", "no disk")
    second = CaptureState((failed,), 20, 0, 3, 64, 0, 32, 5.0, "the capture writer has died")
    found = ask_cores(cores, tmp_path, DescribeCapture(), first, second)
    assert [one.consumer for one in found.places] == ["fs of engine core 0", "fs of engine core 1"]
    assert [one.where for one in found.places] == ["/c/engine-core-0", "/c/engine-core-1"]
    assert (found.rows, found.dropped, found.discarded) == (30, 1, 3)
    assert (found.staging_nbytes, found.pending_nbytes, found.stash_nbytes) == (128, 8, 64)
    assert (found.dropping_since, found.failure) == (
        5.0,
        "engine core 1: the capture writer has died",
    )
