"""Who steers or captures nobody has nothing to do in a step that is like the last one."""

from __future__ import annotations

from clairai.tap.helm import Helm
from clairai.tap.rows import Mark
from clairai.tap.station import NewRequest
from tests.unit.test_tap_steering import adding, batch, made
from tests.unit.toy_capture_rig import rig
from tests.unit.toy_captures_engine import order


def steered(name: str) -> NewRequest:
    return NewRequest(name, f"api-{name}", Mark(1), 4, adding(1))


def test_steering_rests_while_nobody_is_steered_and_the_map_says_so() -> None:
    _, steering = made()
    helm = Helm(steering)
    assert helm.rests()
    helm.begin([steered("a")], [])
    helm.place(batch(a=(0, 1), b=(0, 1)))
    assert not helm.rests()
    helm.begin([], ["a"])
    assert not helm.rests()  # its row on the GPU is still steered
    helm.place(batch(b=(1, 1)))
    assert helm.rests()


def test_captures_rest_while_nobody_is_captured() -> None:
    with rig() as one:
        assert one.capture.rests()
        one.enter("a", 1, order())
        one.step(("a", 0, 2), ("b", 0, 2))
        assert not one.capture.rests()
        one.step(("b", 2, 1), finished=("a",))
        assert one.capture.rests()
