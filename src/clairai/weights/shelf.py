"""Takes the descriptor of what is small, such as a bank; gives the engine's own copy of it.

A page that nobody has touched costs more than copying into it: the sender fills the same memfd
again and again (lent.py), and the engine copies it to memory that it used before (borrow.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Final

from clairai.borrow import Borrower, Pages, require_memory
from clairai.errors import WeightsError
from clairai.weights.checksum import copied
from clairai.weights.manifest import Tensor
from clairai.wire import MAX_LENT_BYTES

COPIED_BYTES: Final = MAX_LENT_BYTES  # at most; more is mapped


class Copied:
    """The engine's: its own copy of what a sender's memfd held at one moment."""

    def __init__(self, borrower: Borrower, fd: int, nbytes: int, tensors: Sequence[Tensor]) -> None:
        """Takes the descriptor over, also when it refuses it; nothing but `tensors` is copied."""
        used = max(each.offset + each.nbytes for each in tensors)
        try:
            require_memory(fd, nbytes)
            self.bytes_N, self._sums = borrower.copied(fd, used, partial(_copy, tensors))
        except OSError as error:
            raise WeightsError(f"the buffer cannot be read ({error}); send it again") from error
        finally:
            os.close(fd)
        self.extent = nbytes

    def checksums(self, tensors: Sequence[Tensor]) -> list[str]:
        """Of the copies, taken while they were made."""
        return [self._sums[each.name] for each in tensors]

    def close(self) -> None:
        """Who still holds a tensor of it keeps it."""
        self.bytes_N = self.bytes_N[:0].copy()


def _copy(tensors: Sequence[Tensor], target_N: Pages, source_N: Pages) -> dict[str, str]:
    return {
        each.name: copied(_span(target_N, each).data, _span(source_N, each).data)
        for each in tensors
    }


def _span(bytes_N: Pages, tensor: Tensor) -> Pages:
    return bytes_N[tensor.offset : tensor.offset + tensor.nbytes]
