"""Builds the engine configuration that turns clairai on.

Runs in: the user's process. Imports no vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from clairai.settings import Settings, is_disabled


def config(
    *,
    points: Sequence[str] | str = (),
    probes: Sequence[str | Path] | str | Path = (),
    vectors: Sequence[str | Path] | str | Path = (),
    steering: bool = False,
    steer_rows: int = 1024,
    steer_programs: int = 1024,
    capture: Mapping[str, Any] | None = None,
    capacity: int = 16,
    ring_mib: int | None = None,
    ring_home: Literal["host", "device"] = "host",
    fused: bool = True,
    scores: bool | Mapping[str, Any] | None = None,
    runtime_dir: str | None = None,
    allow_untested_vllm: bool = False,
) -> dict[str, Any]:
    """The `additional_config` for vLLM's LLM: what to tap, which probes to load, how to steer.

    `points` may be left out if `probes` and `vectors` name theirs. Paths become absolute, because
    the engine may run in another folder. `vectors`, or `steering` alone, allow steering at the
    points. `capture` stores rows in a folder: docs/capture.md. `scores` says how many scores are
    kept for `clairai.scores`: docs/offline-scores.md.
    """
    settings = Settings(
        points=points,  # type: ignore[arg-type]  # Settings takes one string too
        probes=_absolute(probes),
        vectors=_absolute(vectors),
        steering=steering,
        steer_rows=steer_rows,
        steer_programs=steer_programs,
        capture=None if capture is None else _with_absolute_folders(capture),
        capacity=capacity,
        ring_mib=ring_mib,
        ring_home=ring_home,
        fused=fused,
        scores=_with_absolute_folders(scores) if isinstance(scores, Mapping) else scores,
        runtime_dir=runtime_dir,
        allow_untested_vllm=allow_untested_vllm,
    )
    _install_late()
    return {"clairai": settings.as_dict()}


def _absolute(given: Sequence[str | Path] | str | Path) -> tuple[str, ...]:
    sources = [given] if isinstance(given, str | Path) else given
    return tuple(str(Path(source).absolute()) for source in sources)


def _with_absolute_folders(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the folders absolute; anything else wrong is refused when the settings are read."""
    found = dict(given)
    if isinstance(found.get("folder"), str | Path):
        found["folder"] = str(Path(found["folder"]).absolute())
    consumers = found.get("consumers")
    if isinstance(consumers, Mapping):
        found["consumers"] = {
            name: _with_absolute_folders(options) if isinstance(options, Mapping) else options
            for name, options in consumers.items()
        }
    return found


def _install_late() -> None:
    """Install the hooks if vLLM has loaded its plugins already: it loads them once a process."""
    plugins = sys.modules.get("vllm.plugins")
    if plugins is None or not getattr(plugins, "plugins_loaded", False):
        return
    if not is_disabled():
        from clairai.compat.install import install_hooks

        install_hooks()
