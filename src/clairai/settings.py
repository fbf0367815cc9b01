"""The settings of an engine: the `clairai` key of vLLM's additional_config, and the environment.

Everything an engine reads from the environment is read here, except the folder of its sockets
(local/private_socket.py). Runs in: the worker and the engine core; `clairai serve` checks with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from clairai.capture.capture_settings import ALL_POINTS, CaptureSettings, settings_from_environment
from clairai.errors import ConfigError, quote
from clairai.points import Point, expand
from clairai.probe.files import load_many
from clairai.probe.model import Probe
from clairai.vector.files import load_many as load_vectors
from clairai.vector.model import Vector

DISABLE_VARIABLE = "CLAIRAI_DISABLE"
RING_HOMES: Final = ("host", "device")
_MAX_LISTED: Final = 4  # points by name, in the line that says what is served


@dataclass(frozen=True)
class SpoolSettings:
    """How many scores are kept for `clairai.scores`; the field names are the keys of `scores`."""

    memory_mib: int = 256  # rows on their way to disk
    disk_gib: int = 64  # then the oldest rows are dropped
    folder: str | None = None  # of files without a name; None: TMPDIR, or /var/tmp

    def __post_init__(self) -> None:
        _check_range("scores memory_mib", self.memory_mib, 1, 65536)
        _check_range("scores disk_gib", self.disk_gib, 1, 65536)
        if self.folder is not None and not isinstance(self.folder, str):
            raise ConfigError("scores folder must be a path, as text")

    @classmethod
    def parse(cls, given: object) -> SpoolSettings | None:
        """None if no scores are kept."""
        if given is None or given is False:
            return None
        found: object = {} if given is True else given
        if not isinstance(found, Mapping):
            raise ConfigError(f"scores must be true, false or an object, got {quote(given)}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(quote, set(found) - set(known))):
            raise ConfigError(f"unknown key {unknown[0]} of scores; known: {', '.join(known)}")
        return cls(**found)


@dataclass(frozen=True)
class Settings:
    """What an engine is asked to do. The field names are the keys of the JSON object."""

    points: tuple[str, ...] = ()  # "post_block.15", "pre_attn.0-3", "post_block.*", "all"
    probes: tuple[str, ...] = ()  # files, folders or globs
    vectors: tuple[str, ...] = ()  # to steer with: files, folders or globs
    steering: bool = False  # requests can be steered at the points; vectors imply it
    steer_rows: int = 1024  # vectors and gates that unfinished requests may use at once
    steer_programs: int = 1024  # programs that they may use at once
    capture: Mapping[str, Any] | None = None  # docs/capture.md
    capacity: int = 16  # most probes per site
    ring_mib: int | None = None  # None: 64, or room for three of the engine's largest steps
    ring_home: str = "host"  # or "device": in GPU memory, for readers with CUDA
    fused: bool = True  # on a GPU, replace tapped norms by a kernel that also taps and steers
    # Keep scores for `clairai.scores`: true, false or an object; None: for LLM and AsyncLLM only.
    scores: bool | Mapping[str, Any] | None = None
    runtime_dir: str | None = None
    allow_untested_vllm: bool = False

    def __post_init__(self) -> None:
        _check_range("capacity", self.capacity, 1, 1024)
        if self.ring_mib is not None:
            _check_range("ring_mib", self.ring_mib, 1, 65536)
        _check_range("steer_rows", self.steer_rows, 1, 65536)
        _check_range("steer_programs", self.steer_programs, 1, 65536)
        if self.ring_home not in RING_HOMES:
            raise ConfigError(
                f"ring_home is {quote(self.ring_home)}; use one of {', '.join(RING_HOMES)}"
            )
        for name in ("points", "probes", "vectors"):
            object.__setattr__(self, name, _check_texts(name, getattr(self, name)))
        for name in ("fused", "steering", "allow_untested_vllm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false")
        SpoolSettings.parse(self.scores)
        assert self.capture_settings is None or self.capture_settings.consumers  # raises early
        if self.runtime_dir is not None and not isinstance(self.runtime_dir, str):
            raise ConfigError("runtime_dir must be a path, as text")

    @cached_property
    def capture_settings(self) -> CaptureSettings | None:
        """None if the engine captures nothing, whatever a request asks for."""
        return None if self.capture is None else CaptureSettings.parse(self.capture)

    @cached_property
    def spool_settings(self) -> SpoolSettings | None:
        """None if scores are in the ring alone."""
        return SpoolSettings.parse(self.scores)

    @property
    def is_steering(self) -> bool:
        return self.steering or bool(self.vectors)

    @classmethod
    def parse(cls, given: object) -> Settings:
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"additional_config['clairai'] must be an object, got {type(given).__name__}; "
                f"clairai.config(points=[...]) makes one"
            )
        known = [field.name for field in fields(cls)]
        unknown = sorted(map(quote, set(given) - set(known)))
        if unknown:
            raise ConfigError(f"unknown clairai setting {unknown[0]}; known: {', '.join(known)}")
        return cls(**given)

    @classmethod
    def read(cls, given: object, environ: Mapping[str, str]) -> Settings:
        """Settings of an engine; environment variables fill in what they leave out."""
        settings = cls.parse(given)
        has_points = bool(settings.points or settings.probes or settings.vectors)
        from_environment = settings_from_environment(environ, has_points=has_points)
        if from_environment is None or settings.capture is not None:
            return settings
        return replace(settings, capture=from_environment)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, without what equals the defaults."""
        defaults = asdict(Settings())
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
            if value != defaults[key]
        }


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings with their files loaded and their points expanded for one model."""

    settings: Settings
    points: tuple[Point, ...]
    probes: tuple[Probe, ...]
    vectors: tuple[Vector, ...] = ()

    def describe(self, model: str, folder: Path, ring_nbytes: int) -> str:
        """What is served, in one line: readers find the ring in `folder`."""
        settings, points = self.settings, [str(point) for point in self.points]
        if len(points) > _MAX_LISTED:
            points = [f"{points[0]} to {points[-1]} ({len(points)} points)"]
        abilities = [f"{len(self.probes)} probes"]
        abilities += [f"steering with {len(self.vectors)} vectors"] if settings.is_steering else []
        abilities += ["captures"] if settings.capture_settings is not None else []
        ring = f"a ring of {round(ring_nbytes / 2**20)} MiB in {settings.ring_home} memory"
        return (
            f"clairai taps {model} at {', '.join(points)}: {', '.join(abilities)}; {ring}, "
            f"readers attach in {folder}"
        )


def resolve_settings(
    settings: Settings, *, num_layers: int, environ: Mapping[str, str]
) -> ResolvedSettings:
    """Load and expand; environment variables fill in what the settings leave out."""
    target_layer = _target_layer(environ)
    probes = (
        [one for source in settings.probes for one in load_many(source, target_layer=target_layer)]
        if settings.probes
        else _load_probes_of_model(environ, target_layer)
    )
    vectors = [vector for source in settings.vectors for vector in load_vectors(source)]
    patterns = list(settings.points) or [str(probe.point) for probe in probes]
    if not settings.points:
        patterns += [str(point) for vector in vectors for point in vector.points]
        patterns += _list_capture_points(settings)
    if not patterns and target_layer is not None:
        patterns = [f"post_block.{target_layer}"]
    if not patterns:
        raise ConfigError(
            'nothing to tap: give "points" (such as ["post_block.15"]), "probes" or "vectors" in '
            "the clairai settings, or set TARGET_LAYER"
        )
    return ResolvedSettings(settings, expand(patterns, num_layers), tuple(probes), tuple(vectors))


def _list_capture_points(settings: Settings) -> tuple[str, ...]:
    """Points that captures name; `all` means those that are tapped anyway."""
    capture = settings.capture_settings
    return () if capture is None or capture.points == ALL_POINTS else capture.points


def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
    value = (os.environ if environ is None else environ).get(DISABLE_VARIABLE, "0")
    return value not in ("", "0")


def _target_layer(environ: Mapping[str, str]) -> int | None:
    text = environ.get("TARGET_LAYER")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"TARGET_LAYER must be a layer number, got {text!r}")
    return int(text)


def _load_probes_of_model(environ: Mapping[str, str], target_layer: int | None) -> list[Probe]:
    """The probes of PROBE_MODEL's folder; of those at several layers, the ones at TARGET_LAYER."""
    model = environ.get("PROBE_MODEL")
    if not model:
        return []
    folder = _find_probe_folder(model)
    probes = load_many(folder, target_layer=target_layer)
    chosen = [probe for probe in probes if target_layer in (None, probe.point.layer)]
    if probes and not chosen:
        layers = ", ".join(map(str, sorted({probe.point.layer for probe in probes})))
        raise ConfigError(
            f"TARGET_LAYER is {target_layer}, but the probes in {folder} are at layer {layers}; "
            f"set it to one of these, or unset it to use all"
        )
    return chosen


def _find_probe_folder(model: str) -> Path:
    """`probes/{MODEL_NAME}`, below the working folder or its src/, in any case of letters.

    The name may have the first word of its vendor's, or lack it: the probes of
    meta-llama/Meta-Llama-3.1-8B may be in probes/Llama-3.1-8B.
    """
    vendor, _, name = model.rstrip("/").rpartition("/")
    word = vendor.rsplit("/", 1)[-1].partition("-")[0].lower()
    names = [name.lower(), name.lower().removeprefix(f"{word}-"), f"{word}-{name.lower()}"]
    roots = [Path(root) / "probes" for root in (".", "src")]
    found = {
        (root, folder.name.lower()): folder
        for root in roots
        if root.is_dir()
        for folder in sorted(root.iterdir())
        if folder.is_dir()
    }
    for key in ((root, name) for root in roots for name in names):
        if key in found:
            return found[key]
    folders = [root / name for root in roots]
    raise ConfigError(
        f"PROBE_MODEL is {model!r}, but there is no folder {folders[0]} or {folders[1]}; "
        f"make one, or unset PROBE_MODEL"
    )


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {quote(value)}")


def _check_texts(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{name} must be a text or a list of texts, got {quote(value)}")
    return tuple(items)
