"""Takes tensors on a GPU; gives their checksums, and packed copies of them, in one pass each.

N = tensors, F = fields of a row of the table. Kernel and table are in sum_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch

from clairai.weights import checksum as words

SOURCE_ALIGNMENT: Final = 16  # of what the kernel reads; torch's own allocations are at 512


def checksums(spans: Sequence[torch.Tensor]) -> list[str]:
    """Of bytes on one GPU, each begins at a multiple of 16; waits for the GPU once."""
    from clairai.weights.checksum_kernel import launch_sum

    sums_N = _zero_sums(spans)
    table = _span_table(spans, spans)
    if table.num_parts:
        launch_sum(table.rows_NF, sums_N, table.num_parts)
    return _finish_all(spans, sums_N)


def copy_and_checksum(spans: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[str]:
    """Copy each span's bytes to its target, as long; the checksums. On return it is done."""
    return begin_copy_and_checksum(spans, targets)()


def begin_copy_and_checksum(
    spans: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Callable[[], list[str]]:
    """As copy, under way: call what this gives to wait for it. `spans` must stay until then."""
    from clairai.weights.checksum_kernel import launch_copy_and_sum

    spans = [_aligned(span) for span in spans]
    sums_N = _zero_sums(spans)
    table = _span_table(spans, targets)
    if table.num_parts:
        launch_copy_and_sum(table.rows_NF, sums_N, table.num_parts)
    for span, target in zip(spans, targets, strict=True):
        if tail := span.nbytes % words.WORD_BYTES:
            target[-tail:] = span[-tail:]
    return partial(_finish_all, spans, sums_N)


def _aligned(span: torch.Tensor) -> torch.Tensor:
    """A piece of another tensor may begin anywhere."""
    return span.clone() if span.data_ptr() % SOURCE_ALIGNMENT else span


def _zero_sums(spans: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(len(spans), dtype=torch.int64, device=spans[0].device)


class _SpanTable(NamedTuple):
    """A row for each span: address, words, parts before it, address of the copy."""

    rows_NF: torch.Tensor
    num_parts: int


def _span_table(spans: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> _SpanTable:
    from clairai.weights.checksum_kernel import PART_WORDS

    count_N = np.array([span.nbytes for span in spans], np.int64) // words.WORD_BYTES
    parts_N = -(-count_N // PART_WORDS)
    from_N, to_N = (
        np.array([each.data_ptr() for each in given], np.int64) for given in (spans, targets)
    )
    rows_NF = np.stack((from_N, count_N, np.cumsum(parts_N) - parts_N, to_N), axis=1)
    return _SpanTable(torch.from_numpy(rows_NF).to(spans[0].device), int(parts_N.sum()))


def _finish_all(spans: Sequence[torch.Tensor], sums_N: torch.Tensor) -> list[str]:
    """Waits for the device, once for all of them, and again for each odd end."""
    totals: list[int] = sums_N.tolist()
    return [
        words.finish_checksum(total + _tail_of(span), span.nbytes)
        for total, span in zip(totals, spans, strict=True)
    ]


def _tail_of(span: torch.Tensor) -> int:
    """What the bytes after the last whole word add."""
    if span.nbytes % words.WORD_BYTES == 0:
        return 0  # as nearly always; asking the GPU for no bytes takes time too
    whole = len(span) // words.WORD_BYTES
    rest = bytes(span[whole * words.WORD_BYTES :].tolist())
    return words.tail_sum(rest, whole)
