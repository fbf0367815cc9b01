"""The encoders by name, made from parameters as a shard or a request has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from clairai.errors import ConfigError, quote
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fp8 import Fp8
from clairai.store.codecs.full8 import Full8
from clairai.store.codecs.int4 import Int4
from clairai.store.codecs.raw import Raw
from clairai.store.codecs.rp8 import Rp8
from clairai.store.codecs.topk8 import TopK8

ENCODERS: Final[Mapping[str, type[Encoder]]] = MappingProxyType(
    {kind.name: kind for kind in (Raw, Full8, Rp8, TopK8, Fp8, Int4)}
)


def named(name: object, parameters: Mapping[str, Any] | None = None) -> Encoder:
    """Make an encoder; missing parameters have their defaults, unknown ones are refused."""
    encoder = ENCODERS.get(name) if isinstance(name, str) else None
    if encoder is None:
        raise ConfigError(f"no encoder is named {quote(name)}; give one of {', '.join(ENCODERS)}")
    given = dict(parameters or {})
    known = [field.name for field in fields(encoder)]
    unknown = [parameter for parameter in given if parameter not in known]
    if unknown:
        takes = ", ".join(known) or "no parameters"
        raise ConfigError(f"encoder {name} has no {quote(unknown[0])}; it takes {takes}")
    return encoder(**given)
