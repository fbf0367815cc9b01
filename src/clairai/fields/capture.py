"""The `capture` field of a request: what it asks to be captured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from clairai.errors import ConfigError, RequestError, StoreError, quote
from clairai.fields import json_fields
from clairai.fields.positions import Positions, parse_positions, positions_to_json
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import ENCODERS, named
from clairai.store.row_block import RequestNote

MAX_POINTS: Final = 512  # names or patterns
MAX_CONSUMERS: Final = 8
_KNOWN: Final = ("points", "positions", "encoder", "to", "tags")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder and the parameters that were given; `raw` defaults to the model's dtype."""

    name: str = "raw"
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **self.parameters}

    def for_rows(self, dtype: str) -> Encoder:
        """The encoder for an engine whose rows have this dtype."""
        defaults = {"dtype": dtype} if self.name == "raw" else {}
        return named(self.name, defaults | dict(self.parameters))


@dataclass(frozen=True)
class CaptureSpec:
    """What one request asks to be captured; None means the engine's default."""

    is_wanted: bool = True
    points: tuple[str, ...] | None = None  # names or patterns; ("all",) for all tapped points
    positions: Positions | None = None
    encoder: EncoderSpec | None = None
    to: tuple[str, ...] | None = None  # names of the engine's consumers
    tags: str = "{}"  # a JSON object

    def to_json(self) -> bool | dict[str, Any]:
        """The JSON from which `parse_capture` makes an equal spec."""
        optional = {
            "points": None if self.points is None else list(self.points),
            "positions": None if self.positions is None else positions_to_json(self.positions),
            "encoder": None if self.encoder is None else self.encoder.to_json(),
            "to": None if self.to is None else list(self.to),
            "tags": json.loads(self.tags) or None,
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return given if given else self.is_wanted


def parse_capture(given: object, *, what: str = "capture") -> CaptureSpec | None:
    """None if the field is not there; RequestError if it is wrong.

    `true` captures with the engine's defaults. `false` captures nothing, even where the engine's
    setting captures every request.
    """
    if given is None or isinstance(given, bool):
        return None if given is None else CaptureSpec(is_wanted=given)
    fields = json_fields.read_object(what, given, _KNOWN)
    points, positions = fields.get("points"), fields.get("positions")
    encoder, to = fields.get("encoder"), fields.get("to")
    return CaptureSpec(
        points=None if points is None else parse_points(points, what=f"{what}.points"),
        positions=(
            None if positions is None else parse_positions(positions, what=f"{what}.positions")
        ),
        encoder=None if encoder is None else parse_encoder(encoder, what=f"{what}.encoder"),
        to=None if to is None else parse_consumer_names(to, what=f"{what}.to"),
        tags=parse_tags(fields.get("tags", {}), what=f"{what}.tags"),
    )


def parse_points(given: object, *, what: str) -> tuple[str, ...]:
    """Names and patterns; the engine core expands them."""
    listed = json_fields.read_list(
        what, [given] if isinstance(given, str) else given, limit=MAX_POINTS
    )
    if not listed:
        raise RequestError(f"{what} is empty; leave it out for all tapped points")
    return tuple(json_fields.read_string(f"{what}[{i}]", name) for i, name in enumerate(listed))


def parse_encoder(given: object, *, what: str) -> EncoderSpec:
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{what} must be the name of an encoder ({', '.join(ENCODERS)}), or an object with "
            f"name and parameters, got {quote(given)}"
        )
    parameters = {key: value for key, value in given.items() if key != "name"}
    try:
        encoder = named(given.get("name"), parameters)
    except ConfigError as error:
        raise RequestError(f"{what}: {error.reason}") from None
    kept = parameters if encoder.name == "raw" else encoder.parameters
    return EncoderSpec(encoder.name, MappingProxyType(dict(kept)))


def parse_consumer_names(given: object, *, what: str) -> tuple[str, ...]:
    listed = json_fields.read_list(
        what, [given] if isinstance(given, str) else given, limit=MAX_CONSUMERS
    )
    names = tuple(json_fields.read_string(f"{what}[{i}]", name) for i, name in enumerate(listed))
    if not names or len(set(names)) != len(names):
        raise RequestError(f"{what} must name each consumer once, and at least one")
    return names


def parse_tags(given: object, *, what: str) -> str:
    if not isinstance(given, Mapping):
        raise RequestError(f"{what} must be an object, got {quote(given)}")
    try:
        return RequestNote.of(given).tags
    except StoreError as error:
        raise RequestError(f"{what}: {error.reason}") from None
