"""Every control message has a reply, refusals too; what is refused has changed nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clairai import errors
from clairai.engine import worker_control
from clairai.engine.publish import bank_history, step_publisher
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.engine.worker_control import answer_control
from clairai.errors import CapacityError, ClairaiError
from clairai.library.engine_control import read_reply
from clairai.points import Point
from clairai.probe.files import loads
from clairai.ring.attach import RingReader
from clairai.wire import control_messages, ring_messages
from tests.support import toy_publisher as toy
from tests.support.probes import numbers
from tests.support.toy_publisher import file_of, state_of


@pytest.fixture
def engine(runtime: Path) -> Iterator[StepPublisher]:
    with toy.running_publisher(runtime) as made:
        yield made


def ask(engine: StepPublisher, message: control_messages.Control | bytes) -> Any:
    raw = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return msgspec.msgpack.decode(answer_control(engine, raw), type=control_messages.ControlReply)


def names(reply: control_messages.BankState) -> list[str]:
    return [info.name for info in reply.probes]


def test_an_engine_without_probes_lists_none(engine: StepPublisher) -> None:
    assert ask(engine, control_messages.ListProbes()) == control_messages.BankState(
        0, toy.CAPACITY, ()
    )


def test_probes_are_added_replaced_and_removed_each_in_one_change(engine: StepPublisher) -> None:
    added = ask(engine, control_messages.AddProbes((file_of("a"), file_of("b", toy.FIRST))))
    assert (added.version, names(added)) == (1, ["b", "a"])
    replaced = ask(engine, control_messages.ReplaceProbes((file_of("a", bias=2.5),)))
    assert (replaced.version, names(replaced)) == (2, ["b", "a"])
    assert replaced.probes[1].digest != added.probes[1].digest
    removed = ask(engine, control_messages.RemoveProbes(("b",)))
    assert (removed.version, names(removed)) == (3, ["a"])
    assert ask(engine, control_messages.ListProbes()) == removed


def test_the_points_and_the_rings_socket_are_described(engine: StepPublisher) -> None:
    described = ask(engine, control_messages.Describe())
    assert isinstance(described, control_messages.Description)
    assert (described.model, described.width, described.capacity) == ("toy", 3, 2)
    assert described.points == ("post_block.0", "post_block.1")
    assert (described.epoch, described.published) == (engine.epoch, 0)
    assert Path(described.socket).is_socket()


REFUSED: dict[str, tuple[control_messages.Control, str]] = {
    "a name twice": (control_messages.AddProbes((file_of("keep"),)), "probe"),
    "two of one name": (control_messages.AddProbes((file_of("x"), file_of("x"))), "probe"),
    "an untapped point": (
        control_messages.AddProbes((file_of("x", Point("pre_attn", 0)),)),
        "point",
    ),
    "another width": (
        control_messages.AddProbes((file_of("x", direction_D=numbers(1, 2)),)),
        "probe",
    ),
    "another model": (control_messages.AddProbes((file_of("x", model="org/other"),)), "probe"),
    "over capacity": (control_messages.AddProbes((file_of("x"), file_of("y"))), "capacity"),
    "one good and one bad": (
        control_messages.AddProbes((file_of("x"), b"no safetensors")),
        "probe",
    ),
    "a cut file": (control_messages.AddProbes((file_of("x")[:-3],)), "probe"),
    "an empty file": (control_messages.AddProbes((b"",)), "probe"),
    "replacing nobody": (control_messages.ReplaceProbes((file_of("nobody"),)), "probe"),
    "replacing one and nobody": (
        control_messages.ReplaceProbes((file_of("keep"), file_of("no"))),
        "probe",
    ),
    "removing nobody": (control_messages.RemoveProbes(("nobody",)), "probe"),
    "removing one and nobody": (control_messages.RemoveProbes(("keep", "nobody")), "probe"),
}


@pytest.mark.parametrize(("message", "code"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_a_reply_and_changes_nothing(
    engine: StepPublisher, message: control_messages.Control, code: str
) -> None:
    ask(engine, control_messages.AddProbes((file_of("keep"),)))
    before = state_of(engine)
    reply = ask(engine, message)
    assert isinstance(reply, ring_messages.Refusal)
    assert reply.code == code
    assert state_of(engine) == before
    assert names(ask(engine, control_messages.ListProbes())) == ["keep"]


def test_half_a_change_would_be_noticed(
    engine: StepPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(columns: Any, message: Any) -> Any:
        engine.install(columns.add([loads(message.files[0], source="")]))
        raise CapacityError("full")

    before = state_of(engine)
    monkeypatch.setattr(worker_control, "_apply_change", half)
    assert ask(engine, control_messages.AddProbes((file_of("x"), file_of("y")))).code == "capacity"
    assert state_of(engine) != before


CODES = sorted({kind.code for kind in vars(errors).values() if hasattr(kind, "code")})


@pytest.mark.parametrize("code", CODES)
def test_the_caller_raises_a_refusal_as_the_error_of_its_code(code: str) -> None:
    raw = msgspec.msgpack.encode(ring_messages.Refusal(code, "why"))
    with pytest.raises(ClairaiError, match="why") as caught:
        read_reply(raw, control_messages.BankState)
    assert caught.value.code == code


GARBAGE = {
    "nothing": b"",
    "text": b"hello",
    "no such message": msgspec.msgpack.encode({"type": "shutdown"}),
    "no type": msgspec.msgpack.encode({"files": []}),
    "one field too many": msgspec.msgpack.encode({"type": "describe", "x": 1}),
    "a field of another kind": msgspec.msgpack.encode({"type": "remove_probes", "names": 3}),
    "no field": msgspec.msgpack.encode({"type": "add_probes"}),
    "a reply": msgspec.msgpack.encode(ring_messages.Refusal("a", "b")),
    "two messages": 2 * msgspec.msgpack.encode(control_messages.Describe()),
    "a tag that is no UTF-8": b"\x81\xa4type\xa4\xff\xff\xff\xff",
    "a name that is no UTF-8": b"\x82\xa4type\xadremove_probes\xa5names\x91\xa1\xff",
    "a deep nest": b"\x91" * 100_000,
    "a deep nest inside": b"\x82\xa4type\xadremove_probes\xa5names" + b"\x91" * 100_000,
    "a length of gigabytes": b"\x82\xa4type\xaaadd_probes\xa5files\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("raw", GARBAGE.values(), ids=GARBAGE)
def test_bytes_that_are_no_message_are_refused(engine: StepPublisher, raw: bytes) -> None:
    before = state_of(engine)
    reply = ask(engine, raw)
    assert isinstance(reply, ring_messages.Refusal)
    assert (reply.code, reply.reason[:30]) == ("request", "control message not understood")
    assert state_of(engine) == before


VALID = [
    msgspec.msgpack.encode(message)
    for message in (
        control_messages.ListProbes(),
        control_messages.FindStreams(("é", "b")),
        control_messages.RemoveProbes(("x",)),
    )
]


@settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=40)
    | st.tuples(st.sampled_from(VALID), st.integers(0, 30), st.binary(max_size=3)).map(
        lambda given: given[0][: given[1]] + given[2] + given[0][given[1] + len(given[2]) :]
    )
)
def test_whatever_the_bytes_there_is_a_reply(engine: StepPublisher, raw: bytes) -> None:
    assert isinstance(ask(engine, raw), control_messages.ControlReply)


def test_pitfall_17_steps_before_the_engine_serves_are_not_published(
    engine: StepPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM warms some kernels up with requests of its own, through the same method."""
    monkeypatch.setattr(engine, "_is_serving", False)
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    assert ask(engine, control_messages.FindStreams(("ex-1",))) == control_messages.Streams((None,))
    assert ask(engine, control_messages.Describe()).published == 0
    engine.serve()
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    assert ask(engine, control_messages.Describe()).published == 1


def test_streams_are_found_by_the_ids_the_caller_knows(engine: StepPublisher) -> None:
    engine.begin([toy.new_request(1), toy.new_request(2)], [])
    asked = control_messages.FindStreams(("ex-2", "nobody", "ex-1", "in-1"))
    assert ask(engine, asked) == control_messages.Streams((1002, None, 1001, None))
    engine.begin([], ["in-1", "in-2"])
    assert ask(engine, control_messages.FindStreams(("ex-1",))) == control_messages.Streams((1001,))
    assert ask(engine, control_messages.FindStreams(())) == control_messages.Streams(())


def test_found_streams_come_with_the_record_they_begin_at(engine: StepPublisher) -> None:
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    toy.forward(engine, 1, start=2, count=1)
    engine.begin([toy.new_request(2)], [])
    toy.forward(engine, 2, start=0, count=2)
    assert ask(engine, control_messages.FindStreams(("ex-2", "nobody"))).since == 2
    assert ask(engine, control_messages.FindStreams(("ex-2", "ex-1"))).since == 0
    engine.begin([toy.new_request(2)], [])  # its second answer
    assert ask(engine, control_messages.FindStreams(("ex-2",))).since == 2


def test_old_streams_and_banks_are_dropped_so_that_memory_is_bounded(
    engine: StepPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_publisher, "MAX_STREAMS_KEPT", 3)
    monkeypatch.setattr(bank_history, "MAX_BANKS_KEPT", 2)
    engine.begin([toy.new_request(number) for number in range(5)], [])
    found = ask(engine, control_messages.FindStreams(tuple(f"ex-{number}" for number in range(5))))
    assert found == control_messages.Streams((None, None, 1002, 1003, 1004))
    for _ in range(3):
        ask(engine, control_messages.AddProbes((file_of(),)))
        ask(engine, control_messages.RemoveProbes(("p",)))
    with RingReader.attach(engine.server.path) as reader:
        assert reader.bank(6).version == 6
        with pytest.raises(errors.HandshakeError, match="no bank 4"):
            reader.bank(4)


def test_a_change_takes_effect_in_the_next_step_and_readers_learn_its_columns(
    engine: StepPublisher,
) -> None:
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    ask(engine, control_messages.AddProbes((file_of("a", bias=0.5), file_of("b", toy.FIRST))))
    engine.begin([], [])
    rows_TD = toy.forward(engine, 1, start=2, count=1)
    with RingReader.attach(ask(engine, control_messages.Describe()).socket) as reader:
        before, after = reader.poll()
        assert reader.bank(before.bank_version).probes == ()
        assert [info.name for info in reader.bank(after.bank_version).probes] == ["b", "a"]
    oracle = [probe.apply(rows_TD.numpy()) for probe in engine.bank.probes]
    np.testing.assert_allclose(after.scores_RC, np.stack(oracle, axis=1), rtol=1e-5, atol=1e-5)
    assert after.rows["stream"].tolist() == [1001]


def test_the_engine_is_described_as_before_after_a_reader_has_gone(engine: StepPublisher) -> None:
    first = ask(engine, control_messages.Describe())
    with RingReader.attach(first.socket) as reader:
        assert reader.poll() == []
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    assert ask(engine, control_messages.Describe()) == msgspec.structs.replace(first, published=1)
    with RingReader.attach(first.socket) as again:
        assert len(again.poll()) == 1


def test_a_finished_request_is_published_in_a_step_that_forwards_nothing(
    engine: StepPublisher,
) -> None:
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=3)
    engine.begin([], ["in-1"])
    engine.end(toy.inputs)
    engine.begin([], [])
    engine.end(lambda: pytest.fail("a step without a word to say asked for its inputs"))
    with RingReader.attach(engine.server.path) as reader:
        rows = np.concatenate([record.rows for record in reader.poll()])
    assert rows["phase"].tolist() == [ring_messages.PREFILL] * 2 + [
        ring_messages.DECODE,
        ring_messages.FINISHED,
    ]
