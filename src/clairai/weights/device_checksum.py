"""Checksums of tensors on a GPU, and packed copies of them, in one pass each.

N = tensors, F = fields of a row of the table in checksum_kernel.py.
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
    """Sum spans of bytes that begin at multiples of 16; waits for the GPU once."""
    from clairai.weights.checksum_kernel import launch_sum

    sums_N = _zero_sums(spans)
    table = _span_table(spans, spans)
    if table.num_parts:
        launch_sum(table.rows_NF, sums_N, table.num_parts)
    return _finish_all(spans, sums_N)


def copy_and_checksum(spans: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[str]:
    """Copy each span to its target of the same size, and wait; return the checksums."""
    return begin_copy_and_checksum(spans, targets)()


def begin_copy_and_checksum(
    spans: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Callable[[], list[str]]:
    """Start to copy; call the result to wait. `spans` must not change until then."""
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
    """A view of another tensor may begin anywhere."""
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
    """Wait for the GPU, once for all spans, and again for each partial word."""
    totals: list[int] = sums_N.tolist()
    return [
        words.finish_checksum(total + _tail_of(span), span.nbytes)
        for total, span in zip(totals, spans, strict=True)
    ]


def _tail_of(span: torch.Tensor) -> int:
    """What the bytes after the last whole word add."""
    if span.nbytes % words.WORD_BYTES == 0:
        return 0  # nearly always; fetching no bytes from the GPU takes time too
    whole = len(span) // words.WORD_BYTES
    rest = bytes(span[whole * words.WORD_BYTES :].tolist())
    return words.tail_sum(rest, whole)
