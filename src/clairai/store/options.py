"""Takes the options of a capture consumer as settings have them; gives a writer's arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from clairai.errors import ConfigError
from clairai.points import quote
from clairai.store.draft import LAYOUTS
from clairai.store.intake import POLICIES
from clairai.store.limits import COMMITS, Limits

_MIB: Final = {
    "shard_mib": "shard_nbytes",
    "queue_mib": "queue_nbytes",
    "spill_mib": "spill_nbytes",
    "reserve_mib": "reserve_nbytes",
}
_MAX_MIB: Final = 1 << 20
_MAX_SEAL_S: Final = 3600.0
QUEUE: Final = ("policy", "spill_to", "queue_mib", "spill_mib")
WRITER: Final = (*QUEUE, "folder", "shard_mib", "reserve_mib", "seal_after_s", "commits")


def checked(kind: str, given: Mapping[str, Any], known: tuple[str, ...]) -> Mapping[str, Any]:
    """ConfigError if there are others than the known."""
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"capture consumer {kind}: unknown option {quote(unknown)}; known: {', '.join(known)}"
        )
    return given


def folder(kind: str, given: Mapping[str, Any]) -> str:
    path = given.get("folder")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f'capture consumer {kind} needs "folder": a path, as text, got {quote(path)}'
        )
    return os.path.abspath(path)


def layout(kind: str, given: Mapping[str, Any]) -> str:
    return _choice(kind, "layout", given.get("layout", LAYOUTS[0]), LAYOUTS)


def commits(kind: str, given: Mapping[str, Any]) -> str:
    return _choice(kind, "commits", given.get("commits", COMMITS[0]), COMMITS)


def policy(kind: str, given: Mapping[str, Any]) -> str:
    chosen = _choice(kind, "policy", given.get("policy", "drop"), POLICIES)
    if (chosen == "spill") != ("spill_to" in given):
        raise ConfigError(
            f'capture consumer {kind}: "policy": "spill" and "spill_to": a folder go together; '
            "give both, or none"
        )
    return chosen


def spill_to(kind: str, given: Mapping[str, Any]) -> str | None:
    path = given.get("spill_to")
    if path is not None and (not isinstance(path, str) or not path):
        raise ConfigError(f"capture consumer {kind}: spill_to must be a path, got {quote(path)}")
    return path


def limits(kind: str, given: Mapping[str, Any]) -> Limits:
    sizes = {
        field: _mib(kind, name, given[name]) << 20 for name, field in _MIB.items() if name in given
    }
    if "seal_after_s" in given:
        return Limits(**sizes, seal_after_s=_seconds(kind, given["seal_after_s"]))
    return Limits(**sizes)


def _mib(kind: str, name: str, value: object) -> int:
    low = 0 if name == "reserve_mib" else 1
    if type(value) is int and low <= value <= _MAX_MIB:
        return value
    raise ConfigError(
        f"capture consumer {kind}: {name} must be a whole number of {low} to {_MAX_MIB}, "
        f"got {quote(value)}"
    )


def _seconds(kind: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 < value <= _MAX_SEAL_S:  # type: ignore[operator]  # false for NaN too
        return float(value)  # type: ignore[arg-type]
    raise ConfigError(
        f"capture consumer {kind}: seal_after_s must be above 0 and at most {_MAX_SEAL_S:g}, "
        f"got {quote(value)}"
    )


def _choice(kind: str, name: str, value: object, known: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in known:
        return value
    raise ConfigError(
        f"capture consumer {kind}: {name} must be one of {', '.join(known)}, got {quote(value)}"
    )
