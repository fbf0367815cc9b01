"""Takes a request's wish and the engine's setting; gives the order it comes to. Engine core."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clairai.capture.capture_settings import ALL_POINTS, CaptureSettings
from clairai.engine.capture.capture_plan import CapturePlan, KeepThreshold
from clairai.engine.steer.steering_plan import ENCODER as COURSE_ENCODER
from clairai.engine.steer.steering_plan import SteeringPlan, describe_plan
from clairai.errors import CaptureOffError, ClairaiError, ConfigError, RequestError
from clairai.fields.capture import CaptureSpec, EncoderSpec, parse_tags
from clairai.fields.json_fields import suggest_names
from clairai.fields.positions import Positions, absolute_ranges
from clairai.points import Point, expand, quote
from clairai.store.codecs.base import Encoder
from clairai.store.row_block import MAX_STEERING_NBYTES

CAPTURE_OFF: Final = (
    'this engine does not capture; start it with "capture": {"folder": "path"} '
    "in the clairai settings"
)
PART_OF_STAGING: Final = 4  # one token's rows may take this part of the staging memory


@dataclass(frozen=True)
class EngineShape:
    """What the rows of an engine are like."""

    points: tuple[Point, ...]  # that are tapped
    num_layers: int
    width: int
    dtype: str
    thresholds: Mapping[str, float | None]  # of the probes it starts with


@dataclass(frozen=True)
class RequestContext:
    """One request, as far as a capture depends on it."""

    stream: int
    prompt_len: int
    plan: SteeringPlan | None = None
    adapter: str | None = None  # LoRA's name of it


class CaptureResolver:
    """One for each engine core; `setting` is None where nothing is captured."""

    def __init__(self, setting: CaptureSettings | None, engine: EngineShape) -> None:
        """ConfigError if the setting's own defaults cannot be ordered."""
        self._setting, self._engine = setting, engine
        self._hold: KeepThreshold | None = None
        if setting is not None:
            self._hold = _keep_threshold(setting, engine)
            self._check(setting)

    def _check(self, setting: CaptureSettings) -> None:
        try:
            points = self._points(setting.points)
            self._encoder(setting.encoder, len(points))
            absolute_ranges(setting.positions, 1)
        except RequestError as error:
            raise ConfigError(error.reason) from None

    def order(self, wish: CaptureSpec | None, asked: RequestContext) -> CapturePlan | None:
        """None if nothing of the request is captured; RequestError for a wish that cannot be."""
        if self._setting is None:
            if wish is not None and wish.is_wanted:
                raise CaptureOffError(CAPTURE_OFF)
            return None
        if wish is None:
            is_chosen = is_sampled(asked.stream, self._setting.sample)
            return self._made(CaptureSpec(), asked, self._hold) if is_chosen else None
        if not wish.is_wanted:
            return None
        order = self._made(wish, asked, None)
        if order is None:
            raise RequestError(
                f"capture.positions hold no position of a prompt of {asked.prompt_len} tokens or "
                "of what follows it; name others, or leave it out for all"
            )
        return order

    def _made(
        self, wish: CaptureSpec, asked: RequestContext, hold: KeepThreshold | None
    ) -> CapturePlan | None:
        setting = self._setting
        assert setting is not None
        positions: Positions = wish.positions or setting.positions
        wanted = absolute_ranges(positions, asked.prompt_len)
        if not wanted:
            return None
        points = self._points(wish.points or setting.points)
        encoder = self._encoder(wish.encoder or setting.encoder, len(points))
        return CapturePlan(
            points=tuple(map(str, points)),
            ranges=wanted,
            encoder=encoder.name,
            parameters=tuple(encoder.parameters.items()),
            to=self._consumers(wish.to, setting),
            tags=_merge_tags(setting.tags, wish.tags),
            steering=steering_json(asked.plan),
            adapter=asked.adapter,
            hold=hold,
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
        assert self._setting is not None
        limit = (self._setting.staging_mib << 20) // PART_OF_STAGING
        if nbytes > limit:
            raise RequestError(
                f"one token takes {nbytes} bytes at these points, and staging_mib has room for "
                f"{limit}; raise it in the engine's capture setting, or name fewer points"
            )
        return encoder

    def _consumers(
        self, asked: tuple[str, ...] | None, setting: CaptureSettings
    ) -> tuple[str, ...]:
        names = [consumer.name for consumer in setting.consumers]
        for name in asked or ():
            if name not in names:
                raise RequestError(
                    f"capture.to: no consumer is named {quote(name)}; {suggest_names(name, names)}"
                )
        return asked or setting.to


def is_sampled(stream: int, share: float) -> bool:
    """By a hash of the stream: the same request is chosen wherever it is asked."""
    digest = hashlib.blake2b(stream.to_bytes(8, "little"), digest_size=8, person=b"clairai-sample")
    return int.from_bytes(digest.digest(), "little") < share * 2**64


def steering_json(plan: SteeringPlan | None) -> str:
    """What is stored of a request's steering: a JSON object."""
    if plan is None:
        return "{}"
    said = json.dumps({"applied": describe_plan(plan)}, separators=(",", ":"))
    if len(said.encode()) <= MAX_STEERING_NBYTES:
        return said
    # Too long to be stored with every request: what it was can still be told from another.
    digest = hashlib.sha256(COURSE_ENCODER.encode(plan)).hexdigest()
    return json.dumps({"actions": len(plan.actions), "digest": digest})


def _merge_tags(tags: str, others: str) -> str:
    """The request's own tags count where both have one."""
    if tags == "{}":
        return others
    joined: dict[str, Any] = {**json.loads(tags), **json.loads(others)}
    return parse_tags(joined, what="capture.tags, with those of the engine's setting")


def _keep_threshold(setting: CaptureSettings, engine: EngineShape) -> KeepThreshold | None:
    rule = setting.when
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
