"""Raw products become scores as the probe itself would give them, and reach the ring as they are.

T = tokens in this step, P = probes, D = model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from clairai import wire
from clairai.points import Point
from clairai.probe.columns import Columns
from clairai.probe.model import ACTIVATIONS, Probe
from clairai.ring.layout import PAYLOAD_OFFSET, RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.reader import Record, Ring
from clairai.ring.writer import RingWriter
from clairai.tap.outlet import Finish, HostOutlet, Step, publish
from clairai.tap.rows import Batch, Mark, RowBook, StepRows

HERE = Point("post_block", 0)
LARGEST = float(np.finfo(np.float32).max)
SHAPE = RingShape(slots=8, slot_bytes=4096)


def bank(*kinds: str, biases: tuple[float, ...] = ()) -> Columns:
    """One probe of width 1 for each kind: its raw product is the row's one number."""
    one_D = np.ones(1, np.float32)
    probes = [
        Probe(f"p{index}", HERE, one_D, bias=bias, activation=kind)  # type: ignore[arg-type]
        for index, (kind, bias) in enumerate(zip(kinds, biases or (0.0,) * len(kinds), strict=True))
    ]
    return Columns.empty((HERE,), max(1, len(kinds)), 1, "toy").add(probes)


def oracle(columns: Columns, raw_T: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
    return np.stack([probe.apply(raw_T[:, None]) for probe in columns.probes], axis=1)


def finished(columns: Columns, raw_T: NDArray[np.float32]) -> NDArray[np.float32]:
    return Finish.of(columns)(np.repeat(raw_T[:, None], len(columns.probes), axis=1))


mixes = st.lists(
    st.tuples(st.sampled_from(ACTIVATIONS), st.floats(-100, 100, width=32)), min_size=1, max_size=6
)
raws = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=8)


@settings(derandomize=True, deadline=None)
@given(mixes, raws)
def test_any_mix_of_activations_scores_as_each_probe_alone_does(
    mix: list[tuple[str, float]], raw: list[float]
) -> None:
    columns = bank(*(kind for kind, _ in mix), biases=tuple(bias for _, bias in mix))
    raw_T = np.array(raw, np.float32)
    scores_TP = finished(columns, raw_T)
    assert scores_TP.dtype == np.float32
    np.testing.assert_allclose(scores_TP, oracle(columns, raw_T), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [0.0, 1.0, LARGEST, -LARGEST])
def test_extreme_scores_neither_overflow_nor_warn(bias: float) -> None:
    """Warnings are errors here, so this also says that there was none."""
    columns = bank(*ACTIVATIONS, biases=(bias,) * len(ACTIVATIONS))
    tiny = float(np.finfo(np.float32).tiny)
    extremes = [0.0, -0.0, 88.8, -88.8, -104.0, 1e4, -1e4, LARGEST, -LARGEST, np.inf, -np.inf]
    raw_T = np.array([*extremes, np.nan, tiny], np.float32)
    scores_TP = finished(columns, raw_T)
    np.testing.assert_allclose(scores_TP, oracle(columns, raw_T), rtol=1e-5, atol=1e-37)
    sigmoid_T = scores_TP[:-2, ACTIVATIONS.index("sigmoid")]
    assert ((sigmoid_T >= 0) & (sigmoid_T <= 1)).all()


def test_finishing_leaves_the_raw_products_as_they_were() -> None:
    raw_TP = np.array([[-1.0, 2.0], [3.0, -4.0]], np.float32)
    before = raw_TP.copy()
    Finish.of(bank("relu", "sigmoid"))(raw_TP)
    assert np.array_equal(raw_TP, before)


def test_an_empty_bank_gives_rows_without_columns() -> None:
    finish = Finish.of(Columns.empty((HERE,), 1, 1, "toy"))
    assert finish(np.zeros((3, 0), np.float32)).shape == (3, 0)


def test_an_activation_given_to_the_wrong_column_would_be_noticed() -> None:
    columns = bank("relu", "none", "sigmoid")
    raw_T = np.array([-2.0, 2.0], np.float32)
    right = Finish.of(columns)
    wrong = Finish(1, right.bias_P, right.is_relu_P[::-1], right.is_sigmoid_P[::-1])
    scores_TP = wrong(np.repeat(raw_T[:, None], 3, axis=1))
    assert not np.allclose(scores_TP, oracle(columns, raw_T))


@contextmanager
def ring() -> Iterator[tuple[RingWriter, Ring]]:
    with HostMemory.create(SHAPE.nbytes) as memory:
        yield RingWriter(memory, SHAPE, 0xABCD), Ring(memory)


def rows_of(num_tokens: int, *, start: int = 0, stream: int = 7) -> StepRows:
    book = RowBook()
    book.open("a", Mark(stream, 2), 2)
    counts_R, starts_R = np.array([num_tokens], np.int32), np.array([start], np.int32)
    return book.step(Batch(["a"], counts_R, starts_R))


def step_of(rows: StepRows, raw_TP: torch.Tensor, *, columns: Columns, number: int = 1) -> Step:
    num_tokens = rows.num_tokens
    return Step(
        number=number,
        rows=rows,
        finish=Finish.of(columns),
        raw_TP=raw_TP,
        positions_T=torch.arange(num_tokens, dtype=torch.int64),
        token_ids_T=torch.arange(num_tokens, dtype=torch.int32) + 100,
    )


def test_a_step_comes_out_of_the_ring_as_it_was_sent() -> None:
    columns = bank("none", "relu", "sigmoid", biases=(0.5, 0.0, -1.0))
    raw_TP = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    with ring() as (writer, reader):
        publish(writer, step_of(rows_of(4), raw_TP, columns=columns, number=9))
        (record,) = reader.poll()
    assert (record.step, record.bank_version, record.continued) == (9, columns.version, False)
    assert record.rows["stream"].tolist() == [7] * 4
    assert record.rows["choice"].tolist() == [2] * 4
    assert record.rows["position"].tolist() == [0, 1, 2, 3]
    assert record.rows["token_id"].tolist() == [100, 101, 102, 103]
    assert record.rows["phase"].tolist() == [wire.PREFILL] * 2 + [wire.DECODE] * 2
    assert np.array_equal(record.scores_RC, Finish.of(columns)(raw_TP.numpy()))


def test_rows_that_stand_for_no_forward_carry_no_scores() -> None:
    columns = bank("sigmoid", "none")
    with ring() as (writer, reader):
        publish(writer, step_of(rows_of(2, start=1), torch.ones(2, 2), columns=columns))
        (record,) = reader.poll()
    assert record.rows["phase"].tolist() == [wire.CACHED, wire.PREFILL, wire.PREFILL]
    assert np.isnan(record.scores_RC[0]).all()
    assert np.isfinite(record.scores_RC[1:]).all()


def test_a_step_of_events_alone_is_published_too() -> None:
    book = RowBook()
    book.open("a", Mark(7), 2)
    book.close("a")
    with ring() as (writer, reader):
        publish(writer, step_of(book.idle(), torch.zeros(0, 2), columns=bank("none", "relu")))
        (record,) = reader.poll()
    assert record.rows["phase"].tolist() == [wire.FINISHED]
    assert np.isnan(record.scores_RC).all()
    assert record.scores_RC.shape == (1, 2)


def test_a_step_larger_than_a_slot_comes_back_whole() -> None:
    columns = bank(*["none"] * 6)
    raw_TP = torch.randn(200, 6, generator=torch.Generator().manual_seed(2))
    with ring() as (writer, reader):
        publish(writer, step_of(rows_of(200), raw_TP, columns=columns))
        records = reader.poll()
    assert [record.continued for record in records] == [True, True, False]
    assert np.array_equal(np.concatenate([r.scores_RC for r in records]), raw_TP.numpy())
    assert np.concatenate([r.rows["position"] for r in records]).tolist() == list(range(200))


def content(record: Record) -> bytes:
    return record.rows.tobytes() + record.scores_RC.tobytes()


def test_pitfall_07_a_record_that_is_held_does_not_change_when_the_writer_goes_on() -> None:
    columns, buffer_TP = bank("none", "relu"), torch.zeros(3, 2)
    with ring() as (writer, reader):
        outlet, held = HostOutlet(writer), []
        for number in range(4 * SHAPE.slots):
            buffer_TP.fill_(number)  # the engine's own buffer, overwritten in place
            step = step_of(rows_of(3, stream=number + 1), buffer_TP, columns=columns, number=number)
            outlet.send(step)
            held += [(record, content(record)) for record in reader.poll()]
    assert len(held) == 4 * SHAPE.slots
    for number, (record, before) in enumerate(held):
        assert content(record) == before
        assert (record.step, set(record.rows["stream"])) == (number, {number + 1})
        assert (record.scores_RC == number).all()


def test_pitfall_07_a_record_that_lies_in_the_ring_itself_would_be_caught() -> None:
    columns = bank("none")
    with HostMemory.create(SHAPE.nbytes) as memory:
        outlet = HostOutlet(RingWriter(memory, SHAPE, 0xABCD))
        outlet.send(step_of(rows_of(3), torch.zeros(3, 1), columns=columns))
        begin = SHAPE.slot_offset(0) + PAYLOAD_OFFSET
        rows = np.ndarray((3,), wire.ROW, memory.buffer, begin)
        scores_RC = np.ndarray((3, 1), np.float32, memory.buffer, begin + rows.nbytes)
        planted = Record(0, 1, columns.version, False, rows, scores_RC)
        before = content(planted)
        for _ in range(SHAPE.slots):
            outlet.send(step_of(rows_of(3), torch.ones(3, 1), columns=columns))
        assert content(planted) != before
