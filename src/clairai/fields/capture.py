"""Takes the `capture` field of a request; gives what it asks for, checked, and its JSON again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from clairai.errors import ConfigError, RequestError, StoreError
from clairai.fields import json_fields
from clairai.fields import positions as places
from clairai.fields.positions import Positions
from clairai.points import quote
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import ENCODERS, named
from clairai.store.row_block import RequestNote

MAX_POINTS: Final = 512  # names or patterns
MAX_CONSUMERS: Final = 8
_KNOWN: Final = ("points", "positions", "encoder", "to", "tags")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder as it was asked for; `raw` takes the model's own dtype where none is given."""

    name: str = "raw"
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def written(self) -> dict[str, Any]:
        return {"name": self.name, **self.parameters}

    def for_rows(self, dtype: str) -> Encoder:
        """The encoder of an engine whose rows have this type."""
        usual = {"dtype": dtype} if self.name == "raw" else {}
        return named(self.name, usual | dict(self.parameters))


@dataclass(frozen=True)
class CaptureSpec:
    """What one request asks to be captured; None: what the engine's setting says."""

    is_wanted: bool = True
    points: tuple[str, ...] | None = None  # names, patterns, or ("all",): all that are tapped
    positions: Positions | None = None
    encoder: EncoderSpec | None = None
    to: tuple[str, ...] | None = None  # names of the engine's consumers
    tags: str = "{}"  # a JSON object: data, never a name

    def written(self) -> bool | dict[str, Any]:
        """As JSON; what parse_wish reads as an equal wish."""
        optional = {
            "points": None if self.points is None else list(self.points),
            "positions": None
            if self.positions is None
            else places.positions_to_json(self.positions),
            "encoder": None if self.encoder is None else self.encoder.written(),
            "to": None if self.to is None else list(self.to),
            "tags": json.loads(self.tags) or None,
        }
        said = {key: value for key, value in optional.items() if value is not None}
        return said if said else self.is_wanted


def parse_capture(given: object, *, what: str = "capture") -> CaptureSpec | None:
    """None where nothing was said; RequestError if wrong.

    `true` is everything as the engine's setting has it, `false` is nothing, also where the setting
    captures every request.
    """
    if given is None or isinstance(given, bool):
        return None if given is None else CaptureSpec(is_wanted=given)
    asked = json_fields.read_object(what, given, _KNOWN)
    points, positions = asked.get("points"), asked.get("positions")
    encoder, to = asked.get("encoder"), asked.get("to")
    return CaptureSpec(
        points=None if points is None else parse_points(points, what=f"{what}.points"),
        positions=(
            None
            if positions is None
            else places.parse_positions(positions, what=f"{what}.positions")
        ),
        encoder=None if encoder is None else parse_encoder(encoder, what=f"{what}.encoder"),
        to=None if to is None else parse_consumer_names(to, what=f"{what}.to"),
        tags=parse_tags(asked.get("tags", {}), what=f"{what}.tags"),
    )


def parse_points(given: object, *, what: str) -> tuple[str, ...]:
    """Which points a pattern means is known where they are tapped."""
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
