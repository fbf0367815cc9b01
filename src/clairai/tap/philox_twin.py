"""Takes a seed; gives the signs of a random projection, on any device, as store/codecs does.

D = model width, K = projected. torch has no unsigned 64-bit product: each is made of two halves.
"""

from __future__ import annotations

import torch

from clairai.store.codecs.philox import BITS, MASK, MULTIPLIERS, ROUNDS, WEYL


def signs_twin(seed: int, width: int, k: int, device: torch.device) -> torch.Tensor:
    """+1 and -1 in int8, as [D, K]."""
    row_D1 = torch.arange(width, device=device)[:, None]
    block_1B = torch.arange(-(-k // BITS), device=device)[None]
    words_DBW = torch.stack(_philox(block_1B, row_D1, seed), dim=2)
    bits_DBWI = words_DBW[..., None] >> torch.arange(32, device=device) & 1
    return (1 - 2 * bits_DBWI.reshape(width, -1)[:, :k]).to(torch.int8)


def _philox(first: torch.Tensor, second: torch.Tensor, seed: int) -> list[torch.Tensor]:
    c0, c1 = torch.broadcast_tensors(first, second)
    c2 = c3 = torch.zeros_like(c0)
    keys = [seed & MASK, seed >> 32]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & MASK for key, step in zip(keys, WEYL, strict=True)]
    return [c0, c1, c2, c3]


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits."""
    lower, upper = (word & 0xFFFF) * factor, (word >> 16) * factor
    return (upper + (lower >> 16)) >> 16, (lower + ((upper & 0xFFFF) << 16)) & MASK
