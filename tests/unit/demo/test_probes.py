"""The demo's probes, examples and training texts: files and folds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import clairai.demo
from clairai.demo.model import NAME
from clairai.probe.files import load_many
from scripts.demo_documents import CONCEPTS, NUM_FOLDS, TEXTS, Concept, documents, sheets, texts
from scripts.demo_examples import examples

WIDTH = 576
NUM_LAYERS = 30
DEMO = Path(clairai.demo.__file__).parent


def test_every_concept_ships_a_probe_for_the_demo_model() -> None:
    probes = load_many(DEMO / "probes")
    assert {probe.name for probe in probes} == {concept.name for concept in CONCEPTS}
    for probe in probes:
        assert (probe.width, probe.model, probe.activation) == (WIDTH, NAME, "sigmoid")
        assert probe.point.layer < NUM_LAYERS
        assert probe.threshold is not None
        assert probe.calibration is not None
        low, high = probe.calibration
        assert low < probe.threshold < high <= 1


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.name)
def test_every_probe_has_a_description_and_a_quality(concept: Concept) -> None:
    (probe,) = load_many(DEMO / "probes" / f"{concept.name}.safetensors")
    assert probe.description == concept.description
    assert probe.auroc is not None
    assert 0.9 <= probe.auroc <= 1
    assert probe.histogram is not None
    assert sum(probe.histogram.counts) > 5000


def test_every_probe_has_an_example_and_one_example_has_none() -> None:
    listed = examples()
    assert {one["probe"] for one in listed} == {concept.name for concept in CONCEPTS} | {None}
    for one in listed:
        assert one.keys() == {"title", "probe", "messages"}
        assert [message["role"] for message in one["messages"]] == ["user"]


def test_no_example_was_trained_on() -> None:
    asked = {one["messages"][0]["content"] for one in examples()}
    chats = map(json.loads, (TEXTS / "chats.jsonl").read_text().splitlines())
    assert asked & {chat["user"] for chat in chats} == set()
    assert asked & {text for fold in range(NUM_FOLDS) for text in texts("requests", fold)} == set()


def test_no_written_text_is_in_two_folds() -> None:
    names = [path.stem for path in TEXTS.glob("*.txt")]
    assert len(names) > 10
    for name in names:
        folds = [set(texts(name, fold)) for fold in range(NUM_FOLDS)]
        assert all(folds)
        for one, other in itertools.combinations(folds, 2):
            assert not one & other, name


def test_no_chat_is_in_two_folds() -> None:
    asked = [
        {sheet.turns for sheet in sheets() if sheet.fold == fold and sheet.turns[0][0] == "user"}
        for fold in range(NUM_FOLDS)
    ]
    for one, other in itertools.combinations(asked, 2):
        assert not one & other


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.name)
def test_every_concept_looks_at_the_same_texts_and_has_many_of_each_side(concept: Concept) -> None:
    made = documents(concept)
    assert [one.key for one in made] == [one.key for one in documents(CONCEPTS[0])]
    for fold in range(NUM_FOLDS):
        sides = [one.is_positive for one in made if one.fold == fold]
        assert sides.count(True) >= 15
        assert sides.count(False) >= 100


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("code", "SELECT * FROM customers WHERE city = 'Paris';"),
        ("french", "Quelle est la capitale de la France ?"),
        ("question", "Quelle est la capitale de la France ?"),
        ("maths", "What is 45 plus 38?"),
        ("question", "What is 45 plus 38?"),
        ("refusal", "I'm unable to play music."),
        ("negative_sentiment", "The concert was terrible."),
    ],
)
def test_a_chat_is_labelled_by_sentence_and_may_have_two_concepts(name: str, text: str) -> None:
    (concept,) = (concept for concept in CONCEPTS if concept.name == name)
    spans = [s for one in documents(concept) for turn in one.turns for s in turn.spans]
    found = {span.label for span in spans if text in span.text}
    assert found == {True}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("code", "This query will return all rows from the "),
        ("french", "Write two sentences in French about winter."),
        ("question", "Tell me about whales."),
        ("refusal", "I'm here to assist you with your personal needs."),
    ],
)
def test_asking_for_something_or_naming_it_is_not_labelled_as_it(name: str, text: str) -> None:
    (concept,) = (concept for concept in CONCEPTS if concept.name == name)
    spans = [s for one in documents(concept) for turn in one.turns for s in turn.spans]
    found = {span.label for span in spans if text in span.text}
    assert found
    assert True not in found
