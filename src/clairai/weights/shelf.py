"""Takes the descriptor of what is small, such as a bank; gives the engine's own copy of it.

A page that nobody has touched costs more than copying into it: the sender fills the same memfd
again and again (lent.py), and the engine copies it to memory that it used before (borrow.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from clairai.borrow import Borrower, require_memory
from clairai.errors import WeightsError
from clairai.weights.checksum import checksum
from clairai.weights.manifest import Tensor
from clairai.wire import MAX_LENT_BYTES

COPIED_BYTES: Final = MAX_LENT_BYTES  # at most; more is mapped


class Copied:
    """The engine's: its own copy of what a sender's memfd held at one moment."""

    def __init__(self, borrower: Borrower, fd: int, nbytes: int, used: int) -> None:
        """Takes the descriptor over, also when it refuses it; after `used` bytes lies nothing."""
        try:
            require_memory(fd, nbytes)
            self.bytes_N = borrower.copy(fd, used)
        except OSError as error:
            raise WeightsError(f"the buffer cannot be read ({error}); send it again") from error
        finally:
            os.close(fd)
        self.extent = nbytes

    def checksums(self, tensors: Sequence[Tensor]) -> list[str]:
        view = self.bytes_N.data
        return [checksum(view[each.offset : each.offset + each.nbytes]) for each in tensors]

    def close(self) -> None:
        """Who still holds a tensor of it keeps it."""
        self.bytes_N = self.bytes_N[:0].copy()
