"""Rows of any width are read through a bank of unit vectors, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clairai.compat import offline_llm
from clairai.match.align import Scores
from clairai.points import Point
from clairai.probe.bank import MAX_PROBES, EngineBank
from clairai.probe.model import Probe
from clairai.train import row_source
from clairai.train.row_source import BATCH_TOKENS, MAX_CAPACITY, RowSource, prompt_batches
from clairai.train.start_engine import default_points, distinct_points
from clairai.train.train_probe import KeptTokens, read_kept_rows

POINTS = tuple(Point("post_block", layer) for layer in (1, 2, 3))


class ToyEngine:
    """A real bank in front of rows whose values tell where they are from."""

    def __init__(self, width: int) -> None:
        self.columns = EngineBank.empty(POINTS, min(width, MAX_CAPACITY), width, "toy")

    def add(self, *probes: Probe) -> None:
        self.columns = self.columns.add(probes)

    def remove(self, *names: str) -> None:
        self.columns = self.columns.remove(names)

    def list(self) -> tuple[Any, ...]:
        return tuple(probe.info() for probe in self.columns.probes)

    def scores(self, prompt: Sequence[int]) -> Scores:
        probes = self.columns.probes
        rows = {p: row_of(prompt, p, self.columns.width) for p in POINTS}
        # a unit vector's score is one number of the row
        at = [(probe.point, int(probe.direction_D.argmax())) for probe in probes]
        scores_NP = np.stack([rows[point][:, index] for point, index in at], axis=1)
        ids = np.array(prompt, np.int32)
        names = tuple(probe.name for probe in probes)
        return Scores(names, ids, scores_NP, np.zeros(len(ids), np.uint8), len(ids), 0)


def row_of(prompt: Sequence[int], point: Point, width: int) -> NDArray[np.float32]:
    grid = 1000 * np.array(prompt)[:, None] + np.arange(width) + point.layer / 8
    return np.asarray(grid, np.float32)


@pytest.mark.parametrize(
    ("width", "num_groups", "num_passes"), [(3, 1, 1), (576, 1, 1), (1500, 2, 2)]
)
def test_rows_of_any_width_are_read_whole_and_in_order(
    monkeypatch: pytest.MonkeyPatch, width: int, num_groups: int, num_passes: int
) -> None:
    engine = ToyEngine(width)
    monkeypatch.setattr(row_source, "ProbeBank", lambda _: engine)
    monkeypatch.setattr(offline_llm, "forward_prompts", lambda _, prompts: list(prompts))
    monkeypatch.setattr(
        row_source, "read_scores", lambda _, outs: [[engine.scores(o)] for o in outs]
    )
    source = RowSource(SimpleNamespace(), POINTS, width, 64)
    assert len(source.point_groups()) == num_groups
    monkeypatch.setattr(row_source, "BATCH_TOKENS", 8)
    prompts = ((1, 2, 3), (4, 5), tuple(range(6, 18)), (7,))
    assert source.num_batches(prompts) == 3 * num_passes
    kept = KeptTokens(prompts, tuple(map(np.array, ([0, 2], [1], [9], [0]))), (0, 1, 2, 3))
    found = {
        point: rows_TD
        for group in source.point_groups()
        for point, rows_TD in read_kept_rows(source, kept, group, "reading").items()
    }
    for point in POINTS:
        tokens = [
            prompt[at] for prompt, ats in zip(prompts, kept.positions, strict=True) for at in ats
        ]
        np.testing.assert_array_equal(found[point], row_of(tokens, point, width))
    assert engine.columns.probes == ()  # the bank is left as it was found


def test_a_group_never_asks_for_more_than_a_bank_holds() -> None:
    for width in (1, 64, 576, 1023, 1024, 1025, 4096, 20_000):
        source = RowSource(None, POINTS, width, 64)
        assert all(len(group) * source.capacity <= MAX_PROBES for group in source.point_groups())
        assert sum(source.point_groups(), ()) == POINTS
        assert source.num_batches([[1]]) * source.capacity >= width


def test_a_batch_ends_before_it_is_too_long() -> None:
    prompts = [[0] * n for n in (BATCH_TOKENS, 1, BATCH_TOKENS - 1, 1, 1)]
    assert [[len(p) for p in batch] for batch in prompt_batches(prompts)] == [
        [BATCH_TOKENS],
        [1, BATCH_TOKENS - 1],
        [1, 1],
    ]
    assert list(prompt_batches([])) == []


@pytest.mark.parametrize("num_layers", [1, 2, 12, 30, 80])
def test_the_usual_points_are_in_the_model_and_distinct(num_layers: int) -> None:
    points = default_points(num_layers)
    assert 1 <= len(points) == len(set(points)) <= 6
    assert all(point.layer < num_layers for point in points)


def test_one_tensor_is_read_once_under_its_two_names() -> None:
    names = ["pre_attn.0", "post_block.0", "pre_attn.1", "post_attn.1", "pre_attn.2"]
    kept = distinct_points([Point.parse(name) for name in names])
    assert [str(point) for point in kept] == [n for n in names if n != "pre_attn.1"]
