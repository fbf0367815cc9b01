"""Who sends a request: the name and rights of its API key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal

from clairai.errors import ForbiddenError
from clairai.proxy.access_keys import RIGHTS, AccessKey, Right, find_key
from clairai.proxy.responses import HttpRefusal

Access = Right | Literal["public"]
PUBLIC: Final = "public"


@dataclass(frozen=True)
class Caller:
    """`name` is that of the key; None where the proxy has no keys."""

    name: str | None
    rights: frozenset[Right]

    @property
    def is_admin(self) -> bool:
        return "admin" in self.rights

    def require(self, right: Right) -> None:
        """HttpRefusal unless the key has this right."""
        if right in self.rights or self.is_admin:
            return
        raise HttpRefusal(
            HTTPStatus.FORBIDDEN,
            f"key {self.name} has not the right `{right}`; use a key that has it, or ask whoever "
            f"runs this server to give it",
            code=ForbiddenError.code,
        )

    def owns(self, owner: str | None) -> bool:
        """True if what this owner made is the caller's too."""
        return self.is_admin or owner == self.name


ANYBODY: Final = Caller(None, frozenset(RIGHTS))  # where the proxy has no keys
NOBODY: Final = Caller(None, frozenset())  # on a route that is public


def authorize(authorization: str, access: Access, keys: Sequence[AccessKey]) -> Caller:
    """The caller; HttpRefusal if its key is not known, or has not the right that is needed."""
    if access == PUBLIC:
        return NOBODY
    if not keys:
        return ANYBODY
    scheme, _, token = authorization.partition(" ")
    key = find_key(token.strip(), keys)
    if scheme.lower() != "bearer" or key is None:
        raise HttpRefusal(
            HTTPStatus.UNAUTHORIZED,
            "the API key is missing or wrong; send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    caller = Caller(key.name, key.rights)
    caller.require(access)
    return caller
