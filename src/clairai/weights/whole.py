"""Takes the names of all probes of a bank and a row for each; gives the one tensor they travel as.

Its name is made of theirs, in order: a bank whose probes are others, or in another order, has no
tensor of that name, and so no row can come to another probe than it was meant for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from clairai.errors import WeightsError
from clairai.weights.manifest import PROBE


def bank_name(names: Sequence[str]) -> str:
    """No probe's own name begins with a slash."""
    content = hashlib.blake2b(msgspec.msgpack.encode(tuple(names)), digest_size=8)
    return f"{PROBE}/{content.hexdigest()}"


def bank(names: Sequence[str], rows_PD: Any) -> dict[str, Any]:
    """For Sender.send: new directions of a whole bank, float32; `names` as GET /v1/probes has them.

    Hundreds of probes go as fast as one.
    """
    if len(set(names)) != len(names) or tuple(rows_PD.shape[:1]) != (len(names),):
        raise WeightsError(
            f"{len(names)} names, {len(set(names))} of them different, and rows of shape "
            f"{list(rows_PD.shape)}; give each name once, and a row for each"
        )
    return {bank_name(names): rows_PD}
