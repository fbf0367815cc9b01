"""Takes rows of the residual stream on any device; gives them encoded there, as fast as it can.

N = rows, D = model width, K = projected. The bytes are those of store/codecs, whoever makes them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from clairai.store.codecs.base import Encoder
from clairai.store.codecs.rp8 import Rp8
from clairai.tap.encode_twin import Encoded, encode_twin
from clairai.tap.philox_twin import signs_twin


def encode(rows_ND: torch.Tensor, encoder: Encoder) -> Encoded:
    """Rows in float32, bfloat16 or float16."""
    if rows_ND.device.type != "cuda" or not isinstance(encoder, Rp8):
        return encode_twin(rows_ND, encoder)
    from clairai.tap.project_kernel import encode_rp8

    return encode_rp8(rows_ND, _signs(encoder.seed, rows_ND.shape[1], encoder.k, rows_ND.device))


@lru_cache(maxsize=4)  # an engine's own projection, and a few of requests
def _signs(seed: int, width: int, k: int, device: torch.device) -> torch.Tensor:
    """Turned, as tensor cores want bytes: those that are added up side by side."""
    return signs_twin(seed, width, k, device).t().contiguous()
