"""Asks the engine cores of one engine as if they were one: a change reaches all of them, or none.

Runs in: the API server. With `--data-parallel-size` there are several cores, each with its own
bank, vectors and requests. All start alike, and whether a change is accepted, and the version that
it makes, depend on nothing but the changes before it. So all cores stay alike if all see the same
changes in the same order: one lock orders the changes of all API servers, and what the first core
refuses, no other is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.errors import ClairaiError, CoresDifferError, EngineGoneError
from clairai.server.core_weights import CallCore, CoreWeights, decode_reply
from clairai.wire import capture_messages, control_messages, steering_messages, weights_messages
from clairai.wire.capture_messages import Captured, Captures, CaptureState
from clairai.wire.control_messages import Control, ControlReply
from clairai.wire.ring_messages import Refusal

LOCK_PAUSE_S: Final = 0.01
_CHANGES: Final = (
    control_messages.AddProbes,
    control_messages.ReplaceProbes,
    control_messages.RedirectProbes,
    control_messages.RedirectProbesShared,
    control_messages.RemoveProbes,
    steering_messages.PutVectors,
    steering_messages.RemoveVectors,
    steering_messages.SetSteering,
)
_VERSIONED: Final = (
    control_messages.BankState,
    control_messages.BankVersion,
    steering_messages.VectorState,
    steering_messages.SteeringState,
)
_log: Final = logging.getLogger(__name__)


class CoreGroup:
    """`calls` reach the engine cores, in the order of their numbers.

    All API servers of the engine lock `folder`, which is not written to.
    """

    def __init__(self, calls: Sequence[CallCore], folder: Path) -> None:
        self._calls, self.folder = calls, folder
        self._weights = CoreWeights(calls)
        self._difference: CoresDifferError | None = None
        self._changes: set[asyncio.Task[bytes]] = set()

    async def ask_each(self, message: bytes) -> list[bytes]:
        """The reply of each core."""
        replies = await asyncio.gather(*(call(message) for call in self._calls))
        return [reply[0] for reply in replies]

    async def ask(self, control: Control) -> bytes:
        """The reply of all of them. Of new weights: hold `lock` while they are committed."""
        message = msgspec.msgpack.encode(control)
        if isinstance(control, weights_messages.CommitWeights):
            return await self._finish(self._commit(control.manifest, is_begun=False))
        if isinstance(control, weights_messages.WeightsControl):
            return msgspec.msgpack.encode(await self._weights.answer(control))
        if not isinstance(control, _CHANGES):
            return _merge_replies(control, await self.ask_each(message))
        return await self._finish(self._change(message))

    async def describe_weights(self) -> weights_messages.WeightsState:
        return await self._weights.describe()

    async def plan_begun(self, manifest: bytes) -> None:
        """Plan new weights in an update that a caller of vLLM's has begun, and will end."""
        async with self._ended_by_errors():
            await self._weights.plan(manifest)

    async def commit_begun(self, manifest: bytes) -> None:
        """Commit them in such an update."""

        async def commit() -> bytes:
            async with self.lock(), self._ended_by_errors():
                return await self._commit(manifest, is_begun=True)

        await self._finish(commit())

    @contextlib.asynccontextmanager
    async def _ended_by_errors(self) -> AsyncIterator[None]:
        """An error ends the update that was begun, as it does with vLLM's own backends."""
        try:
            yield
        except EngineGoneError:
            raise  # with all of its updates
        except ClairaiError:
            await self._weights.end_update()
            raise

    async def _finish(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """A caller that leaves must not end a change between two cores."""
        change = asyncio.ensure_future(work)
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)

    async def _commit(self, manifest: bytes, *, is_begun: bool) -> bytes:
        self._require_alike()
        try:
            return msgspec.msgpack.encode(await self._weights.commit(manifest, is_begun=is_begun))
        except CoresDifferError as error:
            self._difference = error
            raise

    def _require_alike(self) -> None:
        if self._difference is not None:
            raise self._difference

    async def _change(self, message: bytes) -> bytes:
        async with self.lock():
            self._require_alike()
            first, *others = self._calls
            replies = [(await first(message))[0]]
            if isinstance(decode_reply(replies[0]), Refusal):
                return replies[0]
            try:
                replies += [
                    reply[0] for reply in await asyncio.gather(*(c(message) for c in others))
                ]
                self._check_versions(replies)
            except CoresDifferError as error:
                self._difference = error
                raise
            return replies[0]

    def _check_versions(self, replies: Sequence[bytes]) -> None:
        decoded = [decode_reply(reply) for reply in replies]
        versions = [reply.version if isinstance(reply, _VERSIONED) else None for reply in decoded]
        if len(set(versions)) == 1:
            return
        reasons = [one.reason for one in decoded if isinstance(one, Refusal)]
        _log.error("the engine cores differ: versions %s %s", versions, reasons)
        raise CoresDifferError(
            f"a change reached some engine cores and not all (versions {versions}"
            f"{''.join(f'; {reason}' for reason in reasons)}): rows still name the probes they "
            f"were scored with; restart the engine before the next change"
        )

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """While no other API server changes the cores.

        flock(2): the kernel releases it when its holder dies.
        """
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while not _try_lock(fd):  # noqa: ASYNC110  # another process wakes nobody here
                await asyncio.sleep(LOCK_PAUSE_S)
            yield
        finally:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _merge_replies(control: Control, replies: Sequence[bytes]) -> bytes:
    """One answer: of the core that knows, where only one does, else of the first."""
    match control:
        case steering_messages.WhyRefused():
            reasons = (reply for reply in replies if _is_reason(decode_reply(reply)))
            return next(reasons, replies[0])
        case steering_messages.ChangeSteering():
            return _merge_changed(replies)
        case weights_messages.FindVersions(streams):
            found = [decode_reply(reply) for reply in replies]
            known = [one.versions for one in found if isinstance(one, weights_messages.Versions)]
            versions = [
                next((version for version in of_stream if version is not None), None)
                for of_stream in zip(*known, strict=True)
            ]
            assert len(versions) == len(streams)
            return msgspec.msgpack.encode(weights_messages.Versions(tuple(versions)))
        case capture_messages.FindCaptures() | capture_messages.ListCaptures():
            return _merge_captures(control, replies)
        case capture_messages.DescribeCapture():
            return _merge_capture_states(replies)
        case _:
            return replies[0]


def _is_reason(reply: ControlReply) -> bool:
    return isinstance(reply, steering_messages.RefusalReason) and bool(reply.reason)


def _merge_changed(replies: Sequence[bytes]) -> bytes:
    """The answers to one request (n > 1) may run on several cores, of which each judges its own.

    A refusal counts, whichever core it comes from: those that run none of the answers refuse none.
    """
    decoded = [decode_reply(reply) for reply in replies]
    changed = [one for one in decoded if isinstance(one, steering_messages.SteeringChanged)]
    positions = tuple(position for one in changed for position in one.positions)
    refusals = [(core, one) for core, one in enumerate(decoded) if isinstance(one, Refusal)]
    if not refusals:
        return msgspec.msgpack.encode(msgspec.structs.replace(changed[0], positions=positions))
    core, refusal = refusals[0]
    if not positions:
        return replies[core]
    reason = (
        f"answers on engine core {core} are steered as before: {refusal.reason}; those on others "
        f"are changed from position {', '.join(map(str, positions))} on"
    )
    return msgspec.msgpack.encode(Refusal(refusal.code, reason))


def _merge_captures(
    control: capture_messages.FindCaptures | capture_messages.ListCaptures,
    replies: Sequence[bytes],
) -> bytes:
    """The answers of each request, whichever cores they ran on."""
    decoded = [decode_reply(reply) for reply in replies]
    lists = [one.found for one in decoded if isinstance(one, Captures)]
    if len(lists) < len(replies):
        return next(r for r, one in zip(replies, decoded, strict=True) if isinstance(one, Refusal))
    if isinstance(control, capture_messages.FindCaptures):
        joined = [_sort_answers(of_request) for of_request in zip(*lists, strict=True)]
        return msgspec.msgpack.encode(Captures(tuple(joined)))
    by_stream: dict[int, list[tuple[Captured, ...]]] = {}
    for answers in (answers for of_core in lists for answers in of_core if answers):
        by_stream.setdefault(answers[0].stream, []).append(answers)
    found = [_sort_answers(parts) for parts in by_stream.values()]
    found.sort(key=lambda answers: max(one.since for one in answers), reverse=True)
    return msgspec.msgpack.encode(Captures(tuple(found[: control.limit])))


def _sort_answers(parts: Sequence[Sequence[Captured]]) -> tuple[Captured, ...]:
    answers = (answer for of_core in parts for answer in of_core)
    return tuple(sorted(answers, key=lambda one: one.choice))


def _merge_capture_states(replies: Sequence[bytes]) -> bytes:
    """Of all cores: numbers added up, and every core's consumers, named for it."""
    decoded = [decode_reply(reply) for reply in replies]
    states = [one for one in decoded if isinstance(one, CaptureState)]
    if len(states) < len(replies):
        return next(r for r, one in zip(replies, decoded, strict=True) if isinstance(one, Refusal))
    places = tuple(
        msgspec.structs.replace(place, consumer=f"{place.consumer} of engine core {core}")
        for core, state in enumerate(states)
        for place in state.places
    )
    dropping = [one.dropping_since for one in states if one.dropping_since is not None]
    failures = [
        f"engine core {core}: {one.failure}" for core, one in enumerate(states) if one.failure
    ]
    merged = CaptureState(
        places=places,
        rows=sum(one.rows for one in states),
        dropped=sum(one.dropped for one in states),
        discarded=sum(one.discarded for one in states),
        staging_nbytes=sum(one.staging_nbytes for one in states),
        pending_nbytes=sum(one.pending_nbytes for one in states),
        stash_nbytes=sum(one.stash_nbytes for one in states),
        dropping_since=min(dropping, default=None),
        # A request may run on any of them.
        failure="; ".join(failures),
    )
    return msgspec.msgpack.encode(merged)
