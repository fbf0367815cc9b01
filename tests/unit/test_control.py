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

from clairai import errors, wire
from clairai.errors import CapacityError, ClairaiError
from clairai.offline import read_reply
from clairai.points import Point
from clairai.probe.files import loads
from clairai.ring.handshake import Reader
from clairai.tap import control, station
from clairai.tap.control import answer
from clairai.tap.station import Station
from tests.unit import toy_station as toy
from tests.unit.tiny_probes import numbers
from tests.unit.toy_station import file_of, state_of


@pytest.fixture
def engine(runtime: Path) -> Iterator[Station]:
    with toy.running_station(runtime) as made:
        yield made


def ask(engine: Station, message: wire.Control | bytes) -> Any:
    raw = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return msgspec.msgpack.decode(answer(engine, raw), type=wire.ControlReply)


def names(reply: wire.BankState) -> list[str]:
    return [info.name for info in reply.probes]


def test_an_engine_without_probes_lists_none(engine: Station) -> None:
    assert ask(engine, wire.ListProbes()) == wire.BankState(0, toy.CAPACITY, ())


def test_probes_are_added_replaced_and_removed_each_in_one_change(engine: Station) -> None:
    added = ask(engine, wire.AddProbes((file_of("a"), file_of("b", toy.FIRST))))
    assert (added.version, names(added)) == (1, ["b", "a"])
    replaced = ask(engine, wire.ReplaceProbes((file_of("a", bias=2.5),)))
    assert (replaced.version, names(replaced)) == (2, ["b", "a"])
    assert replaced.probes[1].digest != added.probes[1].digest
    removed = ask(engine, wire.RemoveProbes(("b",)))
    assert (removed.version, names(removed)) == (3, ["a"])
    assert ask(engine, wire.ListProbes()) == removed


def test_what_is_tapped_and_where_the_ring_is_is_described(engine: Station) -> None:
    described = ask(engine, wire.Describe())
    assert isinstance(described, wire.Description)
    assert (described.model, described.width, described.capacity) == ("toy", 3, 2)
    assert described.points == ("post_block.0", "post_block.1")
    assert (described.epoch, described.published) == (engine.epoch, 0)
    assert Path(described.socket).is_socket()


REFUSED: dict[str, tuple[wire.Control, str]] = {
    "a name twice": (wire.AddProbes((file_of("keep"),)), "probe"),
    "two of one name": (wire.AddProbes((file_of("x"), file_of("x"))), "probe"),
    "an untapped point": (wire.AddProbes((file_of("x", Point("pre_attn", 0)),)), "point"),
    "another width": (wire.AddProbes((file_of("x", direction_D=numbers(1, 2)),)), "probe"),
    "another model": (wire.AddProbes((file_of("x", model="org/other"),)), "probe"),
    "over capacity": (wire.AddProbes((file_of("x"), file_of("y"))), "capacity"),
    "one good and one bad": (wire.AddProbes((file_of("x"), b"no safetensors")), "probe"),
    "a cut file": (wire.AddProbes((file_of("x")[:-3],)), "probe"),
    "an empty file": (wire.AddProbes((b"",)), "probe"),
    "replacing nobody": (wire.ReplaceProbes((file_of("nobody"),)), "probe"),
    "replacing one and nobody": (wire.ReplaceProbes((file_of("keep"), file_of("no"))), "probe"),
    "removing nobody": (wire.RemoveProbes(("nobody",)), "probe"),
    "removing one and nobody": (wire.RemoveProbes(("keep", "nobody")), "probe"),
}


@pytest.mark.parametrize(("message", "code"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_a_reply_and_changes_nothing(
    engine: Station, message: wire.Control, code: str
) -> None:
    ask(engine, wire.AddProbes((file_of("keep"),)))
    before = state_of(engine)
    reply = ask(engine, message)
    assert isinstance(reply, wire.Refusal)
    assert reply.code == code
    assert state_of(engine) == before
    assert names(ask(engine, wire.ListProbes())) == ["keep"]


def test_a_change_that_is_half_made_would_be_noticed(
    engine: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(columns: Any, message: Any) -> Any:
        engine.install(columns.add([loads(message.files[0], source="")]))
        raise CapacityError("full")

    before = state_of(engine)
    monkeypatch.setattr(control, "_changed", half)
    assert ask(engine, wire.AddProbes((file_of("x"), file_of("y")))).code == "capacity"
    assert state_of(engine) != before


CODES = sorted({kind.code for kind in vars(errors).values() if hasattr(kind, "code")})


@pytest.mark.parametrize("code", CODES)
def test_a_refusal_is_raised_by_the_caller_as_the_error_it_stands_for(code: str) -> None:
    raw = msgspec.msgpack.encode(wire.Refusal(code, "why"))
    with pytest.raises(ClairaiError, match="why") as caught:
        read_reply(raw, wire.BankState)
    assert caught.value.code == code


GARBAGE = {
    "nothing": b"",
    "text": b"hello",
    "no such message": msgspec.msgpack.encode({"type": "shutdown"}),
    "no type": msgspec.msgpack.encode({"files": []}),
    "one field too many": msgspec.msgpack.encode({"type": "describe", "x": 1}),
    "a field of another kind": msgspec.msgpack.encode({"type": "remove_probes", "names": 3}),
    "no field": msgspec.msgpack.encode({"type": "add_probes"}),
    "a reply": msgspec.msgpack.encode(wire.Refusal("a", "b")),
    "two messages": 2 * msgspec.msgpack.encode(wire.Describe()),
    "a tag that is no UTF-8": b"\x81\xa4type\xa4\xff\xff\xff\xff",
    "a name that is no UTF-8": b"\x82\xa4type\xadremove_probes\xa5names\x91\xa1\xff",
    "a deep nest": b"\x91" * 100_000,
    "a deep nest inside": b"\x82\xa4type\xadremove_probes\xa5names" + b"\x91" * 100_000,
    "a length of gigabytes": b"\x82\xa4type\xaaadd_probes\xa5files\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("raw", GARBAGE.values(), ids=GARBAGE)
def test_bytes_that_are_no_message_are_refused(engine: Station, raw: bytes) -> None:
    before = state_of(engine)
    reply = ask(engine, raw)
    assert isinstance(reply, wire.Refusal)
    assert (reply.code, reply.reason[:30]) == ("request", "control message not understood")
    assert state_of(engine) == before


VALID = [
    msgspec.msgpack.encode(message)
    for message in (wire.ListProbes(), wire.FindStreams(("é", "b")), wire.RemoveProbes(("x",)))
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
def test_whatever_the_bytes_there_is_a_reply(engine: Station, raw: bytes) -> None:
    assert isinstance(ask(engine, raw), wire.ControlReply)


def test_pitfall_17_steps_before_the_engine_serves_are_nobodys_rows(
    engine: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM warms some kernels up with requests of its own, through the same method."""
    monkeypatch.setattr(engine, "_is_serving", False)
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    assert ask(engine, wire.FindStreams(("ex-1",))) == wire.Streams((None,))
    assert ask(engine, wire.Describe()).published == 0
    engine.serve()
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    assert ask(engine, wire.Describe()).published == 1


def test_streams_are_found_by_the_ids_the_caller_knows(engine: Station) -> None:
    engine.begin([toy.new_request(1), toy.new_request(2)], [])
    asked = wire.FindStreams(("ex-2", "nobody", "ex-1", "in-1"))
    assert ask(engine, asked) == wire.Streams((1002, None, 1001, None))
    engine.begin([], ["in-1", "in-2"])
    assert ask(engine, wire.FindStreams(("ex-1",))) == wire.Streams((1001,))
    assert ask(engine, wire.FindStreams(())) == wire.Streams(())


def test_who_looks_for_streams_is_told_from_which_record_on(engine: Station) -> None:
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    toy.forward(engine, 1, start=2, count=1)
    engine.begin([toy.new_request(2)], [])
    toy.forward(engine, 2, start=0, count=2)
    assert ask(engine, wire.FindStreams(("ex-2", "nobody"))).since == 2
    assert ask(engine, wire.FindStreams(("ex-2", "ex-1"))).since == 0
    engine.begin([toy.new_request(2)], [])  # its second answer
    assert ask(engine, wire.FindStreams(("ex-2",))).since == 2


def test_old_streams_and_banks_are_forgotten_before_memory_is(
    engine: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(station, "REMEMBERED_STREAMS", 3)
    monkeypatch.setattr(station, "REMEMBERED_BANKS", 2)
    engine.begin([toy.new_request(number) for number in range(5)], [])
    found = ask(engine, wire.FindStreams(tuple(f"ex-{number}" for number in range(5))))
    assert found == wire.Streams((None, None, 1002, 1003, 1004))
    for _ in range(3):
        ask(engine, wire.AddProbes((file_of(),)))
        ask(engine, wire.RemoveProbes(("p",)))
    with Reader.attach(engine.server.path) as reader:
        assert reader.bank(6).version == 6
        with pytest.raises(errors.HandshakeError, match="no bank 4"):
            reader.bank(4)


def test_a_change_counts_from_the_next_step_on_and_readers_learn_its_columns(
    engine: Station,
) -> None:
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    ask(engine, wire.AddProbes((file_of("a", bias=0.5), file_of("b", toy.FIRST))))
    engine.begin([], [])
    rows_TD = toy.forward(engine, 1, start=2, count=1)
    with Reader.attach(ask(engine, wire.Describe()).socket) as reader:
        before, after = reader.poll()
        assert reader.bank(before.bank_version).probes == ()
        assert [info.name for info in reader.bank(after.bank_version).probes] == ["b", "a"]
    oracle = [probe.apply(rows_TD.numpy()) for probe in engine.columns.probes]
    np.testing.assert_allclose(after.scores_RC, np.stack(oracle, axis=1), rtol=1e-5, atol=1e-5)
    assert after.rows["stream"].tolist() == [1001]


def test_the_engine_is_described_as_before_after_a_reader_has_gone(engine: Station) -> None:
    first = ask(engine, wire.Describe())
    with Reader.attach(first.socket) as reader:
        assert reader.poll() == []
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=2)
    assert ask(engine, wire.Describe()) == msgspec.structs.replace(first, published=1)
    with Reader.attach(first.socket) as again:
        assert len(again.poll()) == 1


def test_the_end_of_a_request_is_said_in_a_step_that_forwards_nothing(engine: Station) -> None:
    engine.begin([toy.new_request(1)], [])
    toy.forward(engine, 1, start=0, count=3)
    engine.begin([], ["in-1"])
    engine.end(toy.inputs)
    engine.begin([], [])
    engine.end(lambda: pytest.fail("a step without a word to say asked for its inputs"))
    with Reader.attach(engine.server.path) as reader:
        rows = np.concatenate([record.rows for record in reader.poll()])
    assert rows["phase"].tolist() == [wire.PREFILL] * 2 + [wire.DECODE, wire.FINISHED]
