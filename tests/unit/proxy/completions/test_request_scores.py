"""The summary of an answer's scores, and slices of them."""

from __future__ import annotations

from clairai.match.choice_scores import ScoreColumns, ScoreRow
from clairai.proxy.completions.completion_request import ClairaiOptions
from clairai.proxy.completions.request_scores import (
    RequestScores,
    ScoreBudget,
    ScoreSummary,
    make_slice,
)


def test_sums_leave_out_what_has_no_score() -> None:
    summary = ScoreSummary()
    row = ScoreRow(1, ScoreColumns(("a", "b"), (2.0, None)), [1.0, None])
    summary.add(0, [row, None, row._replace(values=[3.0, -1.0])])
    a, b, c = summary.results(("a", "b", "c"))
    assert (summary.count, summary.lost) == (2, 1)
    assert (a.mean, a.max, a.argmax, a.above) == (2.0, 3.0, 2, 1)
    assert (b.mean, b.max, b.argmax, b.above) == (-1.0, -1.0, 2, None)
    assert (c.mean, c.max, c.argmax, c.above) == (None, None, None, None)


def test_without_probes_rows_are_only_counted() -> None:
    summary = ScoreSummary(has_probes=False)
    row = ScoreRow(1, ScoreColumns(("a",), (2.0,)), [1.0])
    summary.add(0, [row, None, row])
    assert (summary.count, summary.lost) == (2, 1)
    assert summary.results(("a",)) == ()


COLUMNS = ScoreColumns(("a", "b"), (None, None))


def test_a_slice_has_a_row_for_each_token_and_names_what_is_lost() -> None:
    rows = [ScoreRow(1, COLUMNS, [1.0, 2.0]), None]
    made = make_slice(rows, 3, 3, ())
    assert made.scores == [[1.0, 2.0], [None, None], [None, None]]
    assert made.fields() == {"names": ("a", "b"), "start": 3, "scores": made.scores, "lost": 1}


def test_a_slice_across_two_banks_has_the_probes_of_both() -> None:
    other = ScoreColumns(("b", "c"), (None, None), weights=2)
    rows = [ScoreRow(1, COLUMNS, [1.0, 2.0]), None, ScoreRow(1, other, [3.0, 4.0])]
    made = make_slice(rows, 0, 3, ())
    assert made.names == ("a", "b", "c")
    assert made.scores == [[1.0, 2.0, None], [None] * 3, [None, 3.0, 4.0]]
    assert (made.lost, made.weights) == ((1,), (2,))


def test_without_rows_a_slice_has_the_expected_probes() -> None:
    assert make_slice([], 0, 1, ("a",)).scores == [[None]]


def test_a_long_slice_is_split_and_loses_nothing() -> None:
    made = make_slice([None, ScoreRow(1, COLUMNS, [1.0, 2.0]), None], 10, 3, ())
    first, second = made.split(2)
    assert (first.start, first.lost, second.start, second.lost) == (10, (0,), 12, (0,))
    assert first.scores + second.scores == made.scores


def test_an_answer_without_rows_waits_until_its_probes_have_names() -> None:
    """Its one token is never forwarded; the first record of a new bank says what its nulls are."""
    names: tuple[str, ...] | None = None
    scores = RequestScores(
        7,
        ClairaiOptions(),
        max_scores=100,
        budget=ScoreBudget(100),
        is_attached=lambda: True,
        names=lambda: names,
    )
    scores.prompt_ids = [1, 2]
    scores.add_tokens(0, [5])
    scores.finish(0, "length")
    assert not scores.is_complete(0)
    names = ("a",)
    assert scores.is_complete(0)
    made = scores.take(0)
    assert made is not None
    assert (made.names, made.scores) == (("a",), [[None]])
