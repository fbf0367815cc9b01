"""What leaves the stash is what the consumers get: encoded to the bit, or counted as missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from clairai import wire_capture
from clairai.capture.collector import Collector
from clairai.capture.guarded import Guarded
from clairai.capture.order import Hold, Order
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.raw import widened
from clairai.store.codecs.registry import named
from clairai.store.rows import Origin
from clairai.tap import taker as takers
from clairai.tap.arena import Arena, Region
from clairai.tap.capture import Capture
from clairai.tap.outlet import Inputs
from clairai.tap.rows import Mark
from clairai.tap.station import NewRequest
from clairai.tap.tables import Tables
from clairai.tap.taker import Taker
from tests.unit.toy_captures_engine import ToyConsumer, ToyState, batch, order

WIDTH, ROWS = 64, 32
SITE_NAMES = ("pre_attn.0", "post_block.0", "post_block.1")
SITES = {name: index for index, name in enumerate(SITE_NAMES)}


class ToyScores:
    """Probes of the bank: their sites and places."""

    def __init__(self, **columns: tuple[int, int]) -> None:
        self._columns = columns
        self.followed: list[int] = []

    def column(self, probe: str) -> tuple[int, int] | None:
        return self._columns.get(probe)

    def follow(self, stream: int) -> None:
        self.followed.append(stream)


class Rig:
    """A worker's captures on tables of their own."""

    def __init__(self, consumers: dict[str, ToyConsumer], *, nbytes: int, dtype: torch.dtype):
        self.tables = Tables(
            SITE_NAMES,
            width=WIDTH,
            capacity=2,
            max_tokens=ROWS,
            device="cpu",
            dtype=dtype,
            stash_rows=ROWS,
            is_capturing=True,
        )
        self.consumers = consumers
        guarded: dict[str, Any] = {name: Guarded(one) for name, one in consumers.items()}
        name = str(dtype).removeprefix("torch.")

        def origin(encoder: Encoder) -> Origin:
            return Origin.of(
                model="m",
                weights="w",
                dtype=name,
                width=WIDTH,
                encoder=encoder.name,
                parameters=encoder.parameters,
            )

        self.collector = Collector(guarded, origin, batch_nbytes=1 << 20, pending_nbytes=20_000)
        self.taker = Taker(self.tables, guarded, self.collector, staging_nbytes=nbytes)
        self.scores = ToyScores(anger=(1, 1))
        self.capture = Capture(self.taker, self.collector, SITES, self.scores)
        self.rng = np.random.default_rng(3)

    def enter(self, name: str, stream: int, wanted: Order, choice: int = 0) -> None:
        request = NewRequest(name, f"api-{name}", Mark(stream, choice), 4, None, wanted)
        self.capture.begin([request], [])

    def step(self, *laid: tuple[str, int, int], finished: tuple[str, ...] = ()) -> Any:
        """Rows of a forward, as they were; token 1000 + position everywhere."""
        self.capture.begin([], finished)
        given = batch(*laid)
        num_tokens = int(given.counts_R.sum())
        self.capture.place(given)
        rows_STD = torch.tensor(self.rng.standard_normal((3, num_tokens, WIDTH)) * 3)
        for index, name in enumerate(SITE_NAMES):
            self.tables.site(name).read(rows_STD[index].to(self.tables.stash_SRD.dtype))
        positions = np.concatenate([np.arange(s, s + n) for _, s, n in laid])
        inputs = Inputs(torch.tensor(positions), torch.tensor(positions + 1000, dtype=torch.int32))
        self.capture.end(lambda: inputs)
        return self.tables.stash_SRD[:, :num_tokens].clone()

    def found(self, stream: int) -> wire_capture.Captured:
        """Of a stream's first answer, when all so far is settled."""
        done = threading.Event()
        self.collector._queue.put(done.set)
        assert done.wait(10)
        return self.capture.answer(wire_capture.FindCaptures(streams=(stream,))).found[0][0]  # type: ignore[union-attr]


@contextmanager
def rig(
    *, nbytes: int = 1 << 20, dtype: torch.dtype = torch.float32, **consumers: ToyConsumer
) -> Iterator[Rig]:
    made = Rig(consumers or {"toy": ToyConsumer()}, nbytes=nbytes, dtype=dtype)
    try:
        yield made
    finally:
        made.collector.close()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["raw", "full8", "rp8", "topk8", "fp8", "int4"])
def test_rows_reach_the_consumer_encoded_to_the_bit(name: str, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    encoder = named(name, {"dtype": kind} if name == "raw" else {})
    with rig(dtype=dtype) as made:
        points = ("post_block.0", "post_block.1")
        made.enter("a", 7, order(points=points, encoder=name, parameters=encoder.parameters))
        made.step(("x", 0, 2))
        kept = made.step(("x", 2, 3), ("a", 0, 5))
        assert made.found(7).rows == 10
    toy = made.consumers["toy"]
    for number, point in enumerate(points, 1):
        (block,) = [block for block in toy.blocks if block.point == point]
        bits = kept[number, 3:]
        stored = bits.view(torch.uint16).numpy() if kind == "bfloat16" else bits.numpy()
        truth = encoder.encode(widened(stored, kind))
        assert {n: a.tobytes() for n, a in block.arrays.items()} == {
            n: a.tobytes() for n, a in truth.items()
        }
        assert block.rows_N["position"].tolist() == [0, 1, 2, 3, 4]
        assert block.rows_N["token_id"].tolist() == [1000, 1001, 1002, 1003, 1004]
        assert block.rows_N["phase"].tolist() == [0, 0, 0, 0, 1]
        assert block.fidelity["num_rows"] == 1
        assert block.origin.encoder == name


def test_requests_with_different_wishes_share_a_step() -> None:
    with rig(toy=ToyConsumer(), other=ToyConsumer()) as made:
        made.enter("a", 1, order(points=["pre_attn.0"]))
        made.enter("b", 2, order(points=["post_block.0", "post_block.1"], to=["other"]))
        made.enter("c", 3, order(points=["pre_attn.0"], encoder="full8", to=["toy", "other"]))
        made.enter("d", 2, order(points=["post_block.0", "post_block.1"], to=["other"]), choice=1)
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


def test_a_step_of_many_rows_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takers, "PART_VALUES", 5 * WIDTH)
    with rig(nbytes=64 << 10) as made:
        made.enter("a", 1, order(points=["pre_attn.0", "post_block.1"]))
        kept = made.step(("a", 0, 32))
        assert made.found(1).rows == 64
        assert made.found(1).dropped == 0
    blocks = [block for block in made.consumers["toy"].blocks if block.point == "post_block.1"]
    values = np.concatenate([block.arrays["values"] for block in blocks])
    assert np.array_equal(values, kept[2].numpy())


def test_rows_that_have_no_room_are_counted_and_the_others_go_on() -> None:
    gate = threading.Event()
    with rig(nbytes=32 << 10, toy=ToyConsumer(gate=gate)) as made:
        made.enter("a", 1, order())
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
        made.enter("a", 1, order())
        arena, waited = made.taker.arena, list[int]()

        def wait(nbytes: int) -> Region:
            region = arena.take(nbytes)
            if region is not None:
                return region
            waited.append(nbytes)
            gate.set()
            return Arena.wait(arena, nbytes)

        monkeypatch.setattr(arena, "wait", wait)
        for step in range(40):
            made.step(("a", 8 * step, 8))
        assert waited
        assert (made.found(1).rows, made.found(1).dropped) == (320, 0)


def test_rows_that_a_consumer_refuses_are_lost_there_and_it_is_told() -> None:
    with rig(toy=ToyConsumer(), bad=ToyConsumer(is_taking=False)) as made:
        made.enter("a", 1, order(to=["toy", "bad"]))
        made.step(("a", 0, 3))
        told = made.found(1)
        assert [place.lost for place in told.places] == [0, 3]
        assert made.found(1).lost == 3  # told again, not counted again


def test_a_consumer_that_raises_has_failed_and_harms_nobody() -> None:
    with rig(toy=ToyConsumer(), bad=ToyConsumer(fault=ZeroDivisionError("oh"))) as made:
        made.enter("a", 1, order(to=["toy", "bad"]))
        made.enter("b", 2, order())
        made.step(("a", 0, 3), ("b", 0, 1))
        told = made.found(1)
        assert told.state == "failed"
        assert "ZeroDivisionError: oh" in told.reason
        assert told.lost == 3
        assert made.found(2).state == "open"
    assert made.consumers["toy"].rows()[1, 0, "post_block.0"] == [0, 1, 2]


def test_a_forward_that_read_other_positions_gives_no_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The batch said one thing and the device another: whose rows these are is not known."""
    with rig() as made:
        made.enter("a", 1, order())
        made.capture.begin([], [])
        made.capture.place(batch(("a", 0, 3)))
        wrong = Inputs(torch.tensor([1, 2, 3]), torch.tensor([5, 5, 5]))
        made.capture.end(lambda: wrong)
        told = made.found(1)
        assert (told.state, told.rows, told.dropped) == ("failed", 0, 3)
        assert "other positions" in told.reason
    assert made.consumers["toy"].blocks == []
    assert "3 captured rows are lost" in caplog.text


HELD = order(hold=Hold("anger", 2.0))


def test_rows_wait_for_their_rule_and_come_when_it_is_met() -> None:
    with rig() as made:
        made.enter("a", 1, HELD)
        made.enter("b", 2, HELD)
        made.enter("c", 3, order())
        made.tables.bias_SK[1, 1] = 1.0  # every score of the probe
        made.step(("a", 0, 2), ("b", 0, 1), ("c", 0, 1))
        assert [made.found(stream).rows for stream in (1, 2, 3)] == [0, 0, 1]
        made.tables.bias_SK[1, 1] = 2.0
        made.step(("a", 2, 1), ("c", 1, 1))
        assert [made.found(stream).rows for stream in (1, 2, 3)] == [3, 0, 2]
        made.tables.bias_SK[1, 1] = 0.0
        made.step(("a", 3, 1), ("b", 1, 1))
        assert made.found(1).rows == 4  # once is enough
        made.step(("c", 2, 1), finished=("a", "b"))
        told = made.found(2)
        assert (told.state, told.rows, told.discarded) == ("discarded", 0, 2)
        assert told.reason == "probe anger stayed below 2"
        assert made.found(1).state == "writing"
    assert made.consumers["toy"].rows() == {
        (1, 0, "post_block.0"): [0, 1, 2, 3],
        (3, 0, "post_block.0"): [0, 1, 2],
    }
    assert made.scores.followed  # on a GPU: until the scores are there


def test_a_probe_that_is_gone_keeps_nothing_and_says_so() -> None:
    with rig() as made:
        made.enter("a", 1, order(hold=Hold("joy", 2.0)))
        made.step(("a", 0, 2))
        told = made.found(1)
        assert told.state == "failed"
        assert "probe joy has no score" in told.reason


def test_what_waits_is_bounded() -> None:
    with rig() as made:
        made.enter("a", 1, HELD)
        for step in range(20):
            made.step(("a", 8 * step, 8))
        told = made.found(1)
        assert 0 < told.dropped < 160
        assert "raise pending_mib" in told.reason
        state = made.capture.answer(wire_capture.DescribeCapture())
        assert isinstance(state, wire_capture.CaptureState)
        assert 0 < state.pending_nbytes <= 20_000


def test_an_answer_is_safe_when_it_has_ended_and_its_consumer_says_so() -> None:
    toy = ToyConsumer(where="here")
    with rig(toy=toy) as made:
        made.enter("a", 1, order())
        made.step(("a", 0, 2))
        toy.state = ToyState("stopped", "the disk is full")
        ended = wire_capture.FindCaptures(("api-a", "api-nobody"), is_ended=True)
        for reason in ("the disk is full", ""):
            toy.state = ToyState("stopped", reason) if reason else ToyState()
            want = "writing" if reason else "kept"
            for _ in range(1000):
                reply = made.capture.answer(ended)
                assert isinstance(reply, wire_capture.Captures)
                (told,), nobody = reply.found
                assert nobody == ()
                if told.state == want:
                    break
                made.found(1)
            assert (told.state, told.reason) == (want, reason)
        assert told.places[0].where == "here"
        made.step(("a", 2, 1))  # the engine did not know yet: nobody's
        assert made.found(1).rows == 2
        listed = made.capture.answer(wire_capture.ListCaptures(5))
        assert isinstance(listed, wire_capture.Captures)
        assert [one.stream for (one,) in listed.found] == [1]
    assert toy.told[0] == ("begin", 1, {}, {})
    assert toy.told[-1] == ("finish", 1)
    assert toy.is_closed
