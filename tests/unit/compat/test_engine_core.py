"""The engine core: keys of steered blocks in the prefix cache, and when weights may change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from clairai.compat.admission import Admission, StreamOwner
from clairai.compat.check_engine import CORES_KEY
from clairai.compat.engine_core import require_idle, wrap_extra_keys
from clairai.compat.extra_args import STEERING_KEY, EncodedSteeringPlan
from clairai.engine.core_control import CoreControl
from clairai.engine.steer.cache_keys import block_key
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.errors import WeightsBusyError, WeightsError
from clairai.fields.ranges import OPEN_END
from clairai.weights.manifest import encode_manifest
from clairai.weights.pack import TensorSpec
from clairai.wire import control_messages, ring_messages, weights_messages
from tests.support.api_server import Running
from tests.support.steering_plans import action, plan
from tests.support.weights import plan as weights_plan


def own_keys(request: Any, start: int, end: int, mm_index: int) -> tuple[Any, int]:
    """As vLLM: keys of its own for the request's first block."""
    return (request.own if start == 0 else None), mm_index + end


def keys_of(encoded: object, start: int, end: int, own: Any = None) -> tuple[Any, int]:
    params = SimpleNamespace(extra_args=None if encoded is None else {STEERING_KEY: encoded})
    found: tuple[Any, int] = wrap_extra_keys(own_keys)(
        SimpleNamespace(sampling_params=params, own=own), start, end, 3
    )
    return found


STEERED = plan(action((20, OPEN_END)))


@pytest.mark.parametrize("own", [None, ("lora",)])
def test_a_request_that_is_not_steered_has_the_keys_it_always_had(own: Any) -> None:
    assert keys_of(None, 0, 16, own) == (own, 19)
    assert keys_of(EncodedSteeringPlan.encode(STEERED), 0, 16, own) == (own, 19)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_steered_block_has_the_key_of_its_plan(is_elsewhere: bool) -> None:
    """Encoded in this process, or as plain bytes from another."""
    encoded: bytes = EncodedSteeringPlan.encode(STEERED)
    encoded = bytes(encoded) if is_elsewhere else encoded
    ((tag, key),), index = keys_of(encoded, 16, 32)
    assert (tag, key) == ("clairai", block_key(STEERED, 16, 32))
    assert index == 35


def test_our_key_comes_after_vllms_own() -> None:
    early: SteeringPlan = plan(action((0, 4)))
    keys, _ = keys_of(EncodedSteeringPlan.encode(early), 0, 16, ("lora", "salt"))
    assert keys == ("lora", "salt", ("clairai", block_key(early, 0, 16)))


MODEL = encode_manifest(weights_plan())
BANK = encode_manifest(weights_plan([TensorSpec("probe::p", "F32", (3,))]))


def core(*requests: tuple[int, ...], owners: tuple[StreamOwner, ...] = ()) -> Any:
    """For each request: tokens computed, tokens sampled, times it was preempted."""
    names = ("num_computed_tokens", "num_output_tokens", "num_preemptions")
    held = {
        str(at): SimpleNamespace(**dict(zip(names, (*counts, 0), strict=False)))
        for at, counts in enumerate(requests)
    }
    for request, owner in zip(held.values(), owners, strict=False):
        request.clairai_stream_owner = owner
    config = SimpleNamespace(parallel_config=SimpleNamespace())
    return SimpleNamespace(scheduler=SimpleNamespace(requests=held), vllm_config=config)


def test_waiting_requests_do_not_delay_new_weights() -> None:
    require_idle(core(), MODEL)
    require_idle(core((0, 0), (0, 0)), MODEL)


BEGUN = {
    "prefill": (1, 0),
    "decode": (12, 3),
    "preempted": (0, 3, 1),
    "preempted in its prompt": (0, 0, 1),
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_one_request_that_has_begun_delays_new_weights(begun: tuple[int, ...]) -> None:
    with pytest.raises(WeightsBusyError, match="1 requests have begun"):
        require_idle(core((0, 0), begun), MODEL)


def test_all_choices_of_a_request_use_the_same_weights() -> None:
    """Of three choices one has ended, and two wait for a place in the batch."""
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
    owners = tuple(one.clairai_stream_owner for one in running)
    require_idle(core((0, 0), (0, 0), (0, 0), owners=owners), MODEL)
    with pytest.raises(WeightsBusyError, match="2 requests have begun"):
        require_idle(core((0, 0), (0, 0), owners=owners[1:]), MODEL)


def test_a_choice_that_waits_delays_new_weights_if_another_core_may_run_the_others() -> None:
    first, lone = StreamOwner("r-0123abcd"), StreamOwner("s-0123abcd")
    first.num_admitted = lone.num_admitted = 1
    waiting = core((0, 0), (0, 0), owners=(first, lone))
    one, other = waiting.scheduler.requests.values()
    one.request_id, other.request_id = "1_r-0123abcd", "s-0123abcd"
    require_idle(waiting, MODEL)
    waiting.vllm_config.additional_config = {CORES_KEY: 2}
    waiting.vllm_config.parallel_config.data_parallel_index = 1
    with pytest.raises(WeightsBusyError, match="1 requests have begun"):
        require_idle(waiting, MODEL)
    waiting.vllm_config.parallel_config.data_parallel_external_lb = True
    require_idle(waiting, MODEL)


def test_probes_and_vectors_alone_do_not_wait() -> None:
    require_idle(core((12, 3)), BANK)


def test_the_core_refuses_before_it_asks_a_worker() -> None:
    def guard(_: bytes) -> None:
        raise WeightsError("planted")

    def workers(_: bytes) -> list[bytes]:
        raise AssertionError("a worker was asked")

    asked = msgspec.msgpack.encode(weights_messages.CommitWeights(MODEL))
    (reply,) = CoreControl(None, (), guard=guard).control(asked, workers)
    assert msgspec.msgpack.decode(
        reply, type=control_messages.ControlReply
    ) == ring_messages.Refusal("weights", "planted")
