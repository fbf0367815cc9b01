"""Takes the engine's `capture` setting; gives it checked: what is captured, how much, where to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from clairai.capture.positions import EVERYWHERE, Positions, parse_positions
from clairai.capture.spec import (
    MAX_CONSUMERS,
    EncoderSpec,
    parse_encoder,
    parse_names,
    parse_points,
    parse_tags,
)
from clairai.errors import ConfigError, RequestError
from clairai.points import quote
from clairai.steer import fields

_KNOWN: Final = (
    *("folder", "consumers", "points", "positions", "encoder", "to", "tags", "sample", "when"),
    *("staging_mib", "pending_mib", "process"),
)
PROCESSES: Final = ("own", "engine")
ALL: Final = ("all",)
RAW: Final = EncoderSpec("raw")


@dataclass(frozen=True)
class Rule:
    """Rows of a request are held until the probe's score is at or above the threshold once."""

    probe: str
    above: float | None = None  # None: the probe's own threshold


@dataclass(frozen=True)
class ConsumerSpec:
    """One place where rows go: its kind is an entry point, its options are the kind's own."""

    name: str
    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """Defaults of every capture of an engine, and its bounds."""

    consumers: tuple[ConsumerSpec, ...]
    points: tuple[str, ...] = ALL
    positions: Positions = EVERYWHERE
    encoder: EncoderSpec = RAW
    to: tuple[str, ...] = ()  # all consumers, if it was left out
    tags: str = "{}"
    sample: float = 0.0  # share of requests that are captured without asking
    when: Rule | None = None  # of those, only the ones with such a score
    staging_mib: int = 256  # of rows on their way from the device to the consumers
    pending_mib: int = 256  # of rows that wait for a rule
    process: str | None = None  # that takes rows to the consumers: one of PROCESSES

    @classmethod
    def parse(cls, given: object) -> Setting:
        """ConfigError says what is wrong, its bound and the way out."""
        try:
            return _parsed(fields.fields("capture", given, _KNOWN))
        except RequestError as error:
            raise ConfigError(error.reason) from None


def _parsed(asked: Mapping[str, Any]) -> Setting:
    consumers = _consumers(asked)
    names = tuple(consumer.name for consumer in consumers)
    to = parse_names(asked.get("to", names), what="capture.to")
    unknown = next((name for name in to if name not in names), None)
    if unknown is not None:
        raise ConfigError(f"capture.to: no consumer is named {quote(unknown)}; {', '.join(names)}")
    when = asked.get("when")
    return Setting(
        consumers=consumers,
        points=parse_points(asked.get("points", ALL), what="capture.points"),
        positions=parse_positions(asked.get("positions", EVERYWHERE), what="capture.positions"),
        encoder=parse_encoder(asked.get("encoder", "raw"), what="capture.encoder"),
        to=to,
        tags=parse_tags(asked.get("tags", {}), what="capture.tags"),
        sample=_share("capture.sample", asked.get("sample", 0.0 if when is None else 1.0)),
        when=None if when is None else _rule(when),
        staging_mib=_mib(asked, "staging_mib"),
        pending_mib=_mib(asked, "pending_mib"),
        process=_process(asked.get("process")),
    )


def _consumers(asked: Mapping[str, Any]) -> tuple[ConsumerSpec, ...]:
    if ("folder" in asked) == ("consumers" in asked):
        raise ConfigError(
            'capture needs "folder": "path", or "consumers": {name: options}; give one of the two'
        )
    if "folder" in asked:
        given: object = {"fs": {"folder": asked["folder"]}}
    else:
        given = asked["consumers"]
    if not isinstance(given, Mapping) or not 1 <= len(given) <= MAX_CONSUMERS:
        raise ConfigError(
            f"capture.consumers must be an object with 1 to {MAX_CONSUMERS} names and their "
            f"options, got {quote(given)}"
        )
    return tuple(_consumer(name, options) for name, options in given.items())


def _consumer(name: object, options: object) -> ConsumerSpec:
    called = fields.text("capture.consumers: a name", name)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"capture.consumers[{quote(called)}] must be an object of options, got {quote(options)}"
        )
    kind = fields.text(f"capture.consumers[{quote(called)}].kind", options.get("kind", called))
    rest = {key: value for key, value in options.items() if key != "kind"}
    return ConsumerSpec(called, kind, MappingProxyType(rest))


def _rule(given: object) -> Rule:
    asked = fields.fields("capture.when", given, ("probe", "above"))
    return Rule(
        probe=fields.text("capture.when.probe", asked.get("probe")),
        above=fields.optional_number("capture.when.above", asked.get("above")),
    )


def _process(given: object) -> str | None:
    if given is not None and given not in PROCESSES:
        raise ConfigError(
            f"capture.process must be one of {', '.join(PROCESSES)}, or left out, got "
            f"{quote(given)}"
        )
    return None if given is None else str(given)


def _share(what: str, given: object) -> float:
    share = fields.number(what, given)
    if not 0 <= share <= 1:
        raise ConfigError(f"{what} must be a number of 0 to 1, got {quote(given)}")
    return share


def _mib(asked: Mapping[str, Any], name: str) -> int:
    return fields.whole(f"capture.{name}", asked.get(name, 256), low=1, high=1 << 20)
