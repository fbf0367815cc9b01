"""Reads API keys from a file or the environment, never from a command line: `ps` shows those.

A key file holds one bare key, which has every right, or a JSON list of keys with names and rights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.errors import ConfigError, quote
from clairai.launch.secret_file import read_secret_file
from clairai.proxy.access_keys import MAX_KEYS, AccessKey, Right, check_keys

OWN: Final = ("CLAIRAI_API_KEY", "VLLM_API_KEY")
UPSTREAM: Final = ("CLAIRAI_UPSTREAM_API_KEY", "VLLM_API_KEY")
MAX_BYTES: Final = 4096  # of a bare key
MAX_FILE_BYTES: Final = 256 << 10
MIN_LISTED: Final = 16  # characters of a key in a list
MAX_LISTED: Final = 512
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key of a list: the key itself, or the SHA-256 of it in hexadecimal digits."""

    name: str
    rights: list[Right]
    key: str | None = None
    sha256: str | None = None


def api_key(
    file: Path | None, variables: tuple[str, ...] = OWN, environ: Mapping[str, str] | None = None
) -> str | None:
    """One key: from `file` if there is one, else from the first variable that is set."""
    if file is not None:
        text, what = _read_text(file), f"the key in {quote(str(file))}"
        if _is_list(text):
            raise ConfigError(f"{what} must be one key, and not a list of keys")
        return _check_bare(text, what)
    values = os.environ if environ is None else environ
    name = next((name for name in variables if values.get(name)), None)
    return None if name is None else _check_bare(values[name], f"the key in {name}")


def access_keys(
    file: Path | None, environ: Mapping[str, str] | None = None
) -> tuple[AccessKey, ...]:
    """The keys that requests may carry, from a file or the environment; there may be none."""
    if file is None:
        key = api_key(None, OWN, environ)
        return () if key is None else (AccessKey.of(key),)
    text, what = _read_text(file), f"the key in {quote(str(file))}"
    if not _is_list(text):
        return (AccessKey.of(_check_bare(text, what)),)
    return _parse_list(text, f"key file {quote(str(file))}")


def _read_text(file: Path) -> str:
    return read_secret_file(file, MAX_FILE_BYTES).decode(errors="replace").rstrip("\r\n")


def _is_list(text: str) -> bool:
    return text.lstrip().startswith("[")


def _check_bare(key: str, what: str) -> str:
    if not key or not _is_plain(key) or len(key) > MAX_BYTES:
        raise ConfigError(
            f"{what} must be 1 to {MAX_BYTES} printable ASCII characters without spaces, because "
            f"it goes into a header; make one with: openssl rand -hex 32"
        )
    return key


def _is_plain(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key


def _parse_list(text: str, what: str) -> tuple[AccessKey, ...]:
    """No message repeats what was given: a key may be in the wrong place."""
    entries = _decode_list(text, what)
    if not 1 <= len(entries) <= MAX_KEYS:
        raise ConfigError(f"{what} lists {len(entries)} keys; give 1 to {MAX_KEYS}")
    keys = tuple(_parse_entry(entry, f"{what}, [{i}]") for i, entry in enumerate(entries))
    check_keys(keys)
    return keys


def _decode_list(text: str, what: str) -> list[KeyEntry]:
    try:
        given: Any = json.loads(text, object_pairs_hook=_refuse_repeated_keys)
        return msgspec.convert(given, list[KeyEntry])
    except (ValueError, RecursionError):  # ValueError: msgspec's own too
        raise ConfigError(
            f"{what} must be one key, or a JSON list of keys: "
            '[{"name": "ci", "rights": ["read", "steer"], "key": "..."}]; '
            "`clairai keys new` prints an entry"
        ) from None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _parse_entry(entry: KeyEntry, what: str) -> AccessKey:
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{what} must have a `key` or its `sha256`, and not both")
    if entry.sha256 is not None:
        if not _SHA256.fullmatch(entry.sha256):
            raise ConfigError(f"{what}: sha256 must be 64 hexadecimal digits in small letters")
        return AccessKey(entry.name, frozenset(entry.rights), bytes.fromhex(entry.sha256))
    key = entry.key or ""
    if not MIN_LISTED <= len(key) <= MAX_LISTED or not _is_plain(key):
        raise ConfigError(
            f"{what}: key must be {MIN_LISTED} to {MAX_LISTED} printable ASCII characters without "
            f"spaces; make one with: clairai keys new"
        )
    return AccessKey.of(key, name=entry.name, rights=entry.rights)
