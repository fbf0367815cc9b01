"""Vectors from means, principal components and probes, with rows read in any batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clairai.errors import ConfigError, VectorError
from clairai.points import Point
from clairai.train.documents import read_pairs
from clairai.train.make_vector import Tokens, read_contrast
from clairai.train.row_source import BatchRows, Prompt, prompt_batches
from clairai.vector.make import difference_of_means, from_probe, measure_separation, pca
from tests.support.probes import numbers, probe

HERE, THERE = Point("post_block", 3), Point("pre_attn", 9)


def rows(*texts: Sequence[float]) -> dict[Point, NDArray[np.float64]]:
    return {HERE: np.array(texts, np.float64)}


def test_the_difference_of_means_leads_from_one_mean_to_the_other() -> None:
    made = difference_of_means("v", rows([1, 2], [3, 6]), rows([0, 1], [0, 1], [3, 1]))
    assert made.rows[HERE].tolist() == [1, 3]
    assert (made.name, made.method, made.scale) == ("v", "difference of means", 1.0)


def test_sums_are_taken_in_more_precision_than_float32() -> None:
    large = [[2.0**30, 1.0]] * 3 + [[-(2.0**30), 1.0]] * 3 + [[1.0, 1.0]]
    made = difference_of_means("v", rows(*large), rows([0, 0]))
    assert made.rows[HERE].tolist() == [np.float32(1 / 7), 1]


def pairs(seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """40 pairs that differ along one direction by about 3, and by a little in all others."""
    source = np.random.default_rng(seed)
    direction_D = source.normal(size=8)
    direction_D /= np.linalg.norm(direction_D)
    negative_ND = source.normal(size=(40, 8)) * 10
    lengths = source.normal(3, 2, size=(40, 1))
    noise_ND = source.normal(size=(40, 8)) * 0.1
    return direction_D, negative_ND + lengths * direction_D + noise_ND, negative_ND


@pytest.mark.parametrize("seed", range(5))
def test_the_principal_component_is_found_among_pairs_with_its_sign_and_length(seed: int) -> None:
    direction_D, positive_ND, negative_ND = pairs(seed)
    row_D = pca("v", {HERE: positive_ND}, {HERE: negative_ND}).rows[HERE].astype(np.float64)
    mean = float(((positive_ND - negative_ND) @ direction_D).mean())
    assert mean > 1
    assert row_D @ direction_D == pytest.approx(mean, rel=0.02)
    assert row_D @ direction_D / np.linalg.norm(row_D) > 0.995
    turned = pca("v", {HERE: negative_ND}, {HERE: positive_ND}).rows[HERE]
    np.testing.assert_allclose(turned, -row_D, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("positive", "negative"), [(1, 1), (2, 3), (3, 2)])
def test_pca_needs_pairs(positive: int, negative: int) -> None:
    sides = rows(*[[1.0, 2.0]] * positive), rows(*[[2.0, 1.0]] * negative)
    with pytest.raises(VectorError, match="PCA needs pairs"):
        pca("v", *sides)


BAD = [
    (rows([1, 2]), {THERE: np.ones((1, 2))}, "different points"),
    (rows([1, np.nan]), rows([1, 2]), "finite row"),
    ({HERE: np.ones((0, 2))}, rows([1, 2]), "finite row"),
    ({HERE: np.ones(2)}, rows([1, 2]), r"\[texts, width\]"),
    (rows([1, 2]), rows([1, 2]), "all zeros"),
]


@pytest.mark.parametrize(("positive", "negative", "reason"), BAD)
def test_rows_that_make_no_vector_are_refused(positive: Any, negative: Any, reason: str) -> None:
    with pytest.raises(VectorError, match=reason):
        difference_of_means("v", positive, negative)


@pytest.mark.parametrize("step", [1.0, -2.5])
def test_scale_1_of_a_probes_vector_moves_its_raw_score_by_the_step(step: float) -> None:
    kept = probe("sad", direction_D=numbers(3, -4, 12), bias=0.5, model="m", description="Words.")
    made = from_probe(kept, step=step)
    hidden_TD = np.array([[1.0, 2.0, 3.0], [-7.0, 0.0, 0.0]])
    moved_T = kept.apply(hidden_TD + 2 * made.rows[kept.point]) - kept.apply(hidden_TD)
    assert moved_T == pytest.approx([2 * step] * 2, rel=1e-6)
    assert (made.name, made.model, made.description) == ("sad", "m", "Words.")
    assert from_probe(kept, name="other").name == "other"


def test_separation_counts_how_often_positive_texts_lie_further_along() -> None:
    row_D = numbers(1, 0)
    positive_ND, negative_ND = np.array([[2.0, 9], [1, 9]]), np.array([[0.0, -9], [1, -9]])
    assert measure_separation(row_D, positive_ND, negative_ND) == 0.875  # three times, and one tie
    assert measure_separation(-row_D, positive_ND, negative_ND) == 0.125


@dataclass(frozen=True)
class Spoken:
    """An engine in place of which rows are known: token id, place and point are in each row."""

    points: tuple[Point, ...]
    width: int
    capacity: int
    max_len: int = 4096

    @property
    def tokenizer(self) -> Any:
        return Words()

    def point_groups(self) -> list[tuple[Point, ...]]:
        return [(point,) for point in self.points]

    def num_batches(self, prompts: Sequence[Prompt]) -> int:
        return -(-self.width // self.capacity) * len(list(prompt_batches(prompts)))

    def read(self, prompts: Sequence[Prompt], points: Sequence[Point]) -> Iterator[BatchRows]:
        for start in range(0, self.width, self.capacity):
            columns = slice(start, min(start + self.capacity, self.width))
            first = 0
            for batch in prompt_batches(prompts):
                rows = {p: [row_of(ids, p)[:, columns] for ids in batch] for p in points}
                yield BatchRows(first, columns, rows)
                first += len(batch)


def row_of(ids: Sequence[int], point: Point) -> NDArray[np.float32]:
    return np.array([[i, i * i, point.layer, at, 1] for at, i in enumerate(ids)], np.float32)


class Words:
    """A tokenizer of words: the id of a word is its length; a chat is `<role> text` by turns."""

    is_fast = True

    def __call__(self, text: str, **_: object) -> dict[str, Any]:
        ids, places, at = [], [], 0
        for word in text.split(" "):
            ids.append(len(word))
            places.append((at, at + len(word)))
            at += len(word) + 1
        return {"input_ids": ids, "offset_mapping": places}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages)


def write_pairs(folder: Path, *lines: str) -> Path:
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(lines) + "\n\n")
    return file


@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # the mean of a text's words but its first four, or of all if there are no more
        ("all", ([[5.5, 30.5], [2.0, 4.0]], [[7.0, 49.0], [3.0, 9.0]])),
        ("last", ([[6.0, 36.0], [2.0, 4.0]], [[7.0, 49.0], [3.0, 9.0]])),
    ],
)
def test_each_side_gives_one_row_for_each_text_however_it_is_read(
    tmp_path: Path, capacity: int, tokens: Tokens, expected: Any
) -> None:
    texts = read_pairs(
        write_pairs(
            tmp_path,
            '{"positive": "a bb ccc dddd eeeee ffffff", "negative": "a a a a ggggggg"}',
            '{"positive": "hh hh", "negative": "iii", "prompt": "what is it"}',
        )
    )
    source: Any = Spoken((HERE, THERE), width=5, capacity=capacity)
    sides = read_contrast(source, *texts, tokens)
    for side, rows_ND in zip((sides.positive, sides.negative), expected, strict=True):
        assert side[HERE][:, :2].tolist() == rows_ND
        assert side[HERE][:, 2].tolist() == [3, 3]
        assert side[THERE][:, 2].tolist() == [9, 9]
        assert side[THERE][:, 4].tolist() == [1, 1]


def test_many_texts_come_in_many_batches_and_in_order(tmp_path: Path) -> None:
    lines = [
        f'{{"positive": "{" ".join(["x" * (number + 1)] * 900)}", "negative": "y"}}'
        for number in range(12)
    ]
    source: Any = Spoken((HERE,), width=5, capacity=2)
    sides = read_contrast(source, *read_pairs(write_pairs(tmp_path, *lines)), "all")
    assert sides.positive[HERE][:, 0].tolist() == [*range(1, 13)]
    assert sides.negative[HERE][:, 0].tolist() == [1] * 12


def test_a_text_that_does_not_fit_and_a_tokenizer_without_offsets_are_refused(
    tmp_path: Path,
) -> None:
    texts = read_pairs(write_pairs(tmp_path, '{"positive": "a b c", "negative": "d"}'))
    short: Any = Spoken((HERE,), width=5, capacity=5, max_len=3)
    with pytest.raises(ConfigError, match="3 tokens, and 2 fit"):
        read_contrast(short, *texts, "all")
    slow: Any = SimpleNamespace(tokenizer=SimpleNamespace(is_fast=False))
    with pytest.raises(ConfigError, match="where a token stands"):
        read_contrast(slow, *texts, "all")
