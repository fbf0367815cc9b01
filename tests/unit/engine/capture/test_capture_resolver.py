"""A capture field and the settings resolve to a plan, or to an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from clairai.capture.capture_settings import CaptureSettings
from clairai.engine.capture.capture_plan import (
    PLAN_DECODER,
    PLAN_ENCODER,
    CapturePlan,
    KeepThreshold,
)
from clairai.engine.capture.capture_resolver import (
    CaptureResolver,
    EngineShape,
    RequestContext,
    is_sampled,
    steering_json,
)
from clairai.engine.steer.steering_plan import PlanAction, PlanRow, SteeringPlan
from clairai.errors import CaptureOffError, ConfigError, PointError, RequestError
from clairai.fields.capture import CaptureSpec, parse_capture
from clairai.points import Point
from clairai.store.row_block import MAX_STEERING_NBYTES, RequestNote

ENGINE = EngineShape(
    points=tuple(map(Point.parse, ("pre_attn.0", "post_block.0", "post_block.1"))),
    num_layers=2,
    width=64,
    dtype="bfloat16",
    thresholds={"anger": 0.5, "joy": None},
)


def resolver(**setting: Any) -> CaptureResolver:
    return CaptureResolver(CaptureSettings.parse({"folder": "x", **setting}), ENGINE)


def order(wish: Any, asked: RequestContext | None = None, **setting: Any) -> CapturePlan | None:
    return resolver(**setting).resolve(parse_capture(wish), asked or RequestContext(7, 10))


def test_true_captures_all_rows_at_all_tapped_points_raw() -> None:
    assert order(True) == CapturePlan(
        points=("pre_attn.0", "post_block.0", "post_block.1"),
        ranges=((0, 2**31 - 1),),
        encoder="raw",
        parameters=(("dtype", "bfloat16"),),
        to=("fs",),
    )


def test_a_plan_travels_as_bytes() -> None:
    made = order({"encoder": {"name": "rp8", "k": 8}, "positions": ["prompt", {"from": 12}]})
    assert made is not None
    assert made.ranges == ((0, 10), (12, 2**31 - 1))
    assert dict(made.parameters) == {"k": 8, "seed": 0}
    assert PLAN_DECODER.decode(PLAN_ENCODER.encode(made)) == made


def test_what_a_request_leaves_out_comes_from_the_settings() -> None:
    made = order(
        {"tags": {"b": 2}},
        points=["post_block.*"],
        positions="prompt",
        encoder="full8",
        tags={"a": 1, "b": 1},
    )
    assert made is not None
    assert made.points == ("post_block.0", "post_block.1")
    assert made.ranges == ((0, 10),)
    assert made.encoder == "full8"
    assert json.loads(made.tags) == {"a": 1, "b": 2}


def test_a_request_can_decline_where_every_request_is_captured() -> None:
    assert order(None, sample=1) is not None
    assert order(False, sample=1) is None
    assert order(None) is None


def test_an_engine_that_does_not_capture_refuses_only_requests_that_ask() -> None:
    off = CaptureResolver(None, ENGINE)
    assert off.resolve(None, RequestContext(1, 1)) is None
    assert off.resolve(CaptureSpec(is_wanted=False), RequestContext(1, 1)) is None
    with pytest.raises(CaptureOffError, match="does not capture"):
        off.resolve(CaptureSpec(), RequestContext(1, 1))


def test_a_sample_has_the_given_share_and_is_repeatable() -> None:
    chosen = [stream for stream in range(1, 20_001) if is_sampled(stream, 0.1)]
    assert abs(len(chosen) - 2000) < 200
    assert all(is_sampled(stream, 0.2) for stream in chosen)  # a larger sample has these too
    assert not any(is_sampled(stream, 0.0) for stream in range(1000))
    assert all(is_sampled(stream, 1.0) for stream in (0, 1, 2**64 - 1))


def test_a_rule_applies_to_sampled_requests_and_not_to_those_that_ask() -> None:
    held = order(None, when={"probe": "anger"})
    assert held is not None
    assert held.hold == KeepThreshold("anger", 0.5)
    assert order(None, when={"probe": "joy", "above": 2}).hold == KeepThreshold("joy", 2.0)  # type: ignore[union-attr]
    assert order(True, when={"probe": "anger"}).hold is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"when": {"probe": "anget"}}, "close to it: anger"),
        ({"when": {"probe": "joy"}}, "no threshold of its own; give above"),
        ({"points": ["post_attn.1"]}, "post_attn.1 is not tapped"),
        ({"positions": {"message": 2}}, "template"),
        ({"encoder": {"name": "raw", "dtype": "float32"}}, "leave dtype out"),
    ],
)
def test_settings_that_no_request_could_use_are_refused_at_the_start(
    setting: Any, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolver(**setting)
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"points": ["post_attn.1"]}, "tapped are pre_attn.0, post_block.0"),
        ({"to": ["npz"]}, "no consumer is named 'npz'; there are fs"),
        ({"positions": {"from": -99, "to": -50}}, "hold no position of a prompt of 10 tokens"),
        ({"encoder": {"name": "raw", "dtype": "float16"}}, "raw rows are bfloat16"),
        ({"positions": {"message": 0}}, "message_range"),
    ],
)
def test_an_impossible_capture_field_is_refused(wish: Any, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        order(wish)
    assert reason in caught.value.reason


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(PointError, match="this model has 2 layers"):
        order({"points": ["post_block.2"]})


def test_a_token_too_large_for_the_staging_memory_is_refused() -> None:
    wide = EngineShape(ENGINE.points, 2, 1 << 17, "float32", {})
    with pytest.raises(ConfigError, match="raise it in the engine's capture setting"):
        CaptureResolver(CaptureSettings.parse({"folder": "x", "staging_mib": 1}), wide)


def test_tags_that_are_too_long_together_are_refused() -> None:
    with pytest.raises(RequestError, match="with those of the engine's setting"):
        order({"tags": {"b": "x" * 3000}}, tags={"a": "y" * 3000})


def _course(num_ranges: int) -> SteeringPlan:
    row = PlanRow("post_block.0", "d", np.zeros(4, "<f4").tobytes())
    spread = tuple((3 * i, 3 * i + 1) for i in range(num_ranges))
    return SteeringPlan((PlanAction("joy", "d", "add", (row,), 2.0, spread),))


def test_applied_steering_is_stored_and_a_long_one_as_its_digest() -> None:
    assert steering_json(None) == "{}"
    (told,) = json.loads(steering_json(_course(1)))["applied"]
    assert (told["vector"], told["scale"]) == ("joy", 2.0)
    long = steering_json(_course(20_000))
    assert len(long) < MAX_STEERING_NBYTES
    assert json.loads(long)["actions"] == 1
    assert len(json.loads(long)["digest"]) == 64
    RequestNote(steering=long)
