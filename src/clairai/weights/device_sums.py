"""Takes tensors on a GPU; gives their checksums, and packed copies of them, in one pass each.

P = parts, F = fields of a part, N = tensors. Kernel and table are in sum_kernel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.weights import checksum as words

SOURCE_ALIGNMENT: Final = 16  # of what the kernel reads; torch's own allocations are at 512


def checksums(spans: Sequence[torch.Tensor]) -> list[str]:
    """Of bytes on one GPU, each begins at a multiple of 16; waits for the GPU once."""
    from clairai.weights.sum_kernel import sum_all

    sums_N = _sums(spans)
    table_PF = _table(spans, spans)
    if len(table_PF):
        sum_all(_upload(table_PF, sums_N.device), sums_N)
    return _finished(spans, sums_N)


def copy(spans: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[str]:
    """Copy each span's bytes to its target, as long; the checksums. On return it is done."""
    from clairai.weights.sum_kernel import copy_all

    spans = [_aligned(span) for span in spans]
    sums_N = _sums(spans)
    table_PF = _table(spans, targets)
    if len(table_PF):
        copy_all(_upload(table_PF, sums_N.device), sums_N)
    for span, target in zip(spans, targets, strict=True):
        if tail := len(span) % words.WORD_BYTES:
            target[-tail:] = span[-tail:]
    return _finished(spans, sums_N)


def _aligned(span: torch.Tensor) -> torch.Tensor:
    """A piece of another tensor may begin anywhere."""
    return span.clone() if span.data_ptr() % SOURCE_ALIGNMENT else span


def _sums(spans: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(len(spans), dtype=torch.int64, device=spans[0].device)


def _table(spans: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    """A row for each part: address, first word, words, tensor, address of the copy."""
    from clairai.weights.sum_kernel import PART_WORDS

    count_N = np.array([len(span) // words.WORD_BYTES for span in spans], np.int64)
    parts_N = -(-count_N // PART_WORDS)
    which_P = np.repeat(np.arange(len(spans), dtype=np.int64), parts_N)
    begin_N = np.cumsum(parts_N) - parts_N
    first_P = (np.arange(len(which_P), dtype=np.int64) - begin_N[which_P]) * PART_WORDS
    count_P = np.minimum(count_N[which_P] - first_P, PART_WORDS)
    from_P, to_P = (
        np.array([each.data_ptr() for each in given], np.int64)[which_P]
        + first_P * words.WORD_BYTES
        for given in (spans, targets)
    )
    return np.stack((from_P, first_P, count_P, which_P, to_P), axis=1)


def _upload(table_PF: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table_PF)).to(device)


def _finished(spans: Sequence[torch.Tensor], sums_N: torch.Tensor) -> list[str]:
    """Waits for the device, once for all of them, and again for each odd end."""
    totals: list[int] = sums_N.tolist()
    return [
        words.finish(total + _tail(span), len(span))
        for total, span in zip(totals, spans, strict=True)
    ]


def _tail(span: torch.Tensor) -> int:
    """What the bytes after the last whole word add."""
    if len(span) % words.WORD_BYTES == 0:
        return 0  # as nearly always; asking the GPU for no bytes takes time too
    whole = len(span) // words.WORD_BYTES
    rest = bytes(span[whole * words.WORD_BYTES :].tolist())
    return words.tail(rest, whole)
