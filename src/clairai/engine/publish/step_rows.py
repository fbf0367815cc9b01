"""Builds the rows of a step: for each forwarded token, which request it belongs to.

Runs in: the worker. Nothing is guessed: order and counts are what the model runner laid out,
positions and token ids are what the forward pass read. T = tokens in this step, R = requests in
this step, S = slots of the builder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.engine.step import RequestMark, StepBatch
from clairai.wire import ring_messages

_NO_EVENTS: Final = np.empty(0, ring_messages.ROW)
KnownBatch = tuple[Sequence[str], NDArray[np.int32], NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class BatchRequests:
    """The requests of a batch. Steps of the same requests share one: compare with `is`."""

    req_ids: Sequence[str]
    slots_R: NDArray[np.intp]  # in the builder
    streams_R: NDArray[np.uint64]
    choices_R: NDArray[np.uint16]
    prompts_R: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class StepRows:
    """One step's rows, complete except for what only the device knows: positions and token ids."""

    events: NDArray[np.void]  # rows that stand for no forwarded token: finished, cached
    num_tokens: int
    counts_R: NDArray[np.int32]
    requests: BatchRequests
    seen_R: NDArray[np.uint32]
    is_continued: bool = False  # the step has further rows
    media_T: NDArray[np.uint8] | None = None  # what each token stands for; None: all are text
    is_kept_T: NDArray[np.bool_] | None = None  # False for a rejected draft; None: there is none
    has_drafts: bool = False  # which are rejected, only the device will know

    @property
    def request_T(self) -> NDArray[np.int32]:
        """Which of the step's requests each token belongs to."""
        return np.repeat(np.arange(len(self.counts_R), dtype=np.int32), self.counts_R)

    def leave_out(self, rejected_R: NDArray[np.int32]) -> StepRows:
        """The same step without so many of the last tokens of each request."""
        kept_R = self.counts_R - rejected_R
        pairs_R2 = np.stack([kept_R, rejected_R], axis=1)
        is_kept_T = np.repeat(np.tile([True, False], len(kept_R)), pairs_R2.ravel())
        return replace(self, is_kept_T=is_kept_T)

    def cut_events(self, most: int) -> Iterator[StepRows]:
        """The same rows in the same order, with at most `most` events in each part."""
        first = 0
        while len(self.events) - first > most:
            part = self.events[first : first + most]
            yield replace(RowBuilder().build_idle(), events=part, is_continued=True)
            first += most
        yield replace(self, events=self.events[first:]) if first else self

    def fill(
        self, positions_T: NDArray[np.integer], token_ids_T: NDArray[np.integer]
    ) -> NDArray[np.void]:
        """Events first, then a row for each forwarded token, in the order of the forward pass."""
        num_events = len(self.events)
        rows = np.empty(num_events + len(positions_T), ring_messages.ROW)
        rows[:num_events] = self.events
        tokens = rows[num_events:]
        position_T = positions_T.astype(np.uint32)
        tokens["stream"] = np.repeat(self.requests.streams_R, self.counts_R)
        tokens["choice"] = np.repeat(self.requests.choices_R, self.counts_R)
        tokens["position"] = position_T
        tokens["token_id"] = token_ids_T
        tokens["span"] = 1
        # The prompt's length decides, not the scheduler's idea of prefill: a resumed request
        # prefills its own generated tokens again.
        tokens["phase"] = position_T >= np.repeat(self.requests.prompts_R, self.counts_R)
        tokens["flags"] = position_T < np.repeat(self.seen_R, self.counts_R)
        if self.media_T is not None:
            tokens["flags"] |= self.media_T << ring_messages.MEDIA_SHIFT
        if self.is_kept_T is not None:
            return np.concatenate([rows[:num_events], tokens[self.is_kept_T]])
        return rows


class RepeatedBatch:
    """A batch whose steps are all alike: each request goes on where it stopped, as in decode.

    These steps share one StepRows. Its `seen_R` is that of the first step: what was forwarded since
    lies before every later position, so no row's flag depends on it.
    """

    def __init__(self, rows: StepRows, ends_R: NDArray[np.int32], extension: Any) -> None:
        """`extension` is the module that step.c is, or None."""
        self.rows = replace(rows, events=_NO_EVENTS) if len(rows.events) else rows
        self.ends_R = ends_R  # how far each request has come; counted up in place
        self.known: KnownBatch = (rows.requests.req_ids, rows.counts_R, ends_R)
        is_same = _is_same_batch if extension is None else extension.is_same_batch
        # Takes req_ids, counts_R and starts_R. If the step is like the last one, it is counted.
        self.is_same: Callable[..., bool] = partial(is_same, self.known)


def _is_same_batch(
    known: KnownBatch,
    req_ids: Sequence[str],
    counts_R: NDArray[np.int32],
    starts_R: NDArray[np.int32],
) -> bool:
    """The twin of is_same_batch() in step.c."""
    known_ids, known_counts_R, ends_R = known
    # Bytes: of a few hundred numbers they compare faster than arrays do.
    is_same = (
        req_ids == known_ids
        and counts_R.tobytes() == known_counts_R.tobytes()
        and starts_R.tobytes() == ends_R.tobytes()
    )
    if is_same:
        ends_R += known_counts_R
    return is_same


class RowBuilder:
    """Knows the requests that the engine works on, and how far each has been forwarded."""

    def __init__(self, extension: Any = None) -> None:
        """`extension` is the module that step.c is; without it the same takes longer."""
        self._extension = extension
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._stream_S = np.zeros(64, np.uint64)
        self._choice_S = np.zeros(64, np.uint16)
        self._prompt_S = np.zeros(64, np.uint32)
        self._seen_S = np.zeros(64, np.uint32)
        self._again_S = np.zeros(64, np.uint32)  # forwarded before the request came back
        # By slot, of prompts with images or the like: what each of their positions stands for.
        self._media: dict[int, NDArray[np.uint8]] = {}
        self._events: list[NDArray[np.void]] = []
        self._requests = self._read_requests(())
        self._repeated: RepeatedBatch | None = None

    @property
    def repeated(self) -> RepeatedBatch | None:
        """The batch of the last step; None if a request of it has finished since."""
        return self._repeated

    def __len__(self) -> int:
        return len(self._slots)

    def add_request(
        self,
        req_id: str,
        mark: RequestMark,
        prompt_len: int,
        media: NDArray[np.uint8] | None = None,
        num_known: int = 0,
    ) -> None:
        """A request reached the worker; one that comes back after preemption is known already.

        All of the tokens that it has then were forwarded, but for the one that was sampled last;
        or those before the place in its prompt where it was stopped. With drafts `_seen_S` may lie
        too far behind the prompt, and never in it: a prompt has none.
        """
        if req_id in self._slots:
            slot = self._slots[req_id]
            self._again_S[slot] = min(max(num_known - 1, 0), int(self._seen_S[slot]))
            return
        slot = self._free.pop() if self._free else len(self._slots)
        if slot == len(self._stream_S):
            self._grow()
        self._slots[req_id] = slot
        self._stream_S[slot] = mark.stream
        self._choice_S[slot] = mark.choice
        self._prompt_S[slot] = prompt_len
        self._seen_S[slot] = self._again_S[slot] = 0
        if media is not None:
            self._media[slot] = media

    def finish_request(self, req_id: str) -> None:
        """The engine is done with the request: the next step's rows say so."""
        slot = self._slots.pop(req_id, None)
        if slot is None:
            return  # aborted before it ever reached the worker
        self._end_repeated()
        self._free.append(slot)
        self._media.pop(slot, None)
        self._requests = self._read_requests(())  # its slot may soon be another request's
        self._events.append(
            _events(
                self._stream_S[slot : slot + 1],
                self._choice_S[slot : slot + 1],
                positions=self._seen_S[slot : slot + 1],
                spans=np.zeros(1, np.uint32),
                phase=ring_messages.FINISHED,
            )
        )

    def build(self, batch: StepBatch) -> StepRows:
        repeated = self._repeated
        if (
            repeated is not None
            and not self._events
            and repeated.is_same(batch.req_ids, batch.counts_R, batch.starts_R)
        ):
            return repeated.rows
        self._end_repeated()
        requests = self._requests
        if batch.req_ids != requests.req_ids:
            requests = self._requests = self._read_requests(batch.req_ids)
        starts_R = batch.starts_R.astype(np.uint32)
        counts_R = batch.counts_R.astype(np.int32)  # a copy: the runner soon uses its own again
        seen_R = self._seen_S[requests.slots_R]
        # How far a request has come for certain is known when it comes back, and not before.
        flagged_R = self._again_S[requests.slots_R] if batch.is_ahead else seen_R
        self._add_cached(requests, seen_R, starts_R)
        ends_R = starts_R + counts_R.astype(np.uint32)
        self._seen_S[requests.slots_R] = np.maximum(seen_R, ends_R)
        media_T = self._read_media(requests, starts_R, counts_R) if self._media else None
        num_tokens = int(counts_R.sum())
        rows = StepRows(
            self._take_events(),
            num_tokens,
            counts_R,
            requests,
            flagged_R,
            media_T=media_T,
            has_drafts=batch.is_ahead,
        )
        # Else the next step's tokens stand for something else, or others of them are rejected.
        if media_T is None and batch.drafts_R is None:
            self._repeated = RepeatedBatch(rows, ends_R.astype(np.int32), self._extension)
        return rows

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        """So many of the last tokens of each request of the last step do not count as forwarded."""
        self._end_repeated()
        # A draft lies behind every token that is known, and so behind all that was forwarded.
        self._seen_S[self._requests.slots_R] -= rejected_R.astype(np.uint32)

    def _read_media(
        self,
        requests: BatchRequests,
        starts_R: NDArray[np.uint32],
        counts_R: NDArray[np.int32],
    ) -> NDArray[np.uint8] | None:
        """What each token stands for; None if no media comes in this step or later."""
        media_T: NDArray[np.uint8] | None = None
        firsts = np.cumsum(counts_R) - counts_R
        columns = (requests.slots_R, firsts, starts_R, counts_R)
        for slot, first, start, count in zip(*(one.tolist() for one in columns), strict=True):
            media = self._media.get(slot)
            if media is None or start >= len(media):
                continue
            if media_T is None:
                media_T = np.zeros(int(counts_R.sum()), np.uint8)
            part = media[start : start + count]
            media_T[first : first + len(part)] = part
        return media_T

    def build_idle(self) -> StepRows:
        """The rows of a step that forwards nothing: it may still have events."""
        return self.build(StepBatch([], np.zeros(0, np.int32), np.zeros(0, np.int32)))

    def _end_repeated(self) -> None:
        """Write down how far the requests of a repeated batch have come."""
        repeated, self._repeated = self._repeated, None
        if repeated is not None:
            slots_R = repeated.rows.requests.slots_R
            ends_R = repeated.ends_R.astype(np.uint32)
            self._seen_S[slots_R] = np.maximum(self._seen_S[slots_R], ends_R)

    def _read_requests(self, req_ids: Sequence[str]) -> BatchRequests:
        slots_R = np.fromiter(map(self._slots.__getitem__, req_ids), np.intp, len(req_ids))
        return BatchRequests(
            req_ids=list(req_ids),  # the runner changes its own in place
            slots_R=slots_R,
            streams_R=self._stream_S[slots_R],
            choices_R=self._choice_S[slots_R],
            prompts_R=self._prompt_S[slots_R],
        )

    def _take_events(self) -> NDArray[np.void]:
        if not self._events:
            return _NO_EVENTS
        events, self._events = self._events, []
        return np.concatenate(events)

    def _add_cached(
        self, requests: BatchRequests, seen_R: NDArray[np.uint32], starts_R: NDArray[np.uint32]
    ) -> None:
        """Positions between what was forwarded and where this step starts came from the cache."""
        is_skipped_R = starts_R > seen_R
        if not np.count_nonzero(is_skipped_R):
            return
        events = _events(
            requests.streams_R[is_skipped_R],
            requests.choices_R[is_skipped_R],
            positions=seen_R[is_skipped_R],
            spans=(starts_R - seen_R)[is_skipped_R],
            phase=ring_messages.CACHED,
        )
        if self._media:
            slots = requests.slots_R[is_skipped_R].tolist()
            parts = [
                _split_by_media(event, self._media.get(slot))
                for event, slot in zip(events, slots, strict=True)
            ]
            events = np.concatenate(parts)
        self._events.append(events)

    def _grow(self) -> None:
        for name in ("_stream_S", "_choice_S", "_prompt_S", "_seen_S", "_again_S"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))


def _split_by_media(event: np.void, media: NDArray[np.uint8] | None) -> NDArray[np.void]:
    """A cached span as several, each of which stands for one kind of thing."""
    first, span = int(event["position"]), int(event["span"])
    media_N = np.zeros(span, np.uint8)
    if media is not None:
        part = media[first : first + span]
        media_N[: len(part)] = part
    begins = np.flatnonzero(np.diff(media_N, prepend=np.uint8(255)))
    events = np.repeat(np.array([event], ring_messages.ROW), len(begins))
    events["position"], events["span"] = first + begins, np.diff(begins, append=span)
    events["flags"] = media_N[begins] << ring_messages.MEDIA_SHIFT
    return events


def _events(
    streams: NDArray[np.uint64],
    choices: NDArray[np.uint16],
    *,
    positions: NDArray[np.uint32],
    spans: NDArray[np.uint32],
    phase: int,
) -> NDArray[np.void]:
    rows = np.zeros(len(streams), ring_messages.ROW)
    rows["stream"], rows["choice"] = streams, choices
    rows["position"], rows["span"] = positions, spans
    rows["token_id"], rows["phase"] = -1, phase
    return rows
