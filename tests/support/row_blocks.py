"""Small blocks of rows whose values tell which row they belong to."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.store.codecs.registry import named
from clairai.store.commit_shards import PendingShard
from clairai.store.row_block import Origin, RequestNote, RowBlock
from clairai.wire.ring_messages import DECODE, ROW

WIDTH = 8


def origin(encoder: str = "raw", weights: str = "v1") -> Origin:
    parameters = {"dtype": "float32"} if encoder == "raw" else {}
    return Origin.of(
        model="tiny",
        weights=weights,
        dtype="float32",
        width=WIDTH,
        encoder=encoder,
        parameters=named(encoder, parameters).parameters,
    )


def values(stream: int, positions_N: NDArray[np.int64], point: str) -> NDArray[np.float32]:
    """Values that differ for every stream, position and point, so that a mix-up shows."""
    base_N1 = (stream * 1000 + positions_N * 10 + len(point))[:, None]
    return (base_N1 + np.arange(WIDTH) / 16).astype(np.float32)


def block(
    stream: int, num_rows: int = 3, *, start: int = 0, point: str = "post_block.3", **of: str
) -> RowBlock:
    rows_N = np.zeros(num_rows, ROW)
    positions_N = np.arange(start, start + num_rows)
    rows_N["stream"], rows_N["position"], rows_N["phase"] = stream, positions_N, DECODE
    rows_N["token_id"] = positions_N + 7
    made = origin(**of)
    encoder = named(made.encoder, msgspec.json.decode(made.parameters))
    return RowBlock(made, point, rows_N, encoder.encode(values(stream, positions_N, point)))


def pending_shard(*blocks: RowBlock, notes: dict[int, RequestNote] | None = None) -> PendingShard:
    return PendingShard("", "safetensors", list(blocks), notes or {})
