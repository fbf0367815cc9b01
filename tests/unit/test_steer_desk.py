"""The engine core answers what concerns steering, and leaves the rest to the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from clairai import wire, wire_steer
from clairai.errors import RequestError
from clairai.points import Point
from clairai.probe.files import dumps as dump_probe
from clairai.probe.model import Probe
from clairai.steer.desk import REMEMBERED_REFUSALS, Desk
from clairai.steer.files import dumps
from clairai.steer.registry import Limits, Registry
from clairai.steer.rules import Rule
from clairai.steer.vector import Vector

POINT = Point("post_block", 1)


def _registry() -> Registry:
    return Registry([POINT], 3, Limits(rows=8, programs=8))


def _vector(name: str = "v", value: float = 1.0) -> Vector:
    return Vector(name, {POINT: np.full(3, value, np.float32)})


def _probe(name: str, threshold: float | None = None) -> Probe:
    return Probe(name, POINT, np.ones(3, np.float32), threshold=threshold)


def _never(_: bytes) -> list[bytes]:
    raise AssertionError("a worker was asked")


def _ask(
    desk: Desk, control: wire.Control, workers: Callable[[bytes], list[bytes]] = _never
) -> Any:
    (reply,) = desk.control(msgspec.msgpack.encode(control), workers)
    return msgspec.msgpack.decode(reply, type=wire.ControlReply)


def test_vectors_come_go_and_are_given_back_as_they_came() -> None:
    desk = Desk(_registry(), ())
    state = _ask(desk, wire_steer.PutVectors((dumps(_vector()),), "add"))
    assert [listed.name for listed in state.vectors] == ["v"]
    assert _ask(desk, wire_steer.GetVector("v")).data == dumps(_vector())
    refused = _ask(desk, wire_steer.PutVectors((dumps(_vector()),), "add"))
    assert isinstance(refused, wire.Refusal)
    assert _ask(desk, wire_steer.RemoveVectors(("v",))).vectors == ()
    assert isinstance(_ask(desk, wire_steer.GetVector("v")), wire.Refusal)


def test_tiers_are_set_one_by_one_and_shown_as_json() -> None:
    desk = Desk(_registry(), ())
    _ask(desk, wire_steer.PutVectors((dumps(_vector()),)))
    _ask(desk, wire_steer.SetSteering(base=b'[{"vector": "v", "scale": 2}]'))
    state = _ask(desk, wire_steer.SetSteering(decode=b'[{"vector": "v"}]'))
    assert msgspec.json.decode(state.base)[0]["scale"] == 2
    assert len(msgspec.json.decode(state.decode)) == 1
    assert _ask(desk, wire_steer.SetSteering(base=b"[]")).base == b"[]"
    for text in (b"{", b'[{"vector": "nobody"}]', b"[1]", b"[" * 5000):
        assert isinstance(_ask(desk, wire_steer.SetSteering(base=text)), wire.Refusal)


def test_an_engine_that_does_not_steer_says_so_and_still_remembers_refusals() -> None:
    desk = Desk(None, ())
    assert _ask(desk, wire_steer.ListVectors()).code == "steering-off"
    desk.note_refusal(5, RequestError("no"))
    assert _ask(desk, wire_steer.WhyRefused(5)) == wire_steer.Refused("request", "no")
    assert _ask(desk, wire_steer.WhyRefused(5)) == wire_steer.Refused("", "")


def test_refusals_that_nobody_asks_for_are_forgotten() -> None:
    desk = Desk(None, ())
    for stream in range(REMEMBERED_REFUSALS + 1):
        desk.note_refusal(stream, RequestError(str(stream)))
    assert _ask(desk, wire_steer.WhyRefused(0)).code == ""
    assert _ask(desk, wire_steer.WhyRefused(1)).reason == "1"


def test_a_gate_knows_the_probes_as_the_workers_have_them() -> None:
    desk = Desk(_registry(), (_probe("old", 1.0),))
    good = [msgspec.msgpack.encode(wire.BankState(1, 16, ()))]
    bad = [msgspec.msgpack.encode(wire.Refusal("probe", "no"))]
    added = wire.AddProbes((dump_probe(_probe("new", 2.0)),))
    _ask(desk, added, lambda _: bad)
    with pytest.raises(RequestError, match="new"):
        desk.thresholds([Rule("new")])
    _ask(desk, added, lambda _: good)
    assert desk.thresholds([Rule("new"), Rule("old", threshold=7.0)]) == (2.0, 7.0)
    _ask(desk, wire.RemoveProbes(("old",)), lambda _: good)
    with pytest.raises(RequestError, match="old"):
        desk.thresholds([Rule("old", threshold=7.0)])


def test_what_is_no_message_is_left_to_the_workers() -> None:
    assert Desk(None, ()).control(b"\xc1", lambda _: [b"reply"]) == [b"reply"]


def test_a_running_request_is_amended_and_one_that_is_not_running_refused() -> None:
    asked: list[tuple[int, Sequence[Any]]] = []

    def amend(stream: int, entries: Sequence[Any]) -> list[int]:
        asked.append((stream, entries))
        return [12] if stream == 1 else []

    desk = Desk(_registry(), (), amend)
    reply = _ask(desk, wire_steer.Amend(1, b'[{"vector": "v"}]'))
    assert reply.positions == (12,)
    assert msgspec.json.decode(reply.applied)[0]["vector"] == "v"
    assert isinstance(_ask(desk, wire_steer.Amend(2, b"[]")), wire.Refusal)
    assert [stream for stream, _ in asked] == [1, 2]
