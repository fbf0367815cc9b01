"""What the engine core leaves in a request's `extra_args` for the workers, and how it is read.

Runs in: the engine core (writing) and every worker (reading).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from clairai.engine.capture.capture_plan import PLAN_DECODER, PLAN_ENCODER, CapturePlan
from clairai.engine.steer.cache_keys import BlockKeys
from clairai.engine.steer.steering_plan import SteeringPlan, decode_plan, encode_plan
from clairai.engine.step import RequestMark
from clairai.fields.request_fields import new_stream_id

MARK_KEY: Final = "clairai_mark"
STEERING_KEY: Final = "clairai_steering_plan"
CAPTURE_KEY: Final = "clairai_capture_plan"


class _EncodedPlan(bytes):
    """An encoded plan that keeps the decoded one beside it, for readers in the same process."""

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)  # other processes get the bytes alone


class EncodedSteeringPlan(_EncodedPlan):
    plan: SteeringPlan
    keys: BlockKeys  # kept: vLLM asks for them block by block

    @classmethod
    def encode(cls, plan: SteeringPlan) -> EncodedSteeringPlan:
        encoded = cls(encode_plan(plan))
        encoded.plan, encoded.keys = plan, BlockKeys(plan)
        return encoded


class EncodedCapturePlan(_EncodedPlan):
    plan: CapturePlan

    @classmethod
    def encode(cls, plan: CapturePlan) -> EncodedCapturePlan:
        encoded = cls(PLAN_ENCODER.encode(plan))
        encoded.plan = plan
        return encoded


def with_plans(
    extra_args: Mapping[str, Any] | None,
    mark: RequestMark,
    request_id: str,
    steering: SteeringPlan | None,
    capture: CapturePlan | None,
) -> dict[str, Any]:
    """A copy of `extra_args` with our entries; what a client sent under our keys is dropped."""
    ours = (MARK_KEY, STEERING_KEY, CAPTURE_KEY)
    made = {key: value for key, value in (extra_args or {}).items() if key not in ours}
    made[MARK_KEY] = [mark.stream, mark.choice, request_id]
    if steering is not None:
        made[STEERING_KEY] = EncodedSteeringPlan.encode(steering)
    if capture is not None:
        made[CAPTURE_KEY] = EncodedCapturePlan.encode(capture)
    return made


def read_mark(sampling_params: Any, req_id: str) -> tuple[RequestMark, str]:
    """The request's mark, and the id by which vLLM's caller knows it."""
    written = _read(sampling_params, MARK_KEY)
    if written is None:
        # vLLM's own warm-up requests do not pass the engine core's admission. They get a random
        # stream id, which nobody asks for.
        return RequestMark(new_stream_id()), req_id
    stream, choice, request_id = written
    return RequestMark(int(stream), int(choice)), str(request_id)


def read_steering_plan(sampling_params: Any) -> SteeringPlan | None:
    return decode_steering_plan(_read(sampling_params, STEERING_KEY))


def decode_steering_plan(encoded: bytes | None) -> SteeringPlan | None:
    if isinstance(encoded, EncodedSteeringPlan):
        return encoded.plan
    return None if encoded is None else decode_plan(encoded)


def read_cache_keys(sampling_params: Any) -> BlockKeys | None:
    """What a steering plan adds to the keys of the request's blocks in the prefix cache."""
    encoded = _read(sampling_params, STEERING_KEY)
    if isinstance(encoded, EncodedSteeringPlan):
        return encoded.keys
    return None if encoded is None else BlockKeys(decode_plan(encoded))


def read_capture_plan(sampling_params: Any) -> CapturePlan | None:
    encoded = _read(sampling_params, CAPTURE_KEY)
    if isinstance(encoded, EncodedCapturePlan):
        return encoded.plan
    return None if encoded is None else PLAN_DECODER.decode(encoded)


def _read(sampling_params: Any, key: str) -> Any:
    return (getattr(sampling_params, "extra_args", None) or {}).get(key)
