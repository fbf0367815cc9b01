"""The last of several stages has the captured rows of all of them, each of its own step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clairai.compat.pipeline_stages import (
    PLACES_KEY,
    ROWS_KEY,
    Stage,
    StageHandover,
    make_earlier_rows,
    make_stage_capture,
)
from clairai.engine.capture.row_selection import RowSelection, RowSelector
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import NewRequest, RequestMark
from clairai.errors import TapMissingError
from tests.support.capture_parts import batch, capture_plan

SITES = ("a", "b", "c", "d")
NAMES = (frozenset({"a", "c"}), frozenset({"b"}), frozenset({"d"}))  # of three stages
# Two points of one site, as the stream behind a block is that before the next.
SITE_OF = {"pre_attn.0": 0, "post_attn.1": 1, "pre_attn.1": 2, "post_block.0": 2, "post_block.2": 3}
WIDTH, ROWS = 4, 8


class Pipeline:
    """Three stages, whose taps leave 1000 * step + 10 * site + row in the stash."""

    def __init__(self) -> None:
        self.tables = [_make_tables() for _ in NAMES]
        stages = [Stage(index, len(NAMES), index == 2) for index in range(3)]
        parts = list(zip(stages, self.tables, strict=True))
        self.earlier = [make_earlier_rows(stage, NAMES, tables) for stage, tables in parts]
        self.senders = [
            make_stage_capture(stage, NAMES, tables, SITE_OF, earlier)
            for (stage, tables), earlier in zip(parts[:2], self.earlier, strict=False)
        ]
        self.handovers = [StageHandover(stage, NAMES, tables, None) for stage, tables in parts]
        for handover, earlier, sender in zip(
            self.handovers, self.earlier, [*self.senders, None], strict=True
        ):
            handover.capture_rows(earlier, sender)
        self.selector = RowSelector(SITE_OF)  # the last stage's
        self.steps = 0
        self.sent: list[set[str]] = []  # the tensors that the first stage has sent

    def enter(self, name: str, stream: int, **plan: Any) -> None:
        wanted = capture_plan(**plan)
        request = NewRequest(name, name, RequestMark(stream), 4, None, wanted)
        for sender in self.senders:
            assert sender.begin([request], []) == {}
        self.selector.open(name, request.mark, 4, wanted)

    def step(self, *laid: tuple[str, int, int], finished: tuple[str, ...] = ()) -> RowSelection:
        """Run it through all stages; what the last one selects, with the stash filled."""
        given, self.steps = batch(*laid), self.steps + 1
        num_tokens, tensors = int(given.counts_R.sum()), dict[str, torch.Tensor]()
        for index, (handover, names) in enumerate(zip(self.handovers, NAMES, strict=True)):
            handover.take(tensors) if index else None
            assert not tensors
            if index < 2:
                self.senders[index].begin([], finished)
                self.senders[index].place(given)
            self._tap(index, names, num_tokens)
            if index < 2:
                handover.hand_on(tensors, num_tokens)
                self.sent += [set(tensors)] * (index == 0)
        selection = self.selector.step(given)
        assert selection is not None
        return selection

    def _tap(self, index: int, names: frozenset[str], num_tokens: int) -> None:
        for name in names:
            rows_TD = torch.arange(num_tokens).float()[:, None].expand(-1, WIDTH)
            number = 1000 * self.steps + 10 * SITES.index(name)
            self.tables[index].site(name).read(rows_TD + number)

    def check(self, selection: RowSelection) -> None:
        self.earlier[-1].fill(selection)
        stash_SRD = self.tables[-1].stash_SRD
        bounds = selection.bounds()
        for number, format in enumerate(selection.batch.formats):
            row_N = selection.row_N[bounds[number] : bounds[number + 1]]
            for site in format.sites_P:
                found_ND = stash_SRD[int(site), torch.from_numpy(row_N)]
                expected_N = 1000 * self.steps + 10 * int(site) + row_N
                np.testing.assert_array_equal(found_ND[:, 0], expected_N)


def _make_tables() -> ScoreTables:
    return ScoreTables(
        SITES,
        width=WIDTH,
        capacity=1,
        max_tokens=ROWS,
        device="cpu",
        stash_rows=ROWS,
        is_capturing=True,
    )


def test_the_last_stage_has_every_row_that_requests_ask_for() -> None:
    pipeline = Pipeline()
    pipeline.enter("x", 1, points=("pre_attn.0", "post_attn.1", "post_block.2"))
    pipeline.enter("y", 2, points=("post_block.0", "pre_attn.1"), ranges=((2, 4), (6, 9)))
    pipeline.enter("z", 3, points=("post_block.2",))
    for laid in (
        (("x", 0, 4), ("other", 0, 1), ("y", 0, 3)),
        (("y", 3, 2), ("x", 4, 1), ("z", 0, 5)),
        (("x", 5, 1), ("y", 5, 4), ("z", 5, 1)),
        (("x", 6, 1), ("y", 9, 1), ("z", 6, 1)),
    ):
        pipeline.check(pipeline.step(*laid))
    assert all({PLACES_KEY, ROWS_KEY} <= sent for sent in pipeline.sent)


def test_a_step_without_rows_of_earlier_stages_sends_nothing() -> None:
    pipeline = Pipeline()
    pipeline.enter("z", 3, points=("post_block.2",))
    pipeline.check(pipeline.step(("z", 0, 3), ("other", 0, 2)))
    assert not {PLACES_KEY, ROWS_KEY} & pipeline.sent[0]


def test_a_row_that_did_not_come_with_its_step_is_refused() -> None:
    """The first stage has closed a request that the last one still captures."""
    pipeline = Pipeline()
    pipeline.enter("x", 1, points=("pre_attn.0",))
    pipeline.enter("y", 2, points=("pre_attn.0",))
    pipeline.check(pipeline.step(("x", 0, 2), ("y", 0, 2)))
    missing = pipeline.step(("x", 2, 1), ("y", 2, 1), finished=("y",))
    with pytest.raises(TapMissingError, match=r"of 2 captured rows .* 1 came with their step"):
        pipeline.earlier[-1].fill(missing)
    nothing = pipeline.step(("x", 3, 1), ("y", 3, 1), finished=("x",))
    with pytest.raises(TapMissingError, match=r"of 2 captured rows .* 0 came with their step"):
        pipeline.earlier[-1].fill(nothing)


def test_a_stage_may_send_rows_of_a_request_that_the_last_one_has_closed() -> None:
    pipeline = Pipeline()
    pipeline.enter("x", 1, points=("pre_attn.0",))
    pipeline.enter("y", 2, points=("pre_attn.0",))
    pipeline.selector.close("x")
    pipeline.check(pipeline.step(("x", 0, 2), ("y", 0, 2)))


def test_rows_that_were_sent_do_not_change_with_the_next_step() -> None:
    pipeline = Pipeline()
    pipeline.enter("x", 1, points=("pre_attn.0",))
    sender, tables = pipeline.senders[0], pipeline.tables[0]
    sender.begin([], [])
    sender.place(batch(("x", 0, 3)))
    sent = sender.take_rows()
    assert sent is not None
    tables.stash_SRD += 1
    assert not sent.rows_MD.any()
    assert sender.take_rows() is None
