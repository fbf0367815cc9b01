"""Finds out whether the vLLM engine that is being started asks for clairai.

vLLM calls a general plugin in every process, without arguments. Wrapping vLLM's classes there to
wait for a config would wrap them in every vLLM process, used or not. So the config is read from the
call stack, where vLLM itself holds it at that moment:

- EngineArgs.__post_init__       self.additional_config  engine/arg_utils.py       0.26:769 0.32:906
- EngineCore.__init__            vllm_config             v1/engine/core.py         0.26:112 0.32:129
- WorkerWrapperBase.init_worker  vllm_config             v1/worker/worker_base.py  0.26:247 0.32:276
- AsyncEngineArgs.add_cli_args   none yet: the command line is read instead      0.26:2733 0.32:3202

A forked child inherits what its parent installed, so each of these decides for its children too.
Variables of the environment ask as well; install.py then writes the key into the config.
Runs in: every vLLM process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

CONFIG_KEY: Final = "clairai"
# Whoever sets one of these wants taps: settings.py and capture_settings.py read them.
PROBE_VARIABLES: Final = ("PROBE_MODEL", "TARGET_LAYER")
CAPTURE_VARIABLE: Final = "VLLM_ACT_CAPTURE"
_MAX_CONFIG_FILE_BYTES: Final = 1 << 20


def is_requested(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True if the engine being built, the command line or the environment asks for clairai."""
    for frame in _list_frames():
        if not str(frame.f_globals.get("__name__", "")).startswith("vllm."):
            continue
        if frame.f_code.co_name == "add_cli_args":
            return is_asked_by(environ) or _mentions_clairai(argv)
        config = _additional_config(frame)
        if config is not None:
            return is_asked_by(environ) or CONFIG_KEY in config
    return False


def is_asked_by(environ: Mapping[str, str]) -> bool:
    """True if the environment alone asks for taps; VLLM_ACT_CAPTURE=0 does not."""
    has_probes = any(environ.get(name) for name in PROBE_VARIABLES)
    return has_probes or environ.get(CAPTURE_VARIABLE, "0") not in ("", "0")


def _list_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _additional_config(frame: FrameType) -> dict[str, object] | None:
    holder = frame.f_locals.get("vllm_config")
    if holder is None and frame.f_code.co_name == "__post_init__":
        holder = frame.f_locals.get("self")
    config = getattr(holder, "additional_config", None)
    return config if isinstance(config, dict) else None


def _mentions_clairai(argv: Sequence[str]) -> bool:
    """True if an argument, or a file given with --config, mentions the key.

    Too wide on purpose (a model called clairai counts): the hooks look for the key in the real
    config again, and pass through without it.
    """
    if any(CONFIG_KEY in argument for argument in argv):
        return True
    return any(_is_key_in_file(Path(value)) for value in _list_config_files(argv))


def _list_config_files(argv: Sequence[str]) -> Iterator[str]:
    for index, argument in enumerate(argv):
        if argument == "--config" and index + 1 < len(argv):
            yield argv[index + 1]
        elif argument.startswith("--config="):
            yield argument.removeprefix("--config=")


def _is_key_in_file(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return CONFIG_KEY.encode() in file.read(_MAX_CONFIG_FILE_BYTES)
    except OSError:
        return False  # vLLM reports an unreadable config file itself
