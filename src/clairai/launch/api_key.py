"""Reads an API key from a file or the environment, never from a command line: `ps` shows those."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from clairai.errors import ConfigError, quote

OWN: Final = ("CLAIRAI_API_KEY", "VLLM_API_KEY")
UPSTREAM: Final = ("CLAIRAI_UPSTREAM_API_KEY", "VLLM_API_KEY")
MAX_BYTES: Final = 4096


def api_key(
    file: Path | None, variables: tuple[str, ...] = OWN, environ: Mapping[str, str] | None = None
) -> str | None:
    """From `file` if there is one, else from the first variable that is set and not empty."""
    if file is not None:
        return _check_key(_read_file(file), f"the key in {quote(str(file))}")
    values = os.environ if environ is None else environ
    name = next((name for name in variables if values.get(name)), None)
    return None if name is None else _check_key(values[name], f"the key in {name}")


def _read_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"key file {quote(str(file))} cannot be read ({error.strerror}); check --api-key-file"
        ) from None
    return raw.decode(errors="replace").rstrip("\r\n")


def _check_key(key: str, what: str) -> str:
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if not key or not is_plain or len(key) > MAX_BYTES:
        raise ConfigError(
            f"{what} must be 1 to {MAX_BYTES} printable ASCII characters without spaces, because "
            f"it goes into a header; make one with: openssl rand -hex 32"
        )
    return key
