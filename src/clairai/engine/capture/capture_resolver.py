"""Resolves what a request asks to be captured to a capture plan.

Runs in: the engine core.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clairai.capture.capture_settings import ALL_POINTS, CaptureSettings
from clairai.engine.capture.capture_plan import CapturePlan, KeepThreshold
from clairai.engine.steer.steering_plan import SteeringPlan, describe_plan, encode_plan
from clairai.errors import CaptureOffError, ClairaiError, ConfigError, RequestError, quote
from clairai.fields.capture import CaptureSpec, EncoderSpec, parse_tags
from clairai.fields.json_fields import suggest_names
from clairai.fields.positions import absolute_ranges
from clairai.points import Point, expand
from clairai.store.codecs.base import Encoder
from clairai.store.row_block import MAX_STEERING_NBYTES

CAPTURE_OFF: Final = (
    'this engine does not capture; start it with "capture": {"folder": "path"} '
    "in the clairai settings"
)
PART_OF_STAGING: Final = 4  # one token's rows may take this part of the staging memory


@dataclass(frozen=True)
class EngineShape:
    """The rows of an engine."""

    points: tuple[Point, ...]  # the tapped ones
    num_layers: int
    width: int
    dtype: str
    thresholds: Mapping[str, float | None]  # of the probes it starts with


@dataclass(frozen=True)
class RequestContext:
    """What a capture depends on besides the request's `capture` field."""

    stream: int
    prompt_len: int
    plan: SteeringPlan | None = None
    adapter: str | None = None  # name of the LoRA adapter
    label: str | None = None
    owner: str | None = None


class CaptureResolver:
    """One for each engine core; `settings` is None if the engine does not capture."""

    def __init__(self, settings: CaptureSettings | None, engine: EngineShape) -> None:
        """ConfigError if the defaults in the settings cannot be resolved."""
        self._settings, self._engine = settings, engine
        self._default_rule: KeepThreshold | None = None
        if settings is not None:
            self._default_rule = _resolve_rule(settings, engine)
            self._check(settings)

    def _check(self, settings: CaptureSettings) -> None:
        try:
            points = self._points(settings.points)
            self._encoder(settings.encoder, len(points))
            absolute_ranges(settings.positions, 1)
        except RequestError as error:
            raise ConfigError(error.reason) from None

    def resolve(self, spec: CaptureSpec | None, request: RequestContext) -> CapturePlan | None:
        """None if nothing of the request is captured; RequestError for an impossible spec."""
        if self._settings is None:
            if spec is not None and spec.is_wanted:
                raise CaptureOffError(CAPTURE_OFF)
            return None
        if spec is None:
            is_chosen = is_sampled(request.stream, self._settings.sample)
            return self._plan(CaptureSpec(), request, self._default_rule) if is_chosen else None
        if not spec.is_wanted:
            return None
        plan = self._plan(spec, request, None)
        if plan is None:
            raise RequestError(
                f"capture.positions hold no position of a prompt of {request.prompt_len} tokens or "
                "of what follows it; name others, or leave it out for all"
            )
        return plan

    def _plan(
        self, spec: CaptureSpec, request: RequestContext, rule: KeepThreshold | None
    ) -> CapturePlan | None:
        settings = self._settings
        assert settings is not None
        ranges = absolute_ranges(spec.positions or settings.positions, request.prompt_len)
        if not ranges:
            return None
        points = self._points(spec.points or settings.points)
        encoder = self._encoder(spec.encoder or settings.encoder, len(points))
        return CapturePlan(
            points=tuple(map(str, points)),
            ranges=ranges,
            encoder=encoder.name,
            parameters=tuple(encoder.parameters.items()),
            to=self._consumers(spec.to, settings),
            tags=_merge_tags(settings.tags, spec.tags),
            steering=steering_json(request.plan),
            adapter=request.adapter,
            hold=rule,
            label=request.label,
            owner=request.owner,
        )

    def _points(self, patterns: Sequence[str]) -> tuple[Point, ...]:
        if tuple(patterns) == ALL_POINTS:
            return self._engine.points
        found = expand(patterns, self._engine.num_layers)
        missing = [point for point in found if point not in self._engine.points]
        if missing:
            tapped = ", ".join(map(str, self._engine.points[:8]))
            raise RequestError(
                f"capture.points: {missing[0]} is not tapped in this engine; tapped are {tapped}"
                f"{' and more' if len(self._engine.points) > 8 else ''}"
            )
        return found

    def _encoder(self, spec: EncoderSpec, num_points: int) -> Encoder:
        engine, dtype = self._engine, spec.parameters.get("dtype", self._engine.dtype)
        if spec.name == "raw" and dtype != engine.dtype:
            raise RequestError(
                f"capture.encoder: raw rows are {engine.dtype} in this engine, not "
                f"{quote(dtype)}; leave dtype out"
            )
        try:
            encoder = spec.for_rows(engine.dtype)
            nbytes = encoder.nbytes_per_row(engine.width) * num_points
        except ClairaiError as error:
            raise RequestError(f"capture.encoder: {error.reason}") from None
        assert self._settings is not None
        limit = (self._settings.staging_mib << 20) // PART_OF_STAGING
        if nbytes > limit:
            raise RequestError(
                f"one token takes {nbytes} bytes at these points, and staging_mib has room for "
                f"{limit}; raise it in the engine's capture setting, or name fewer points"
            )
        return encoder

    def _consumers(self, to: tuple[str, ...] | None, settings: CaptureSettings) -> tuple[str, ...]:
        names = [consumer.name for consumer in settings.consumers]
        for name in to or ():
            if name not in names:
                raise RequestError(
                    f"capture.to: no consumer is named {quote(name)}; {suggest_names(name, names)}"
                )
        return to or settings.to


def is_sampled(stream: int, share: float) -> bool:
    """By a hash of the stream, so that every process decides alike."""
    digest = hashlib.blake2b(stream.to_bytes(8, "little"), digest_size=8, person=b"clairai-sample")
    return int.from_bytes(digest.digest(), "little") < share * 2**64


def steering_json(plan: SteeringPlan | None) -> str:
    """The steering of a request as it is stored with its rows: a JSON object."""
    if plan is None:
        return "{}"
    text = json.dumps({"applied": describe_plan(plan)}, separators=(",", ":"))
    if len(text.encode()) <= MAX_STEERING_NBYTES:
        return text
    # Too long to store with every request: a digest still tells two of them apart.
    digest = hashlib.sha256(encode_plan(plan)).hexdigest()
    return json.dumps({"actions": len(plan.actions), "digest": digest})


def _merge_tags(defaults: str, tags: str) -> str:
    """Tags of the request override those of the settings."""
    if defaults == "{}":
        return tags
    merged: dict[str, Any] = {**json.loads(defaults), **json.loads(tags)}
    return parse_tags(merged, what="capture.tags, with those of the engine's setting")


def _resolve_rule(settings: CaptureSettings, engine: EngineShape) -> KeepThreshold | None:
    rule = settings.when
    if rule is None:
        return None
    if rule.probe not in engine.thresholds:
        raise ConfigError(
            f"capture.when: no probe is named {quote(rule.probe)}; "
            f"{suggest_names(rule.probe, engine.thresholds)}"
        )
    threshold = engine.thresholds[rule.probe] if rule.above is None else rule.above
    if threshold is None:
        raise ConfigError(
            f"capture.when: probe {quote(rule.probe)} has no threshold of its own; give above"
        )
    return KeepThreshold(rule.probe, threshold)
