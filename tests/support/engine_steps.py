"""Random steps of an engine, and the request of each row, found in a slow and obvious way.

The reference keeps one dict per request and one tuple per row: nothing like the code it checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from clairai.engine.publish.step_rows import RowBuilder
from clairai.engine.step import RequestMark, StepBatch
from clairai.wire import ring_messages


class Row(NamedTuple):
    stream: int
    position: int
    token_id: int
    span: int
    choice: int
    phase: int
    flags: int


@dataclass
class Request:
    mark: RequestMark
    prompt_len: int
    next_position: int = 0  # where the engine goes on
    forwarded_to: int = 0  # how far any step has come
    media: dict[int, int] = field(default_factory=dict)  # by position; all others are text


@dataclass
class Plan:
    """What the engine does in one step."""

    finish: list[int] = field(default_factory=list)
    new: list[tuple[int, int, int]] = field(default_factory=list)  # prompt, cached, choice
    media: list[list[int]] = field(default_factory=list)  # of the first new ones, by position
    counts: list[int] = field(default_factory=list)  # tokens for each request, in batch order
    rejected: list[int] = field(default_factory=list)  # drafts of each, in batch order
    preempt: list[tuple[int, int]] = field(default_factory=list)  # whom, to which position
    order: int = 0


numbers = st.integers(0, 1000)
plans = st.builds(
    Plan,
    finish=st.lists(numbers, max_size=2),
    new=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(0, 3)), max_size=4),
    media=st.lists(
        st.lists(st.sampled_from([0, 0, *range(len(ring_messages.MEDIA_NAMES))]), max_size=25),
        max_size=4,
    ),
    counts=st.lists(st.integers(0, 12), max_size=12),
    preempt=st.lists(st.tuples(numbers, numbers), max_size=1),
    order=numbers,
)


plans_with_drafts = st.builds(
    lambda plan, rejected: replace(plan, rejected=rejected),
    plans,
    st.lists(st.integers(0, 4), max_size=12),
)


class ToyEngine:
    """Drives a RowBuilder as a model runner does, and knows what each step's rows must be."""

    def __init__(self, builder: RowBuilder) -> None:
        self.builder = builder
        self.live: dict[str, Request] = {}
        self._pending: list[Row] = []  # marks that the next step must carry
        self._num_requests = 0

    def step(self, plan: Plan) -> tuple[list[Row], list[Row]]:
        """Rows as the builder has them, and as they must be."""
        for index in plan.finish:
            self._finish(index)
        for index, (prompt_len, cached, choice) in enumerate(plan.new):
            media = plan.media[index][:prompt_len] if index < len(plan.media) else []
            self._open(prompt_len, min(cached, prompt_len - 1), choice, media)
        for index, position in plan.preempt:
            self._preempt(index, position)
        return self._forward(plan)

    def _finish(self, index: int) -> None:
        if not self.live:
            self.builder.finish_request("never seen")
            return
        req_id = [*self.live][index % len(self.live)]
        gone = self.live.pop(req_id)
        stream, choice = gone.mark.stream, gone.mark.choice
        self._pending.append(
            Row(stream, gone.forwarded_to, -1, 0, choice, ring_messages.FINISHED, 0)
        )
        self.builder.finish_request(req_id)
        self.builder.finish_request(req_id)  # a second time has no effect

    def _open(self, prompt_len: int, cached: int, choice: int, media: list[int]) -> None:
        self._num_requests += 1
        req_id, mark = f"r{self._num_requests}", RequestMark(2**64 - self._num_requests, choice)
        held = {position: kind for position, kind in enumerate(media) if kind}
        self.live[req_id] = Request(mark, prompt_len, next_position=cached, media=held)
        last = max(held, default=-1)
        given = np.array(media[: last + 1], np.uint8) if held else None
        self.builder.add_request(req_id, mark, prompt_len, given)

    def _preempt(self, index: int, position: int) -> None:
        if self.live:
            req_id = [*self.live][index % len(self.live)]
            request = self.live[req_id]
            request.next_position = position % (request.next_position + 1)
            # Comes back as one that is new to the runner, and is known already.
            self.builder.add_request(req_id, RequestMark(1, 9), 1)

    def _forward(self, plan: Plan) -> tuple[list[Row], list[Row]]:
        listed = [*self.live]
        turn = plan.order % len(listed) if listed else 0
        batch = [*listed[turn:], *listed[:turn]][: len(plan.counts)]
        counts = plan.counts[: len(batch)]
        starts = [self.live[req_id].next_position for req_id in batch]
        given = StepBatch(batch, np.array(counts, np.int32), np.array(starts, np.int32))
        steps = self.builder.build(given) if batch else self.builder.build_idle()
        rejected = [
            min(asked, self._count_possible_drafts(req_id, count))
            for req_id, count, asked in zip(batch, counts, plan.rejected, strict=False)
        ]
        rejected += [0] * (len(batch) - len(rejected))
        if any(rejected):
            self.builder.reject(np.array(rejected, np.int32))
            steps = steps.leave_out(np.array(rejected, np.int32))
        positions = [s + i for s, n in zip(starts, counts, strict=True) for i in range(n)]
        filled = steps.fill(np.array(positions, np.int64), np.array(positions, np.int32) * 7)
        assert steps.num_tokens == len(positions)
        found = [Row(*map(int, row)) for row in filled]
        kept = [count - drafts for count, drafts in zip(counts, rejected, strict=True)]
        return found, self._expected(batch, kept)

    def _count_possible_drafts(self, req_id: str, count: int) -> int:
        """Behind the token that was sampled last, and behind all that was ever forwarded."""
        request = self.live[req_id]
        first = max(request.next_position + 1, request.forwarded_to)
        return max(request.next_position + count - first, 0)

    def _expected(self, batch: list[str], counts: list[int]) -> list[Row]:
        events, self._pending = self._pending, []
        tokens: list[Row] = []
        for req_id, count in zip(batch, counts, strict=True):
            request = self.live[req_id]
            events.extend(_cached(request))
            tokens.extend(_forwarded(request, count))
        return [*events, *tokens]


def _cached(request: Request) -> Iterator[Row]:
    """A row for each run of tokens that stand for the same."""
    skipped = range(request.forwarded_to, request.next_position)
    mark = request.mark
    for kind, run in groupby(skipped, lambda position: request.media.get(position, 0)):
        first, *rest = run
        span, flags = 1 + len(rest), kind << ring_messages.MEDIA_SHIFT
        yield Row(mark.stream, first, -1, span, mark.choice, ring_messages.CACHED, flags)
    request.forwarded_to = max(request.forwarded_to, request.next_position)


def _forwarded(request: Request, count: int) -> Iterator[Row]:
    for position in range(request.next_position, request.next_position + count):
        phase = ring_messages.PREFILL if position < request.prompt_len else ring_messages.DECODE
        flags = ring_messages.RECOMPUTED if position < request.forwarded_to else 0
        flags += request.media.get(position, 0) << ring_messages.MEDIA_SHIFT
        mark = request.mark
        yield Row(mark.stream, position, position * 7, 1, mark.choice, phase, flags)
    request.next_position += count
    request.forwarded_to = max(request.forwarded_to, request.next_position)
