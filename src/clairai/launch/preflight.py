"""Checks a model and its settings before vLLM is started, which would find errors much later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.errors import ConfigError, quote
from clairai.points import MAX_LAYER
from clairai.probe.bank import EngineBank
from clairai.settings import Settings, resolve_settings

_CONFIGS: Final = ("config.json", "params.json")  # Hugging Face's, Mistral's
# vLLM options that can make the model differ from its folder's config.
_OVERRIDES: Final = ("--hf-overrides", "--hf-config-path", "--config-format", "--revision")


class ModelSize(NamedTuple):
    """What must fit probes and vectors."""

    num_layers: int
    width: int


def check_before_start(
    model: str, settings: Settings, arguments: Sequence[str], environ: Mapping[str, str]
) -> None:
    """Raise ConfigError, PointError, ProbeError or VectorError for what is wrong already now."""
    is_overridden = any(map(_is_override, arguments))
    size = None if is_overridden else model_size(model)
    resolved = resolve_settings(
        settings, num_layers=size.num_layers if size else MAX_LAYER + 1, environ=environ
    )
    if size is not None:
        # Only the engine can tell whether a probe's point is another name of a tapped one.
        points = tuple(
            dict.fromkeys((*resolved.points, *(probe.point for probe in resolved.probes)))
        )
        bank = EngineBank.empty(points, settings.capacity, size.width, model)
        bank.add(replace(probe, model=None) for probe in resolved.probes)
        limits = SteeringLimits(settings.steer_rows, settings.steer_programs)
        registry = SteeringRegistry(points, size.width, limits)
        registry.put([replace(vector, model=None) for vector in resolved.vectors], "add")
    if not is_overridden:
        check_model(model, environ)


def check_model(model: str, environ: Mapping[str, str]) -> None:
    """ConfigError if there is no such model here and it cannot be downloaded."""
    folder = Path(model)
    if folder.is_file() or "://" in model:
        return  # a GGUF file, or an object store
    if folder.is_dir():
        if not any((folder / name).is_file() for name in _CONFIGS):
            raise ConfigError(f"{quote(model)} has no {_CONFIGS[0]}; give a model's folder")
        return
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigError(f"there is no folder {quote(model)}; check the path of the model")
    is_offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if is_offline and not _is_cached(model):
        raise ConfigError(
            f"{quote(model)} is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to fetch "
            f"it; unset it, or give a folder"
        )


def model_size(model: str) -> ModelSize | None:
    """From the folder's config; None if there is none, or it does not say."""
    file = Path(model) / _CONFIGS[0]
    try:
        read: Any = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    found = read.get("text_config", read) if isinstance(read, dict) else {}
    num_layers, width = found.get("num_hidden_layers"), found.get("hidden_size")
    if not isinstance(num_layers, int) or not isinstance(width, int):
        return None
    return ModelSize(num_layers, width)


def _is_cached(model: str) -> bool:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return True  # vLLM will say
    try:
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in _CONFIGS)
    except ValueError:  # not a possible name of a model
        return False


def _is_override(argument: str) -> bool:
    # vLLM's parser takes _ for -, --name=value, --name.key=value, and abbreviations.
    name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
    return len(name) > len("--x") and any(override.startswith(name) for override in _OVERRIDES)
