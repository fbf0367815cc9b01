"""The engine's `capture` setting: what is captured, how much, and where it goes.

It comes from the settings, or from VLLM_ACT_* environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from clairai.errors import ConfigError, RequestError, UnsupportedError, printable, quote
from clairai.fields import json_fields
from clairai.fields.capture import (
    MAX_CONSUMERS,
    EncoderSpec,
    parse_consumer_names,
    parse_encoder,
    parse_points,
    parse_tags,
)
from clairai.fields.positions import ALL_POSITIONS, Positions, parse_positions
from clairai.store.core_folders import core_folder

_KNOWN: Final = (
    *("folder", "consumers", "points", "positions", "encoder", "to", "tags", "sample", "when"),
    *("staging_mib", "pending_mib", "process"),
)
PROCESSES: Final = ("own", "engine")
# Kinds of consumers that each of several engine cores has one of, and the options that name places:
# every core has its own below them.
_PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    "fs": ("folder",),
    "npz": ("folder",),
    "fsspec": ("folder", "url"),
    "callback": (),
}
ALL_POINTS: Final = ("all",)
RAW: Final = EncoderSpec("raw")


@dataclass(frozen=True)
class KeepWhen:
    """Rows of a request are held until the probe scores a token at or above the threshold."""

    probe: str
    above: float | None = None  # None: the probe's own threshold


@dataclass(frozen=True)
class ConsumerSpec:
    """A consumer to open: its kind is the name of an entry point, which defines the options."""

    name: str
    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class CaptureSettings:
    """Defaults for every request of an engine, and its bounds."""

    consumers: tuple[ConsumerSpec, ...]
    points: tuple[str, ...] = ALL_POINTS
    positions: Positions = ALL_POSITIONS
    encoder: EncoderSpec = RAW
    to: tuple[str, ...] = ()  # by default all consumers
    tags: str = "{}"
    sample: float = 0.0  # share of requests that are captured without asking for it
    when: KeepWhen | None = None  # keep only those of them
    staging_mib: int = 256  # for rows on their way from the device to the consumers
    pending_mib: int = 256  # for rows that are held by `when`
    process: str | None = None  # in which the consumers run: one of PROCESSES

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that its consumers write to, as far as their options name them."""
        given = (consumer.options.get("folder") for consumer in self.consumers)
        return tuple(folder for folder in given if isinstance(folder, str) and folder)

    def check_for_cores(self) -> None:
        """UnsupportedError for a consumer that several engine cores cannot each have one of."""
        unknown = next((one for one in self.consumers if one.kind not in _PLACES), None)
        if unknown is not None:
            raise UnsupportedError(
                f"capture consumer {quote(unknown.name)} of kind {quote(unknown.kind)} does not go "
                f"with data parallelism: every engine core would open one with the same options; "
                f"use {', '.join(_PLACES)}, or run one server for each engine core"
            )

    def for_core(self, core: int | None) -> CaptureSettings:
        """The settings of one of several engine cores, which has folders and a writer of its own.

        `core` is its number; None for an engine with one.
        """
        if core is None:
            return self
        self.check_for_cores()
        return replace(self, consumers=tuple(_for_core(one, core) for one in self.consumers))

    @classmethod
    def parse(cls, given: object) -> CaptureSettings:
        """ConfigError for a value that is wrong."""
        try:
            return _parse(json_fields.read_object("capture", given, _KNOWN))
        except RequestError as error:
            raise ConfigError(error.reason) from None


def _for_core(consumer: ConsumerSpec, core: int) -> ConsumerSpec:
    options = {
        name: core_folder(value, core)
        if name in _PLACES[consumer.kind] and isinstance(value, str)
        else value
        for name, value in consumer.options.items()
    }
    return replace(consumer, options=MappingProxyType(options))


def _parse(fields: Mapping[str, Any]) -> CaptureSettings:
    consumers = _parse_consumers(fields)
    names = tuple(consumer.name for consumer in consumers)
    to = parse_consumer_names(fields.get("to", names), what="capture.to")
    unknown = next((name for name in to if name not in names), None)
    if unknown is not None:
        raise ConfigError(
            f"capture.to: no consumer is named {quote(unknown)}; {printable(', '.join(names))}"
        )
    when = fields.get("when")
    return CaptureSettings(
        consumers=consumers,
        points=parse_points(fields.get("points", ALL_POINTS), what="capture.points"),
        positions=parse_positions(fields.get("positions", ALL_POSITIONS), what="capture.positions"),
        encoder=parse_encoder(fields.get("encoder", "raw"), what="capture.encoder"),
        to=to,
        tags=parse_tags(fields.get("tags", {}), what="capture.tags"),
        sample=_parse_share("capture.sample", fields.get("sample", 0.0 if when is None else 1.0)),
        when=None if when is None else _parse_when(when),
        staging_mib=_parse_mib(fields, "staging_mib"),
        pending_mib=_parse_mib(fields, "pending_mib"),
        process=_parse_process(fields.get("process")),
    )


def _parse_consumers(fields: Mapping[str, Any]) -> tuple[ConsumerSpec, ...]:
    if ("folder" in fields) == ("consumers" in fields):
        raise ConfigError(
            'capture needs "folder": "path", or "consumers": {name: options}; give one of the two'
        )
    if "folder" in fields:
        given: object = {"fs": {"folder": fields["folder"]}}
    else:
        given = fields["consumers"]
    if not isinstance(given, Mapping) or not 1 <= len(given) <= MAX_CONSUMERS:
        raise ConfigError(
            f"capture.consumers must be an object with 1 to {MAX_CONSUMERS} names and their "
            f"options, got {quote(given)}"
        )
    return tuple(_parse_consumer(name, options) for name, options in given.items())


def _parse_consumer(given: object, options: object) -> ConsumerSpec:
    name = json_fields.read_string("capture.consumers: a name", given)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"capture.consumers[{quote(name)}] must be an object of options, got {quote(options)}"
        )
    kind = json_fields.read_string(
        f"capture.consumers[{quote(name)}].kind", options.get("kind", name)
    )
    rest = {key: value for key, value in options.items() if key != "kind"}
    return ConsumerSpec(name, kind, MappingProxyType(rest))


def _parse_when(given: object) -> KeepWhen:
    fields = json_fields.read_object("capture.when", given, ("probe", "above"))
    return KeepWhen(
        probe=json_fields.read_string("capture.when.probe", fields.get("probe")),
        above=json_fields.read_optional_number("capture.when.above", fields.get("above")),
    )


def _parse_process(given: object) -> str | None:
    if given is not None and given not in PROCESSES:
        raise ConfigError(
            f"capture.process must be one of {', '.join(PROCESSES)}, or left out, got "
            f"{quote(given)}"
        )
    return None if given is None else str(given)


def _parse_share(what: str, given: object) -> float:
    share = json_fields.read_number(what, given)
    if not 0 <= share <= 1:
        raise ConfigError(f"{what} must be a number of 0 to 1, got {quote(given)}")
    return share


def _parse_mib(fields: Mapping[str, Any], name: str) -> int:
    return json_fields.read_integer(f"capture.{name}", fields.get(name, 256), low=1, high=1 << 20)


# VLLM_ACT_* capture every request at every point, into an .npz for each sequence and layer. The
# residual stream is whole on every rank, so `sharded` and `gathered` both give each row once.
CAPTURE: Final = "VLLM_ACT_CAPTURE"
MODE: Final = "VLLM_ACT_MODE"
RP_K: Final = "VLLM_ACT_RP_K"
RETURN: Final = "VLLM_ACT_RETURN"
OUTDIR: Final = "VLLM_ACT_OUTDIR"
MODES: Final = ("rp8", "full8", "topk8")
RETURNS: Final = ("sharded", "gathered")
DEFAULTS: Final[Mapping[str, str]] = {
    MODE: "rp8",
    RP_K: "512",
    RETURN: "sharded",
    OUTDIR: "/tmp/vllm_activations",  # noqa: S108  # the store makes it private, or refuses it
}
EVERY_LAYER: Final = ("post_block.*",)
SEAL_AFTER_S: Final = 3600.0  # in effect when a sequence ends


def settings_from_environment(
    environ: Mapping[str, str], *, has_points: bool
) -> dict[str, Any] | None:
    """The `capture` setting that they stand for; None unless VLLM_ACT_CAPTURE is 1."""
    if _read_choice(environ, CAPTURE, ("0", "1"), default="0") == "0":
        return None
    _read_choice(environ, RETURN, RETURNS, default=DEFAULTS[RETURN])
    mode = _read_choice(environ, MODE, MODES, default=DEFAULTS[MODE])
    encoder: dict[str, Any] = {"name": mode}
    if mode == "rp8":
        encoder["k"] = _parse_dimensions(environ)
    folder = environ.get(OUTDIR) or DEFAULTS[OUTDIR]
    return {
        "consumers": {"npz": {"folder": folder, "seal_after_s": SEAL_AFTER_S}},
        "points": ["all"] if has_points else list(EVERY_LAYER),
        "encoder": encoder,
        "sample": 1.0,
    }


def _read_choice(
    environ: Mapping[str, str], name: str, known: tuple[str, ...], *, default: str
) -> str:
    value = environ.get(name) or default
    if value not in known:
        raise ConfigError(f"{name} is {quote(value)}; set it to one of {', '.join(known)}")
    return value


def _parse_dimensions(environ: Mapping[str, str]) -> int:
    value = environ.get(RP_K) or DEFAULTS[RP_K]
    if not value.isascii() or not value.isdecimal() or len(value) > 9:
        raise ConfigError(f"{RP_K} is {quote(value)}; set it to a whole number, such as 512")
    return int(value)
