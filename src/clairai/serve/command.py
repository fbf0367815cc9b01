"""Takes a model and what to tap; serves it, engine and proxy, until told to stop."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from clairai.errors import ConfigError
from clairai.offline import config
from clairai.points import quote
from clairai.ring.folder import runtime_dir
from clairai.serve.check import check
from clairai.serve.launch import Bind, Launch, PrivateSocket
from clairai.serve.log import EngineLog
from clairai.serve.proxy import Outside
from clairai.serve.service import run_service
from clairai.serve.supervise import OnDeath
from clairai.serve.voice import Voice
from clairai.settings import Settings

BESIDE: Final = "-"  # vLLM's log goes where ours goes
_NAMED: Final = "--served-model-name"
QUIET: Final = "--disable-uvicorn-access-log"  # the proxy's own says more


def serve(
    model: str,
    outside: Outside,
    voice: Voice,
    *,
    points: Sequence[str],
    probes: Sequence[str],
    vectors: Sequence[str],
    steering: bool,
    capture: str | None,
    arguments: Sequence[str],
    on_death: OnDeath,
    vllm_log: str | None,
) -> None:
    """The command `clairai serve`."""
    folder = runtime_dir()
    tapped = config(
        points=points,
        probes=probes,
        vectors=vectors,
        steering=steering,
        capture=None if capture is None else capture_setting(capture),
        runtime_dir=str(folder),
    )
    check(model, Settings.read(tapped["clairai"], os.environ), arguments, os.environ)
    log = _log(vllm_log, folder, outside.bind)
    private = PrivateSocket.within(folder)
    launch = Launch(model, tapped, private, (*_name(model, arguments), QUIET, *arguments))
    run_service(
        launch,
        outside.settings(private.url, folder),
        outside,
        voice,
        log=log,
        on_death=on_death,
        banner=lambda: banner(_shown(model), outside.bind),
    )


def capture_setting(text: str) -> dict[str, Any]:
    """A folder, or all of the `capture` setting as JSON."""
    if not text.lstrip().startswith("{"):
        return {"folder": text}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--capture is {quote(text)}; give a folder, or a JSON object")
    return found


def banner(what: str, bind: Bind) -> list[str]:
    """Where it is, and what one can do there."""
    key = "" if bind.api_key is None else "; both ask for the key"
    return [
        f"{what} is served on {bind.url}",
        f"dashboard in a browser, OpenAI's API under /v1{key}; "
        f"scores in a terminal: clairai sidecar; Ctrl-C stops everything",
    ]


def _log(chosen: str | None, folder: Path, bind: Bind) -> EngineLog | None:
    if chosen == BESIDE:
        return None
    path = Path(chosen) if chosen else folder / f"vllm-{bind.port}.log"
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"{quote(str(path))} cannot be a log file; check --vllm-log")
    return EngineLog(path)


def _name(model: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A folder is served under its own name: its whole path is nobody's business."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    is_named = any(len(name) > len("--se") and _NAMED.startswith(name) for name in names)
    return () if is_named or not Path(model).exists() else (_NAMED, _shown(model))


def _shown(model: str) -> str:
    return Path(model).absolute().name if Path(model).exists() else model
