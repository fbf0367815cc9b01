"""The vectors of the demo fit its model, and their files match their texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import clairai.demo
from clairai.demo.model import NAME
from clairai.train.documents import read_pairs
from clairai.vector.files import load, load_many
from scripts.demo_documents import TEXTS
from scripts.make_demo_vectors import FOLDER, KINDS, PAIRS, POINTS, Kind

WIDTH = 576
MIN_PAIRS = 20


def test_every_kind_ships_a_vector_for_the_demo_model() -> None:
    assert Path(clairai.demo.__file__).parent / "vectors" == FOLDER
    shipped = load_many(FOLDER)
    assert {vector.name for vector in shipped} == {kind.name for kind in KINDS}
    for vector in shipped:
        assert (vector.width, vector.model, vector.method) == (WIDTH, NAME, "difference of means")
        assert tuple(map(str, vector.points)) == POINTS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_shipped_file_says_what_its_script_says(kind: Kind) -> None:
    vector = load(FOLDER / f"{kind.name}.safetensors")
    assert (vector.description, vector.scale) == (kind.description, kind.scale)
    positive, negative = read_pairs(PAIRS / f"{kind.name}.jsonl")
    assert len(positive) == len(negative) >= MIN_PAIRS


def test_no_probe_was_trained_on_a_text_that_made_a_vector() -> None:
    trained = {line for file in TEXTS.glob("*.txt") for line in file.read_text().splitlines()}
    pairs = [
        json.loads(line) for file in PAIRS.glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    answers = {pair[side] for pair in pairs for side in ("positive", "negative")}
    assert len(answers) == 2 * len(pairs)
    assert answers & trained == set()
