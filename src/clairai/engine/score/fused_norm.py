"""Takes a norm's two tensors inside the forward; gives its output, seen and steered in passing.

T = tokens in this step, D = model width, R = rows of the stash.
"""

from __future__ import annotations

import torch

from clairai.engine.score.score_tables import ScoreSite, ScoreTables
from clairai.engine.steer.steer_tables import SteerTables
from clairai.errors import TapMissingError


class FusedNormSite:
    """A place in the forward pass whose norm is ours: the stream is left in the stash.

    It is scored from there when the forward is over. A step with more rows than the stash holds is
    a long prefill, never captured in a graph: it is scored here, row by row of the stream itself.
    """

    def __init__(self, tables: ScoreTables, name: str, epsilon: float) -> None:
        from clairai.engine.score.norm_kernel import (
            FusedNorm,  # an engine on a CPU may have no Triton
        )

        index = tables.sites.index(name)
        self._site = ScoreSite(tables, index)
        self._stash_RD = tables.stash_SRD[index]
        width = self._stash_RD.shape[1]
        self._norm = FusedNorm(width, epsilon, self._stash_RD, tables.ran_S[index])
        self._max_tokens, self._tail = tables.max_tokens, tables.tail
        self._steering: tuple[SteerTables, int] | None = None

    def steer_with(self, tables: SteerTables, name: str) -> None:
        self._steering = tables, tables.sites.index(name)

    def norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the op; captured once, replayed for ever: fixed addresses, no host sync."""
        if len(x_TD) > self._max_tokens:
            raise TapMissingError(
                f"a forward of {len(x_TD)} rows, tables hold {self._max_tokens}; "
                f"max_num_batched_tokens is not what the engine reported: please report this"
            )
        given = (x_TD, residual_TD, weight_D)
        if self._steering is None:
            normed_TD, stream_TD = self._norm(*given)
        else:
            normed_TD, stream_TD = self._norm.steered(*given, *self._steering)
        if len(x_TD) > len(self._stash_RD):
            self._site.read(stream_TD)
        else:
            self._tail.tap_ran(len(x_TD))
        return normed_TD, stream_TD
