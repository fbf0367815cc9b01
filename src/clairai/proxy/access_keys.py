"""API keys: each has a name and rights. Only their digests are kept."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from clairai.errors import ConfigError, quote
from clairai.fields.request_fields import is_owner

Right = Literal["read", "steer", "capture", "weights", "admin"]
RIGHTS: Final[tuple[Right, ...]] = get_args(Right)
DEFAULT_NAME: Final = "default"
MAX_KEYS: Final = 256
MAX_NAME: Final = 64  # characters


@dataclass(frozen=True)
class AccessKey:
    """A key that requests may carry; `admin` has every right."""

    name: str
    rights: frozenset[Right]
    digest: bytes = field(repr=False)  # SHA-256 of the key

    def __post_init__(self) -> None:
        if not is_owner(self.name):
            raise ConfigError(
                f"a key's name must be 1 to {MAX_NAME} of a-z, 0-9, dot, underscore and hyphen, "
                f"not {quote(self.name)}"
            )
        unknown = next((right for right in self.rights if right not in RIGHTS), None)
        if unknown is not None or not self.rights:
            raise ConfigError(f"the rights of key {self.name} must be some of {', '.join(RIGHTS)}")

    @classmethod
    def of(
        cls, key: str, *, name: str = DEFAULT_NAME, rights: Iterable[Right] = RIGHTS
    ) -> AccessKey:
        return cls(name, frozenset(rights), digest_key(key))


def digest_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_keys(keys: Sequence[AccessKey]) -> None:
    """ConfigError if there are too many, or if two share a name or are the same key."""
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{len(keys)} API keys; give at most {MAX_KEYS}")
    for name, count in Counter(key.name for key in keys).items():
        if count > 1:
            raise ConfigError(f"{count} API keys are named {name}; give each a name of its own")
    names = {key.digest: key.name for key in keys}
    twice = next((key for key in keys if names[key.digest] != key.name), None)
    if twice is not None:
        raise ConfigError(
            f"{twice.name} and {names[twice.digest]} are the same API key; give each its own"
        )


def find_key(token: str, keys: Sequence[AccessKey]) -> AccessKey | None:
    """The key that this is; the time shows neither which one nor how much of it is right."""
    digest, found = digest_key(token), None
    for key in keys:  # all of them, whichever it is
        if secrets.compare_digest(digest, key.digest):
            found = key
    return found
