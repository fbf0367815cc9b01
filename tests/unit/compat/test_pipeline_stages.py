"""Stages of a pipeline find the sites of the whole model, and hand on what they have computed."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from clairai.compat.model_sites import Sites, find_sites
from clairai.compat.pipeline_stages import (
    GATES_KEY,
    SCORES_KEY,
    FoundSites,
    Stage,
    StageHandover,
    find_publisher_rank,
    find_stage,
    merge_sites,
    put_publisher_first,
)
from clairai.engine.score.held_bank import HeldBank
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.worker_control import answer_control, follow_control
from clairai.errors import TapMissingError, UnsupportedError
from clairai.points import Point
from clairai.wire import control_messages, ring_messages
from tests.support import decoder_blocks as toy
from tests.support import toy_publisher
from tests.unit.compat.test_model_sites import NUM_LAYERS, Decoder


def stage_of(model: Decoder, layers: range) -> Decoder:
    """As vLLM builds it: other layers, and the norm behind the last, are placeholders."""
    part = copy.deepcopy(model)
    for layer in set(range(NUM_LAYERS)) - set(layers):
        part.layers[layer] = nn.Identity()
    if NUM_LAYERS - 1 not in layers:
        part.norm = nn.Identity()
    return part


def find(model: nn.Module, *, is_stage: bool) -> Sites:
    return find_sites(model, num_layers=NUM_LAYERS, width=toy.WIDTH, is_stage=is_stage)


@pytest.mark.parametrize("kind", [toy.FusedBlock, toy.SandwichBlock, toy.OneTensorBlock])
def test_the_sites_of_all_stages_are_those_of_the_whole_model(kind: type[nn.Module]) -> None:
    model = Decoder(kind)
    expected = find(model, is_stage=False)
    parts = [find(stage_of(model, layers), is_stage=True) for layers in (range(2), range(2, 3))]
    found = [FoundSites.of(part) for part in parts]
    for part in parts:
        merged, names = merge_sites(part, found)
        assert dict(merged.site_of) == dict(expected.site_of)
        assert dict(merged.refused) == dict(expected.refused)
        assert set(part.modules) in map(set, names)
    first, second = (set(part.modules) for part in parts)
    assert not first & second  # each site is tapped once
    assert first | second == set(expected.modules)
    # The stream behind the first stage is read where the second is given it.
    assert expected.site_of[Point.parse("post_block.1")] in second


def test_a_model_with_blocks_missing_is_refused_unless_it_is_a_stage() -> None:
    part = stage_of(Decoder(toy.FusedBlock), range(2))
    with pytest.raises(UnsupportedError, match="found 0 stacks"):
        find(part, is_stage=False)


NAMES = (frozenset({"a", "c"}), frozenset({"b"}), frozenset({"d"}))
SITES = ("a", "b", "c", "d")


def make_tables() -> tuple[ScoreTables, SteerTables]:
    scores = ScoreTables(SITES, width=4, capacity=2, max_tokens=8, device="cpu")
    steering = SteerTables(
        SITES,
        width=4,
        max_tokens=8,
        gate_slots=2,
        rows=2,
        programs=2,
        vocabulary=8,
        device="cpu",
    )
    return scores, steering


def test_the_last_stage_has_the_scores_and_gates_of_one_step_of_all_stages() -> None:
    tables = [make_tables() for _ in NAMES]
    stages = [
        StageHandover(Stage(index, len(NAMES), index == len(NAMES) - 1), NAMES, *both)
        for index, both in enumerate(tables)
    ]
    for step, num_tokens in ((1, 5), (2, 3)):  # the second is shorter: rows of the first stay
        tensors = {"hidden_states": torch.zeros(num_tokens, 4)}
        for index, (scores, steering) in enumerate(tables):
            if index:
                stages[index].take(tensors)
            assert set(tensors) == {"hidden_states"}
            for site in NAMES[index]:  # as its taps do
                scores.scores_STK[SITES.index(site), :num_tokens] = 100 * step + ord(site)
            steering.gates_TG[:num_tokens, index] = step
            if index < len(NAMES) - 1:
                stages[index].hand_on(tensors, num_tokens)
        scores, steering = tables[-1]
        for number, site in enumerate(SITES):
            assert (scores.scores_STK[number, :num_tokens] == 100 * step + ord(site)).all()
        assert (steering.gates_TG[:num_tokens, : len(NAMES)] == step).all()


def test_what_is_handed_on_does_not_change_with_the_next_step() -> None:
    scores, steering = make_tables()
    handover = StageHandover(Stage(0, 3, False), NAMES, scores, steering)
    tensors: dict[str, torch.Tensor] = {}
    handover.hand_on(tensors, 4)
    scores.scores_STK += 1
    steering.gates_TG += 1
    assert not tensors[SCORES_KEY].any()
    assert not tensors[GATES_KEY].any()


@pytest.mark.parametrize("missing", [SCORES_KEY, GATES_KEY])
def test_a_step_without_the_scores_of_earlier_stages_ends_the_engine(missing: str) -> None:
    handover = StageHandover(Stage(1, 3, False), NAMES, *make_tables())
    tensors = {SCORES_KEY: torch.zeros(2, 3, 2), GATES_KEY: torch.zeros(3, 8)}
    del tensors[missing]
    with pytest.raises(TapMissingError, match="those of another step"):
        handover.take(tensors)


def config(stages: int, ranks: int) -> Any:
    parallel = SimpleNamespace(pipeline_parallel_size=stages, tensor_parallel_size=ranks)
    return SimpleNamespace(parallel_config=parallel)


@pytest.mark.parametrize(("stages", "ranks", "rank"), [(1, 1, 0), (1, 4, 0), (2, 1, 1), (3, 2, 4)])
def test_the_first_rank_of_the_last_stage_publishes(stages: int, ranks: int, rank: int) -> None:
    found = config(stages, ranks)
    assert find_publisher_rank(found) == rank
    replies = [str(number).encode() for number in range(stages * ranks)]
    ordered = put_publisher_first(found, replies)
    assert ordered[0] == str(rank).encode()
    assert sorted(ordered) == sorted(replies)
    workers = [SimpleNamespace(rank=at, vllm_config=found) for at in range(stages * ranks)]
    assert [find_stage(one).is_publisher for one in workers].count(True) == 1
    assert [find_stage(one).index for one in workers] == sorted([*range(stages)] * ranks)


def test_a_rank_without_the_ring_makes_every_change_of_the_bank(runtime: Path) -> None:
    with toy_publisher.running_publisher(runtime) as publisher:
        tables = ScoreTables(
            publisher.tables.sites,
            width=publisher.bank.width,
            capacity=publisher.bank.capacity,
            max_tokens=publisher.tables.max_tokens,
            device="cpu",
        )
        held = HeldBank(tables, publisher.bank)
        first, second = toy_publisher.file_of("a"), toy_publisher.file_of("a", description="new")
        changes = (
            control_messages.AddProbes((first,)),
            control_messages.AddProbes((first,)),  # refused by both
            control_messages.ReplaceProbes((second,)),
            control_messages.ListProbes(),
        )
        for change in changes:
            message = msgspec.msgpack.encode(change)
            assert follow_control(held, message) == answer_control(publisher, message)
        np.testing.assert_array_equal(tables.weights_SHDK, publisher.tables.weights_SHDK)
        asked = msgspec.msgpack.encode(control_messages.Describe())
        reply = msgspec.msgpack.decode(
            follow_control(held, asked), type=control_messages.ControlReply
        )
        assert isinstance(reply, ring_messages.Refusal)
