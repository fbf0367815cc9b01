"""A tap inside the model's norm: the residual stream is stashed and steered in the same kernel.

Runs in: the worker, on a GPU. T = tokens in this step, D = model width, R = rows of the stash.
"""

from __future__ import annotations

import torch

from clairai.engine.score.score_tables import ScoreSite, ScoreTables
from clairai.engine.steer.steer_tables import SteerTables
from clairai.errors import TapMissingError


class FusedNormSite:
    """A site whose norm is ours: it leaves the residual rows in the stash.

    They are scored from there after the forward. A step with more rows than the stash holds is a
    long prefill and never captured in a graph: its rows are scored here at once.
    """

    def __init__(self, tables: ScoreTables, name: str, epsilon: float) -> None:
        # Here, because a CPU engine may have no Triton.
        from clairai.engine.score.norm_kernel import FusedNorm

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
        """Called by the op. Graphs capture it once: fixed addresses, no wait for the host."""
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
