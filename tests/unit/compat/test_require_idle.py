"""Takes an engine core with requests in every state; gives weights only when none has begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from clairai.compat.admission import Admission, StreamOwner
from clairai.compat.engine_core import require_idle
from clairai.engine.core_control import CoreControl
from clairai.errors import WeightsBusyError, WeightsError
from clairai.weights.manifest import encode_manifest
from clairai.weights.pack import TensorSpec
from clairai.wire import ring_messages, weights_messages
from tests.support.api_server import Running
from tests.support.weights import plan

MODEL = encode_manifest(plan())
BANK = encode_manifest(plan([TensorSpec("probe::p", "F32", (3,))]))


def core(*requests: tuple[int, ...], tickets: tuple[StreamOwner, ...] = ()) -> Any:
    """Of each request: tokens computed, tokens sampled, times it was preempted."""
    names = ("num_computed_tokens", "num_output_tokens", "num_preemptions")
    held = {
        str(at): SimpleNamespace(**dict(zip(names, (*counts, 0), strict=False)))
        for at, counts in enumerate(requests)
    }
    for request, ticket in zip(held.values(), tickets, strict=False):
        request.clairai_stream_owner = ticket
    return SimpleNamespace(scheduler=SimpleNamespace(requests=held))


def test_requests_that_wait_do_not_hold_weights_up() -> None:
    require_idle(core(), MODEL)
    require_idle(core((0, 0), (0, 0)), MODEL)


BEGUN = {
    "prefill": (1, 0),
    "decode": (12, 3),
    "preempted": (0, 3, 1),
    "preempted in its prompt": (0, 0, 1),
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_one_request_that_has_begun_does(begun: tuple[int, ...]) -> None:
    with pytest.raises(WeightsBusyError, match="1 requests have begun"):
        require_idle(core((0, 0), begun), MODEL)


def test_answers_to_one_request_are_of_one_set_of_weights() -> None:
    """Of three answers one has ended, and two wait for a place in the batch."""
    admission = Admission(CoreControl(None, ()))
    running: list[Any] = [Running() for _ in range(3)]
    for at, one in enumerate(running):
        params = SimpleNamespace(extra_args={}, skip_reading_prefix_cache=None)
        asked = SimpleNamespace(
            request_id=f"{at}_r-0123abcd",
            external_req_id="r",
            sampling_params=params,
            prompt_token_ids=[1],
        )
        admission.accept(admission.prepare(asked), one)
    tickets = tuple(one.clairai_stream_owner for one in running)
    require_idle(core((0, 0), (0, 0), (0, 0), tickets=tickets), MODEL)
    with pytest.raises(WeightsBusyError, match="2 requests have begun"):
        require_idle(core((0, 0), (0, 0), tickets=tickets[1:]), MODEL)


def test_probes_and_vectors_alone_wait_for_nobody() -> None:
    require_idle(core((12, 3)), BANK)


def test_a_desk_refuses_before_a_worker_is_asked() -> None:
    def guard(_: bytes) -> None:
        raise WeightsError("planted")

    def workers(_: bytes) -> list[bytes]:
        raise AssertionError("a worker was asked")

    asked = msgspec.msgpack.encode(weights_messages.CommitWeights(MODEL))
    (reply,) = CoreControl(None, (), guard=guard).control(asked, workers)
    assert msgspec.msgpack.decode(reply, type=ring_messages.ControlReply) == ring_messages.Refusal(
        "weights", "planted"
    )
