"""Takes an engine core with requests in every state; gives weights only when none has begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from clairai import wire, wire_weights
from clairai.compat.core import require_idle
from clairai.errors import WeightsError
from clairai.steer.desk import Desk
from clairai.weights.layout import Described
from clairai.weights.manifest import encode
from tests.unit.toy_weights import plan

MODEL = encode(plan())
BANK = encode(plan([Described("probe::p", "F32", (3,))]))


def core(*requests: tuple[int, int]) -> Any:
    """Of each request: tokens computed, tokens sampled."""
    held = {
        str(at): SimpleNamespace(num_computed_tokens=computed, num_output_tokens=sampled)
        for at, (computed, sampled) in enumerate(requests)
    }
    return SimpleNamespace(scheduler=SimpleNamespace(requests=held))


def test_requests_that_wait_do_not_hold_weights_up() -> None:
    require_idle(core(), MODEL)
    require_idle(core((0, 0), (0, 0)), MODEL)


@pytest.mark.parametrize("begun", [(1, 0), (12, 3), (0, 3)], ids=["prefill", "decode", "preempted"])
def test_one_request_that_has_begun_does(begun: tuple[int, int]) -> None:
    with pytest.raises(WeightsError, match="1 requests have begun"):
        require_idle(core((0, 0), begun), MODEL)


def test_probes_and_vectors_alone_wait_for_nobody() -> None:
    require_idle(core((12, 3)), BANK)


def test_a_desk_refuses_before_a_worker_is_asked() -> None:
    def guard(_: bytes) -> None:
        raise WeightsError("planted")

    def workers(_: bytes) -> list[bytes]:
        raise AssertionError("a worker was asked")

    asked = msgspec.msgpack.encode(wire_weights.CommitWeights(MODEL))
    (reply,) = Desk(None, (), guard=guard).control(asked, workers)
    assert msgspec.msgpack.decode(reply, type=wire.ControlReply) == wire.Refusal(
        "weights", "planted"
    )
