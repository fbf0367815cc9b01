"""The engine core answers messages about steering and passes the rest to the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from clairai.engine.core_control import REMEMBERED_REFUSALS, CoreControl
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.errors import RequestError
from clairai.fields.rules import StopRule
from clairai.points import Point
from clairai.probe.files import dumps as dump_probe
from clairai.probe.model import Probe
from clairai.vector.model import Vector
from clairai.vector.safetensors_format import dumps
from clairai.wire import control_messages, ring_messages, steering_messages

POINT = Point("post_block", 1)


def _registry() -> SteeringRegistry:
    return SteeringRegistry([POINT], 3, SteeringLimits(rows=8, programs=8))


def _vector(name: str = "v", value: float = 1.0) -> Vector:
    return Vector(name, {POINT: np.full(3, value, np.float32)})


def _probe(name: str, threshold: float | None = None) -> Probe:
    return Probe(name, POINT, np.ones(3, np.float32), threshold=threshold)


def _never(_: bytes) -> list[bytes]:
    raise AssertionError("a worker was asked")


def _ask(
    core_control: CoreControl,
    control: control_messages.Control,
    workers: Callable[[bytes], list[bytes]] = _never,
) -> Any:
    (reply,) = core_control.control(msgspec.msgpack.encode(control), workers)
    return msgspec.msgpack.decode(reply, type=control_messages.ControlReply)


def test_vectors_are_added_removed_and_returned_unchanged() -> None:
    core_control = CoreControl(_registry(), ())
    state = _ask(core_control, steering_messages.PutVectors((dumps(_vector()),), "add"))
    assert [listed.name for listed in state.vectors] == ["v"]
    assert _ask(core_control, steering_messages.GetVector("v")).data == dumps(_vector())
    refused = _ask(core_control, steering_messages.PutVectors((dumps(_vector()),), "add"))
    assert isinstance(refused, ring_messages.Refusal)
    assert _ask(core_control, steering_messages.RemoveVectors(("v",))).vectors == ()
    assert isinstance(_ask(core_control, steering_messages.GetVector("v")), ring_messages.Refusal)


def test_tiers_are_set_one_by_one_and_shown_as_json() -> None:
    core_control = CoreControl(_registry(), ())
    _ask(core_control, steering_messages.PutVectors((dumps(_vector()),)))
    _ask(core_control, steering_messages.SetSteering(base=b'[{"vector": "v", "scale": 2}]'))
    state = _ask(core_control, steering_messages.SetSteering(decode=b'[{"vector": "v"}]'))
    assert msgspec.json.decode(state.base)[0]["scale"] == 2
    assert len(msgspec.json.decode(state.decode)) == 1
    assert _ask(core_control, steering_messages.SetSteering(base=b"[]")).base == b"[]"
    for text in (b"{", b'[{"vector": "nobody"}]', b"[1]", b"[" * 5000):
        assert isinstance(
            _ask(core_control, steering_messages.SetSteering(base=text)), ring_messages.Refusal
        )


def test_an_engine_that_does_not_steer_says_so_and_still_remembers_refusals() -> None:
    core_control = CoreControl(None, ())
    assert _ask(core_control, steering_messages.ListVectors()).code == "steering-off"
    core_control.note_refusal(5, RequestError("no"))
    assert _ask(core_control, steering_messages.WhyRefused(5)) == steering_messages.RefusalReason(
        "request", "no"
    )
    assert _ask(core_control, steering_messages.WhyRefused(5)) == steering_messages.RefusalReason(
        "", ""
    )


def test_the_oldest_refusals_are_forgotten() -> None:
    core_control = CoreControl(None, ())
    for stream in range(REMEMBERED_REFUSALS + 1):
        core_control.note_refusal(stream, RequestError(str(stream)))
    assert _ask(core_control, steering_messages.WhyRefused(0)).code == ""
    assert _ask(core_control, steering_messages.WhyRefused(1)).reason == "1"


def test_gates_use_the_probes_of_the_workers_bank() -> None:
    core_control = CoreControl(_registry(), (_probe("old", 1.0),))
    good = [msgspec.msgpack.encode(control_messages.BankState(1, 16, ()))]
    bad = [msgspec.msgpack.encode(ring_messages.Refusal("probe", "no"))]
    added = control_messages.AddProbes((dump_probe(_probe("new", 2.0)),))
    _ask(core_control, added, lambda _: bad)
    with pytest.raises(RequestError, match="new"):
        core_control.thresholds([StopRule("new")])
    _ask(core_control, added, lambda _: good)
    assert core_control.thresholds([StopRule("new"), StopRule("old", threshold=7.0)]) == (2.0, 7.0)
    _ask(core_control, control_messages.RemoveProbes(("old",)), lambda _: good)
    with pytest.raises(RequestError, match="old"):
        core_control.thresholds([StopRule("old", threshold=7.0)])


def test_an_invalid_message_is_left_to_the_workers() -> None:
    assert CoreControl(None, ()).control(b"\xc1", lambda _: [b"reply"]) == [b"reply"]


def test_the_steering_of_a_running_request_is_changed_and_of_an_ended_one_not() -> None:
    asked: list[tuple[int, Sequence[Any]]] = []

    def amend(stream: int, entries: Sequence[Any]) -> list[int]:
        asked.append((stream, entries))
        return [12] if stream == 1 else []

    core_control = CoreControl(_registry(), (), amend)
    reply = _ask(core_control, steering_messages.ChangeSteering(1, b'[{"vector": "v"}]'))
    assert reply.positions == (12,)
    assert msgspec.json.decode(reply.applied)[0]["vector"] == "v"
    assert _ask(core_control, steering_messages.ChangeSteering(2, b"[]")).positions == ()
    assert [stream for stream, _ in asked] == [1, 2]
