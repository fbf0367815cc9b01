"""Stored rows meet their tokens exactly as rows in memory do, without a score being read before."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.errors import ClairaiError, ProbeError
from clairai.match.align import Scores, align
from clairai.match.row_collector import RowCollector
from clairai.match.stored_rows import StoredBlock, StoredColumns, align_stored, find_answers
from clairai.wire import ring_messages
from tests.support.records import Row, bank, cached, finished, record

PROMPT, OUTPUT = (11, 12, 13), (21, 22, 23, 24)
TOKENS = PROMPT + OUTPUT
# By version: the same columns, others, and others again in another order.
BANKS = {
    1: bank("a", "b", version=1),
    2: bank("a", "b", version=2, weights=4),
    3: bank("b", "c", version=3, weights=5),
    4: bank("c", "b", version=4),
}


class Step(NamedTuple):
    """Rows of one record."""

    version: int
    rows: Sequence[Row]
    begins_block: bool = False


def token_row(stream: int, at: int, value: float, choice: int = 0) -> Row:
    phase = ring_messages.PREFILL if at < len(PROMPT) else ring_messages.DECODE
    return Row(stream, at, TOKENS[at], (value, -value), phase, choice)


def stored(steps: Sequence[Step]) -> list[StoredBlock]:
    """The steps as blocks; rows before a block's first are there too, and do not count."""
    groups: list[list[Step]] = []
    for step in steps:
        if step.begins_block or not groups:
            groups.append([])
        groups[-1].append(step)
    return [_block(group) for group in groups]


def _block(group: Sequence[Step]) -> StoredBlock:
    made = [record(step.rows, 2) for step in group]
    versions = np.repeat([step.version for step in group], [len(step.rows) for step in group])
    return StoredBlock(
        np.concatenate([one.rows for one in made]),
        versions.astype(np.uint32),
        np.concatenate([one.scores_RC for one in made]),
    )


def columns_of(version: int) -> StoredColumns:
    found = BANKS[version]
    return StoredColumns(tuple(probe.name for probe in found.probes), found.weights)


def both(
    steps: Sequence[Step], stream: int = 1, choice: int = 0
) -> tuple[Scores | None, Scores | None]:
    """The scores of one answer, from rows in memory and from stored ones."""
    collector = RowCollector(only=[1, 2])
    for step in steps:
        collector.add(record(step.rows, 2), BANKS[step.version])
    rows = collector.rows(stream, choice)
    blocks = stored(steps)
    answer = find_answers(blocks, [1, 2]).get((stream, choice))
    return (
        None if rows is None else align(rows, PROMPT, OUTPUT),
        None if answer is None else align_stored(answer, blocks, columns_of, PROMPT, OUTPUT),
    )


def assert_same(expected: Scores, found: Scores) -> None:
    assert (found.names, found.weights) == (expected.names, expected.weights)
    assert (found.num_prompt, found.missing) == (expected.num_prompt, expected.missing)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.phase, expected.phase)
    np.testing.assert_array_equal(found.media, expected.media)
    np.testing.assert_array_equal(found.scores_NP, expected.scores_NP)
    np.testing.assert_array_equal(found.prompt, expected.prompt)
    np.testing.assert_array_equal(found.generated, expected.generated)
    for name in expected.names:
        np.testing.assert_array_equal(found[name], expected[name])


@st.composite
def some_row(draw: st.DrawFn) -> Row:
    stream, choice = draw(st.integers(1, 3)), draw(st.integers(0, 1))
    kind = draw(st.sampled_from(["token"] * 6 + ["cached", "finished"]))
    if kind == "finished":
        return finished(stream, choice)._replace(scores=(np.nan, np.nan))
    at = draw(st.integers(0, len(TOKENS) - 1))
    media = draw(st.integers(0, ring_messages.OTHER_MEDIA))
    if kind == "cached":
        span = draw(st.integers(1, len(TOKENS) - at))
        row = cached(stream, at, span, choice)._replace(scores=(np.nan, np.nan))
    else:
        row = token_row(stream, at, float(draw(st.integers(1, 999))), choice)
    return row._replace(media=media)


STEPS = st.lists(
    st.builds(
        Step, st.sampled_from([*BANKS]), st.lists(some_row(), min_size=1, max_size=8), st.booleans()
    ),
    max_size=8,
)


@given(STEPS)
def test_stored_rows_give_the_same_scores_as_rows_in_memory(steps: list[Step]) -> None:
    for stream in (1, 2):
        for choice in (0, 1):
            expected, found = both(steps, stream, choice)
            assert (expected is None) == (found is None)
            if expected is not None and found is not None:
                assert_same(expected, found)


@given(STEPS)
def test_rows_of_other_streams_are_not_found(steps: list[Step]) -> None:
    assert {stream for stream, _ in find_answers(stored(steps), [2])} <= {2}
    assert find_answers(stored(steps), [77]) == {}


def test_a_usual_answer_is_complete() -> None:
    rows = [token_row(1, at, 10.0 * at) for at in range(len(TOKENS) - 1)]
    _, found = both([Step(1, rows[:3]), *(Step(1, [row]) for row in rows[3:])])
    assert found is not None
    assert found.missing == 0
    assert found["a"][:-1].tolist() == [10.0 * at for at in range(len(TOKENS) - 1)]
    assert np.isnan(found["a"][-1])


def test_a_row_with_another_token_is_refused() -> None:
    wrong = token_row(1, 3, 1.0)._replace(token_id=99)
    blocks = stored([Step(1, [wrong])])
    with pytest.raises(ClairaiError, match="carries token 99, request has token 21"):
        align_stored(find_answers(blocks, [1])[1, 0], blocks, columns_of, PROMPT, OUTPUT)


def test_a_block_of_another_width_than_its_bank_is_refused() -> None:
    blocks = stored([Step(1, [token_row(1, 0, 1.0)])])
    answer = find_answers(blocks, [1])[1, 0]
    with pytest.raises(ClairaiError, match="2 columns for 1 probes"):
        align_stored(answer, blocks, lambda _: StoredColumns(("a",)), PROMPT, OUTPUT)


def test_no_score_is_read_before_it_is_looked_at() -> None:
    blocks = stored([Step(1, [token_row(1, 0, 1.0)])])
    answer = find_answers(blocks, [1])[1, 0]
    scores = align_stored(answer, blocks, columns_of, PROMPT, OUTPUT)
    blocks[0].scores_RC[:] = 5.0
    assert scores["a"][0] == 5.0
    assert scores.scores_NP[0].tolist() == [5.0, 5.0]


def test_a_copy_for_another_process_has_its_scores_in_memory() -> None:
    _, found = both([Step(1, [token_row(1, 0, 1.0)])])
    assert found is not None
    assert_same(found, copy.deepcopy(found))
    assert type(copy.deepcopy(found)) is Scores


def test_a_probe_that_is_not_there_is_named() -> None:
    _, found = both([Step(1, [token_row(1, 0, 1.0)])])
    assert found is not None
    with pytest.raises(ProbeError, match="no scores of a probe named 'x'; there are 'a, b'"):
        found["x"]
