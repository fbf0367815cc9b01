"""Finds out when the ranks of an engine do not have the same residual stream.

Every rank has the whole stream and changes its own copy when it steers; rank 0 speaks for all. If a
rank loses its way, the others go on with sums of what they and it computed: the text stays fluent
and no score says so. So now and then each rank reduces some rows of the stream's end to two numbers
a row, and the ranks compare them.

Nothing waits for it. The numbers are reduced behind a step's forward, read by the host
`STEPS_BETWEEN` steps later, sent to the other ranks in the background, and compared after as many
steps again; a few steps after the start it is done step by step. All ranks take the same steps, so
all compare, and raise, in the same one.
Runs in: every worker of an engine with several ranks. K = rows compared, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from clairai.errors import RanksDisagreeError

STEPS_BETWEEN: Final = 64
EARLY_STEPS: Final = 8  # what is wrong from the start is found at once
MAX_ROWS: Final = 64
# Ranks should agree to the bit. How far a row may be off, relative to its length: rounding.
TOLERANCES: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_SEED: Final = 20


class Exchange(Protocol):
    """Numbers of this rank on their way to all others."""

    def wait(self) -> list[torch.Tensor]:
        """Those of every rank, in order."""


@dataclass(frozen=True)
class _Reduced:
    """What this rank has of one step, in host memory after `wait_ready`."""

    step: int
    numbers: torch.Tensor  # how many rows, then two for each
    wait_ready: Callable[[], None]


class RankCheck:
    """One rank's part; `send` starts an exchange with the others."""

    def __init__(self, send: Callable[[torch.Tensor], Exchange]) -> None:
        self._send = send
        self._step = 0
        self._reduced: _Reduced | None = None
        self._sent: tuple[int, Exchange] | None = None
        self._direction_D: torch.Tensor | None = None
        self._tolerance = 0.0

    def after_step(self, hidden_TD: torch.Tensor | None, num_tokens: int) -> None:
        """A step is queued on the device, whose model gave `hidden_TD`; RanksDisagreeError."""
        self._step += 1
        if self._step > EARLY_STEPS and self._step % STEPS_BETWEEN:
            return
        if self._sent is not None:
            self._compare(*self._sent)
            self._sent = None
        if self._reduced is not None:
            self._reduced.wait_ready()
            self._sent = (self._reduced.step, self._send(self._reduced.numbers))
            self._reduced = None
        if isinstance(hidden_TD, torch.Tensor) and hidden_TD.dim() == 2:
            self._reduced = self._reduce(hidden_TD[: min(num_tokens, MAX_ROWS)])

    def _reduce(self, rows_KD: torch.Tensor) -> _Reduced:
        """Each row's length, and its product with a direction that all ranks know."""
        if self._direction_D is None:
            generator = torch.Generator().manual_seed(_SEED)
            direction_D = torch.randn(rows_KD.shape[1], generator=generator)
            self._direction_D = direction_D.to(rows_KD.device)
            self._tolerance = TOLERANCES.get(rows_KD.dtype, TOLERANCES[torch.bfloat16])
        wide_KD = rows_KD.float()
        reduced_K2 = torch.stack((wide_KD @ self._direction_D, wide_KD.norm(dim=1)), dim=1)
        # Padded, so that ranks with other numbers of rows still exchange as many numbers.
        padded = reduced_K2.new_zeros(1 + 2 * MAX_ROWS)
        padded[0] = len(rows_KD)
        padded[1 : 1 + reduced_K2.numel()] = reduced_K2.flatten()
        if not padded.is_cuda:
            return _Reduced(self._step, padded, lambda: None)
        numbers = torch.empty(padded.shape, dtype=padded.dtype, pin_memory=True)
        numbers.copy_(padded, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _Reduced(self._step, numbers, copied.synchronize)  # long done when it is asked

    def _compare(self, step: int, exchange: Exchange) -> None:
        every = exchange.wait()
        off = [rank for rank in range(1, len(every)) if self._differ(every[0], every[rank])]
        if off:
            ranks = ", ".join(map(str, off))
            raise RanksDisagreeError(
                f"after step {step} the residual stream of rank {ranks} is not that of rank 0, so "
                f"scores, steering and text are those of no model; the engine ends. Start it "
                f"again, and report it"
            )

    def _differ(self, first: torch.Tensor, other: torch.Tensor) -> bool:
        if first[0] != other[0]:
            return True
        first_K2, other_K2 = first[1:].view(-1, 2), other[1:].view(-1, 2)
        if not torch.equal(first_K2.isfinite(), other_K2.isfinite()):
            return True  # one has infinities or NaN where the other has none
        distance_K = (first_K2 - other_K2).abs().amax(dim=1)
        return bool((distance_K > self._tolerance * first_K2[:, 1]).any())
