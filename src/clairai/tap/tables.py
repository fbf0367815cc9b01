"""Takes residual rows inside the forward pass; gives raw scores, one buffer for all sites.

T = tokens in this step, D = model width, S = sites, K = probe capacity of a site, P = probes.

Every tensor is allocated once and keeps its address, so that a captured CUDA graph stays valid
while its contents change: a new probe is new numbers in the same place. Only the product is
computed here; bias and activation are a few operations on what leaves the device (outlet.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clairai.errors import TapMissingError
from clairai.probe.columns import Columns


class Tables:
    """The device side of the probe bank."""

    def __init__(
        self, sites: Sequence[str], *, width: int, capacity: int, max_tokens: int, device: str
    ) -> None:
        num_sites = len(sites)
        self.sites = tuple(sites)
        self.device = torch.device(device)
        self.weights_SDK = torch.zeros(num_sites, width, capacity, device=device)
        self.scores_STK = torch.zeros(num_sites, max_tokens, capacity, device=device)
        # How often each site ran: the proof that no compiled graph has lost a tap.
        self.ran_S = torch.zeros(num_sites, dtype=torch.int32, device=device)
        self._site_P = torch.zeros(0, dtype=torch.int64, device=device)
        self._slot_P = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return int(self.weights_SDK.nbytes + self.scores_STK.nbytes)

    def site(self, name: str) -> Site:
        return Site(self, self.sites.index(name))

    def load(self, columns: Columns) -> None:
        """Put the bank's directions in place; runs between steps, in the order of the stream."""
        weights_SDK = torch.zeros_like(self.weights_SDK, device="cpu")
        slots = columns.slots()
        for (site, slot), probe in zip(slots, columns.probes, strict=True):
            weights_SDK[site, :, slot] = torch.tensor(probe.direction_D)
        self.weights_SDK.copy_(weights_SDK)
        self._site_P = torch.tensor([s for s, _ in slots], dtype=torch.int64, device=self.device)
        self._slot_P = torch.tensor([k for _, k in slots], dtype=torch.int64, device=self.device)

    def gather(self, num_tokens: int) -> torch.Tensor:
        """Raw scores of this step's first `num_tokens` rows, in the bank's column order."""
        scores_TSK = self.scores_STK[:, :num_tokens].transpose(0, 1)
        return scores_TSK[:, self._site_P, self._slot_P]

    def check_all_ran(self) -> None:
        missing = [
            name for name, ran in zip(self.sites, self.ran_S.tolist(), strict=True) if not ran
        ]
        if missing:
            raise TapMissingError(
                f"{len(missing)} of {len(self.sites)} taps did not run during warm-up "
                f"(first: {', '.join(missing[:4])}); the engine refuses to serve without them. "
                f"Clear vLLM's compile cache or set VLLM_DISABLE_COMPILE_CACHE=1, and report it"
            )


class Site:
    """One place in the forward pass where the residual stream is read."""

    def __init__(self, tables: Tables, index: int) -> None:
        self._weights_DK = tables.weights_SDK[index]
        self._scores_TK = tables.scores_STK[index]
        self._ran = tables.ran_S[index]

    def score(self, hidden: torch.Tensor) -> None:
        """Called by the tap op; captured once, replayed for ever: fixed addresses, no host sync."""
        hidden_TD = hidden.view(-1, hidden.shape[-1])
        num_tokens = hidden_TD.shape[0]
        if num_tokens > self._scores_TK.shape[0]:
            raise TapMissingError(
                f"a forward of {num_tokens} rows, tables hold {self._scores_TK.shape[0]}; "
                f"max_num_batched_tokens is not what the engine reported: please report this"
            )
        torch.mm(hidden_TD.float(), self._weights_DK, out=self._scores_TK[:num_tokens])
        self._ran.add_(1)
