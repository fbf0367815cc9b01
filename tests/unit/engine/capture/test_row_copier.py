"""Consumers get the rows of the stash, encoded to the bit, or the rows are counted as missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from clairai.capture.staging_arena import ArenaRegion, StagingArena
from clairai.engine.capture import row_copier as takers
from clairai.engine.step import ForwardInputs
from clairai.store.codecs.raw import widen
from clairai.store.codecs.registry import named
from clairai.wire import capture_messages
from tests.support.capture_parts import ToyConsumer, ToyState, batch, capture_plan
from tests.support.capture_rig import WIDTH, rig

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["raw", "full8", "rp8", "topk8", "fp8", "int4"])
def test_rows_reach_the_consumer_encoded_to_the_bit(name: str, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    encoder = named(name, {"dtype": kind} if name == "raw" else {})
    with rig(dtype=dtype) as made:
        points = ("post_block.0", "post_block.1")
        made.enter("a", 7, capture_plan(points=points, encoder=name, parameters=encoder.parameters))
        made.step(("x", 0, 2))
        kept = made.step(("x", 2, 3), ("a", 0, 5))
        assert made.found(7).rows == 10
    toy = made.consumers["toy"]
    for number, point in enumerate(points, 1):
        (block,) = [block for block in toy.blocks if block.point == point]
        bits = kept[number, 3:]
        stored = bits.view(torch.uint16).numpy() if kind == "bfloat16" else bits.numpy()
        truth = encoder.encode(widen(stored, kind))
        assert {n: a.tobytes() for n, a in block.arrays.items()} == {
            n: a.tobytes() for n, a in truth.items()
        }
        assert block.rows_N["position"].tolist() == [0, 1, 2, 3, 4]
        assert block.rows_N["token_id"].tolist() == [1000, 1001, 1002, 1003, 1004]
        assert block.rows_N["phase"].tolist() == [0, 0, 0, 0, 1]
        assert block.fidelity["num_rows"] == 1
        assert block.origin.encoder == name


def test_requests_with_different_plans_share_a_step() -> None:
    with rig(toy=ToyConsumer(), other=ToyConsumer()) as made:
        made.enter("a", 1, capture_plan(points=["pre_attn.0"]))
        made.enter("b", 2, capture_plan(points=["post_block.0", "post_block.1"], to=["other"]))
        made.enter(
            "c", 3, capture_plan(points=["pre_attn.0"], encoder="full8", to=["toy", "other"])
        )
        made.enter(
            "d", 2, capture_plan(points=["post_block.0", "post_block.1"], to=["other"]), choice=1
        )
        made.step(("d", 0, 2), ("c", 0, 3), ("a", 0, 1), ("b", 0, 2))
        made.step(("d", 2, 1), ("c", 3, 1), ("a", 1, 1), ("b", 2, 1))
        assert made.found(2).rows == 6
    third = {(3, 0, "pre_attn.0"): [0, 1, 2, 3]}
    assert made.consumers["toy"].rows() == {(1, 0, "pre_attn.0"): [0, 1], **third}
    assert made.consumers["other"].rows() == third | {
        (2, choice, point): [0, 1, 2]
        for choice in (0, 1)
        for point in ("post_block.0", "post_block.1")
    }


@pytest.mark.parametrize("seed", range(8))
def test_rows_whose_positions_and_drafts_the_device_alone_knows_are_those_that_are_wanted(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    wanted: dict[str, list[int]] = {}
    truth: dict[tuple[str, int], Any] = {}
    with rig(nbytes=4 << 20) as made:
        for stream, name in enumerate(("a", "b", "c"), 1):
            edges = np.sort(rng.choice(40, 6, replace=False)).reshape(3, 2).tolist()
            made.enter(name, stream, capture_plan(ranges=[(one, end) for one, end in edges]))
            wanted[name] = [at for first, end in edges for at in range(first, end)]
        nexts = dict.fromkeys(wanted, 0)
        for _ in range(20):
            counts = rng.integers(1, 5, 3).tolist()
            laid = [(name, nexts[name], count) for name, count in zip(nexts, counts, strict=True)]
            rejected = tuple(int(rng.integers(count)) for count in counts)
            stash_STD, row = made.step(*laid, rejected=rejected), 0
            for (name, start, count), num_rejected in zip(laid, rejected, strict=True):
                kept = range(start, start + count - num_rejected)
                truth |= {(name, at): stash_STD[1, row + at - start].numpy() for at in kept}
                row, nexts[name] = row + count, kept.stop
        made.settle()
    for stream, name in enumerate(nexts, 1):
        expected = [at for at in wanted[name] if at < nexts[name]]
        blocks = [
            (row, values_D)
            for block in made.consumers["toy"].blocks
            for row, values_D in zip(block.rows_N, block.arrays["values"], strict=True)
            if row["stream"] == stream
        ]
        assert [int(row["position"]) for row, _ in blocks] == expected
        assert all(row["token_id"] == 1000 + row["position"] for row, _ in blocks)
        assert not any(row["flags"] for row, _ in blocks)
        for at, (_, values_D) in zip(expected, blocks, strict=True):
            assert np.array_equal(values_D, truth[name, at])


def test_a_step_of_many_rows_is_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takers, "PART_VALUES", 5 * WIDTH)
    with rig(nbytes=64 << 10) as made:
        made.enter("a", 1, capture_plan(points=["pre_attn.0", "post_block.1"]))
        kept = made.step(("a", 0, 32))
        assert made.found(1).rows == 64
        assert made.found(1).dropped == 0
    blocks = [block for block in made.consumers["toy"].blocks if block.point == "post_block.1"]
    values = np.concatenate([block.arrays["values"] for block in blocks])
    assert np.array_equal(values, kept[2].numpy())


def test_rows_without_room_are_counted_and_capture_continues() -> None:
    gate = threading.Event()
    with rig(nbytes=32 << 10, toy=ToyConsumer(gate=gate)) as made:
        made.enter("a", 1, capture_plan())
        for step in range(40):
            made.step(("a", 8 * step, 8))
        gate.set()
        told = made.found(1)
        assert told.dropped > 0
        assert told.rows + told.dropped == 320
        assert told.lost == told.dropped
        assert "raise staging_mib" in told.reason
        made.step(("a", 320, 1))
        assert made.found(1).rows == told.rows + 1


def test_a_consumer_that_blocks_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with rig(nbytes=32 << 10, toy=ToyConsumer("block", gate=gate)) as made:
        made.enter("a", 1, capture_plan())
        arena, waited = made.copier.arena, list[int]()

        def wait(nbytes: int, is_served: Callable[[], bool]) -> ArenaRegion | None:
            region = arena.allocate(nbytes)
            if region is not None:
                return region
            waited.append(nbytes)
            gate.set()
            return StagingArena.wait_for_room(arena, nbytes, is_served)

        monkeypatch.setattr(arena, "wait_for_room", wait)
        for step in range(40):
            made.step(("a", 8 * step, 8))
        assert waited
        assert (made.found(1).rows, made.found(1).dropped) == (320, 0)


def test_rows_that_a_consumer_refuses_are_reported_as_lost_there() -> None:
    with rig(toy=ToyConsumer(), bad=ToyConsumer(is_taking=False)) as made:
        made.enter("a", 1, capture_plan(to=["toy", "bad"]))
        made.step(("a", 0, 3))
        told = made.found(1)
        assert [place.lost for place in told.places] == [0, 3]
        assert made.found(1).lost == 3  # reported again, not counted again


def test_a_consumer_that_raises_has_failed_and_harms_no_other() -> None:
    with rig(toy=ToyConsumer(), bad=ToyConsumer(fault=ZeroDivisionError("oh"))) as made:
        made.enter("a", 1, capture_plan(to=["toy", "bad"]))
        made.enter("b", 2, capture_plan())
        made.step(("a", 0, 3), ("b", 0, 1))
        told = made.found(1)
        assert told.state == "failed"
        assert "ZeroDivisionError: oh" in told.reason
        assert told.lost == 3
        assert made.found(2).state == "open"
    assert made.consumers["toy"].rows()[1, 0, "post_block.0"] == [0, 1, 2]


def test_rows_of_unexpected_positions_are_not_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The host and the device disagree about the batch, so the owner of the rows is not known."""
    with rig() as made:
        made.enter("a", 1, capture_plan())
        made.capture.begin([], [])
        made.capture.place(batch(("a", 0, 3)))
        wrong = ForwardInputs(torch.tensor([1, 2, 3]), torch.tensor([5, 5, 5]))
        made.capture.end(lambda: wrong)
        told = made.found(1)
        assert (told.state, told.rows, told.dropped) == ("failed", 0, 3)
        assert "other positions" in told.reason
    assert made.consumers["toy"].blocks == []
    assert "3 captured rows are lost" in caplog.text


def test_an_answer_is_kept_when_it_has_ended_and_its_consumer_has_flushed() -> None:
    toy = ToyConsumer(where="here")
    with rig(toy=toy) as made:
        made.enter("a", 1, capture_plan())
        made.step(("a", 0, 2))
        toy.state = ToyState("stopped", "the disk is full")
        stopped = made.ended("api-a", "writing")
        assert stopped.reason == "the disk is full"
        toy.state = ToyState()
        told = made.ended("api-a", "kept")
        assert told.reason == ""
        nobody = made.capture.answer(capture_messages.FindCaptures(("api-nobody",), is_ended=True))
        assert nobody == capture_messages.Captures(((),))
        assert told.places[0].where == "here"
        made.step(("a", 2, 1))  # a step that was already under way; its rows are dropped
        assert made.found(1).rows == 2
        listed = made.capture.answer(capture_messages.ListCaptures(5))
        assert isinstance(listed, capture_messages.Captures)
        assert [one.stream for (one,) in listed.found] == [1]
    assert toy.told[0] == ("begin", 1, {}, {})
    assert toy.told[-1] == ("finish", 1)
    assert toy.is_closed
