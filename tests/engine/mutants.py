"""Runs the attribution check with a bug planted in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import numpy as np
from msgspec import structs

from clairai.engine.publish import step_rows
from clairai.engine.score import score_tables
from clairai.engine.step import StepBatch
from tests.engine import attribution

Mutant = Callable[[], Any]


def run(llm: Any, mutant: Mutant, plan: attribution.Plan) -> attribution.Verdict:
    with mutant():
        return attribution.run(llm, plan)


def rows_in_scheduler_order() -> Any:
    """Requests sorted by name instead of as the runner laid them out."""
    return _batches(lambda batch: structs.replace(batch, req_ids=sorted(batch.req_ids, key=hash)))


def rows_shifted_by_one() -> Any:
    """Each request gets its neighbour's rows."""
    return _batches(
        lambda batch: structs.replace(batch, req_ids=[*batch.req_ids[1:], batch.req_ids[0]])
    )


@contextmanager
def stale_row_map() -> Iterator[None]:
    """The map of the step before is used whenever it has the right length."""
    kept: list[step_rows.StepRows] = []
    original = step_rows.RowBuilder.build

    def step(self: step_rows.RowBuilder, batch: StepBatch) -> step_rows.StepRows:
        fresh = original(self, batch)
        stale = kept[-1] if kept and kept[-1].num_tokens == fresh.num_tokens else fresh
        kept.append(fresh)
        return replace(stale, events=fresh.events)

    with mock.patch.object(step_rows.RowBuilder, "build", step):
        yield


@contextmanager
def scores_rolled_by_one() -> Iterator[None]:
    """Scores move one row down: off-by-one between rows and scores."""
    original = score_tables.ScoreTables.gather

    def gather(self: score_tables.ScoreTables, num_tokens: int) -> Any:
        return original(self, num_tokens).roll(1, 0)

    with mock.patch.object(score_tables.ScoreTables, "gather", gather):
        yield


@contextmanager
def phase_by_count() -> Iterator[None]:
    """One token means decode, many mean prefill: wrong for the last chunk of a prompt."""
    original = step_rows.StepRows.fill

    def fill(self: step_rows.StepRows, positions_T: Any, token_ids_T: Any) -> Any:
        filled = original(self, positions_T, token_ids_T)
        filled["phase"][len(self.events) :] = np.repeat(self.counts_R == 1, self.counts_R)
        return filled

    with mock.patch.object(step_rows.StepRows, "fill", fill):
        yield


@contextmanager
def cache_hits_forgotten() -> Iterator[None]:
    """Tokens that the prefix cache served are reported by no one."""
    with mock.patch.object(step_rows.RowBuilder, "_add_cached", return_value=None):
        yield


@contextmanager
def _batches(change: Callable[[StepBatch], StepBatch]) -> Iterator[None]:
    original = step_rows.RowBuilder.build

    def step(self: step_rows.RowBuilder, batch: StepBatch) -> step_rows.StepRows:
        return original(self, change(batch) if len(batch.req_ids) else batch)

    with mock.patch.object(step_rows.RowBuilder, "build", step):
        yield


MUTANTS: Final[tuple[Mutant, ...]] = (
    rows_in_scheduler_order,
    rows_shifted_by_one,
    stale_row_map,
    scores_rolled_by_one,
    phase_by_count,
    cache_hits_forgotten,
)
