"""Steering and captures can skip a step like the last one while no request uses them."""

from __future__ import annotations

from clairai.engine.step import NewRequest, RequestMark
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import rig
from tests.unit.engine.steer.test_worker_steering import adding, batch, made


def steered(name: str) -> NewRequest:
    return NewRequest(name, f"api-{name}", RequestMark(1), 4, adding(1))


def test_steering_can_skip_while_no_request_and_no_row_is_steered() -> None:
    _, worker_steering = made()
    assert worker_steering.can_skip()
    worker_steering.begin([steered("a")], [])
    worker_steering.place(batch(a=(0, 1), b=(0, 1)))
    assert not worker_steering.can_skip()
    worker_steering.begin([], ["a"])
    assert not worker_steering.can_skip()  # its row on the GPU is still steered
    worker_steering.place(batch(b=(1, 1)))
    assert worker_steering.can_skip()


def test_captures_can_skip_while_no_request_is_captured() -> None:
    with rig() as one:
        assert one.capture.can_skip()
        one.enter("a", 1, capture_plan())
        one.step(("a", 0, 2), ("b", 0, 2))
        assert not one.capture.can_skip()
        one.step(("b", 2, 1), finished=("a",))
        assert one.capture.can_skip()
