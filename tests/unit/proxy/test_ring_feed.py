"""Scores as JSON numbers; rows of several records at once, now or after a pause."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clairai.proxy import ring_feed
from clairai.proxy.completions.request_scores import RowBatch
from clairai.proxy.ring_feed import RingFeed, to_json_numbers
from clairai.ring.layout import RingShape
from tests.http.fake import Ring, bank_of
from tests.support.ring_engine import running_engine, until

SHAPE = RingShape(slots=512, slot_bytes=4096)
DEADLINE_S = 20.0


@given(hnp.arrays(np.float32, (3, 4), elements=st.floats(width=32)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_score_that_is_read_back_is_the_same_float32(scores_RP: np.ndarray) -> None:
    made = json.loads(json.dumps(to_json_numbers(scores_RP), allow_nan=False))
    for row, wanted in zip(made, scores_RP, strict=True):
        for value, score in zip(row, wanted, strict=True):
            if np.isfinite(score):
                assert np.float32(value) == score
            else:
                assert value is None


def test_a_score_is_written_in_few_digits() -> None:
    text = json.dumps(to_json_numbers(np.array([[0.1, -12.3456789, 1e-7]], np.float32)))
    assert text == "[[0.100000001, -12.3456793, 1.00000001e-07]]"


@contextmanager
def reading(folder: Path) -> Iterator[tuple[Ring, RingFeed, queue.Queue[list[RowBatch]]]]:
    """A feed that reads the ring of a toy engine; what it delivers comes by the queue."""
    delivered: queue.Queue[list[RowBatch]] = queue.Queue()
    with running_engine(folder, shape=SHAPE, bank_of=bank_of) as engine:
        feed = RingFeed(deliver=delivered.put, on_change=lambda: None, observers=())
        feed.watched[7] = False
        feed.start()
        try:
            feed.set_target(engine.server.path)
            until(lambda: feed.is_attached)
            yield Ring(engine.writer), feed, delivered
        finally:
            feed.stop()


def test_rows_of_several_records_keep_their_fields(tmp_path: Path) -> None:
    with reading(tmp_path) as (ring, _, delivered):
        for start in range(4, 40, 2):
            ring.rows(7, start, [start, start + 1])
        found: list[RowBatch] = []
        while sum(len(one.positions) for one in found) < 36:
            found += delivered.get(timeout=DEADLINE_S)
    assert [at for one in found for at in one.positions] == list(range(4, 40))
    assert [at for one in found for at in one.token_ids] == list(range(4, 40))
    assert {one.stream for one in found} == {7}
    assert [values[0] for one in found for values in one.scores] == list(range(4, 40))


def test_rows_that_somebody_waits_for_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is for those that nobody waits for; here it has no end."""
    for name in ("BUSY_PAUSE_S", "IDLE_PAUSE_S"):
        monkeypatch.setattr(ring_feed, name, 10 * DEADLINE_S)
    with reading(tmp_path) as (ring, feed, delivered):
        for start in (4, 5, 6):
            ring.rows(7, start, [1])
            feed.hurry()
            assert delivered.get(timeout=DEADLINE_S)[0].positions == [start]
