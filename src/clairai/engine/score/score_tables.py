"""The probe bank on the device, and the scores that taps leave there.

Runs in: the worker. T = tokens in this step, D = model width, S = sites, K = probe capacity of a
site, P = probes, H = halves of a weight: two bfloat16 on a GPU that serves bfloat16, else one
float32.

Every tensor is allocated once and keeps its address, so that a captured CUDA graph stays valid
while the contents change: a new probe is new numbers in the same place. A GPU runs the kernels of
score_kernel.py and stash_copy_kernel.py; the twins are the same in plain torch, for CPU engines and
as the kernels' reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import torch

from clairai.engine.score.row_upload import RowUpload, SlotRows, block_slots, changed_slots
from clairai.engine.side_stream import AfterTaps, NoSideStream, SideStream
from clairai.errors import TapMissingError
from clairai.probe.bank import EngineBank, ProbeColumn, SiteSlot
from clairai.probe.model import Probe

ACTIVATION_CODES: Final = {"none": 0, "relu": 1, "sigmoid": 2}


class ScoreFunction(Protocol):
    """Turns a site's rows into scores: score_kernel.Scorer on a GPU, `score_twin` elsewhere."""

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weights_HDK: torch.Tensor,
        bias_K: torch.Tensor,
        activation_K: torch.Tensor,
        scores_TK: torch.Tensor,
        ran: torch.Tensor,
    ) -> None: ...


def score_twin(
    hidden_TD: torch.Tensor,
    weights_HDK: torch.Tensor,
    bias_K: torch.Tensor,
    activation_K: torch.Tensor,
    scores_TK: torch.Tensor,
    ran: torch.Tensor,
) -> None:
    """`activation(hidden @ weights + bias)`, in float32."""
    torch.mm(hidden_TD.float(), weights_HDK.float().sum(0), out=scores_TK)
    scores_TK += bias_K
    is_relu_K = activation_K == ACTIVATION_CODES["relu"]
    is_sigmoid_K = activation_K == ACTIVATION_CODES["sigmoid"]
    torch.where(is_relu_K, scores_TK.clamp_min(0), scores_TK, out=scores_TK)
    torch.where(is_sigmoid_K, scores_TK.sigmoid(), scores_TK, out=scores_TK)
    ran += 1


class CopyFunction(Protocol):
    """Fills the stash: stash_copy_kernel.StashCopier on a GPU, `copy_to_stash_twin` elsewhere."""

    def __call__(
        self, rows_TD: torch.Tensor, stash_RD: torch.Tensor, ran: torch.Tensor
    ) -> None: ...


def copy_to_stash_twin(rows_TD: torch.Tensor, stash_RD: torch.Tensor, ran: torch.Tensor) -> None:
    """Copy as many rows as the stash holds, and note that the tap ran."""
    num_rows = min(len(rows_TD), len(stash_RD))
    stash_RD[:num_rows].copy_(rows_TD[:num_rows])
    ran.fill_(1)


class ScoreTables:
    """The device side of the probe bank."""

    def __init__(
        self,
        sites: Sequence[str],
        *,
        width: int,
        capacity: int,
        max_tokens: int,
        device: str,
        dtype: torch.dtype = torch.float32,
        stash_rows: int = 0,
        is_capturing: bool = False,
    ) -> None:
        """`dtype` is that of the model's rows. The stash keeps `stash_rows` of every step.

        Captures read the stash: with `is_capturing`, taps that score at once fill it too.
        """
        num_sites = len(sites)
        self.sites = tuple(sites)
        self.max_tokens = max_tokens
        self.device = torch.device(device)
        is_split = self.device.type == "cuda" and dtype == torch.bfloat16
        self._halves = (torch.bfloat16,) * 2 if is_split else (torch.float32,)
        shape = (num_sites, len(self._halves), width, capacity)
        self.weights_SHDK = torch.zeros(shape, dtype=self._halves[0], device=device)
        self.bias_SK = torch.zeros(num_sites, capacity, device=device)
        self.activation_SK = torch.zeros(num_sites, capacity, dtype=torch.int32, device=device)
        self.scores_STK = torch.zeros(num_sites, max_tokens, capacity, device=device)
        # The residual rows of a step, until the next forward.
        stash_shape = (num_sites, stash_rows, width)
        self.stash_SRD = torch.zeros(stash_shape, dtype=dtype, device=device)
        self.is_capturing = is_capturing
        # Probes that are scored from the stash after the forward, at each site.
        self.stashed_S = torch.zeros(num_sites, dtype=torch.int32, device=device)
        self._is_stashed = [False] * num_sites
        self.num_stashed = 0  # at all sites together
        # How often each site ran: the proof that no compiled graph has lost a tap.
        self.ran_S = torch.zeros(num_sites, dtype=torch.int32, device=device)
        # Where in scores_STK column p of token 0 lies; only the bank's columns count.
        self.offset_C = torch.zeros(num_sites * capacity, dtype=torch.int64, device=device)
        self.num_columns = 0
        # The probe in each slot; None if all probes were redirected since it was placed.
        self._held: dict[SiteSlot, Probe | None] = {}
        self._placed: tuple[ProbeColumn, ...] | None = None  # `placed` of the bank that was loaded
        self._upload = RowUpload(self.device)
        self.tail = AfterTaps(NoSideStream())
        self.score: ScoreFunction = score_twin
        self.copy_to_stash: CopyFunction = copy_to_stash_twin
        self.scratch: tuple[torch.Tensor, ...] = ()
        if self.device.type == "cuda":
            self._use_kernels()

    def _use_kernels(self) -> None:
        from clairai.engine.score.score_kernel import Scorer
        from clairai.engine.score.stash_copy_kernel import StashCopier

        _, _, width, capacity = self.weights_SHDK.shape
        scorer = Scorer(width, capacity, self.max_tokens, self.device)
        self.score, self.scratch = scorer, scorer.scratch
        self.copy_to_stash = StashCopier(width)
        self.tail = AfterTaps(SideStream(self.device, only_in_graphs=True))

    @property
    def nbytes(self) -> int:
        """Device memory of the bank, scores, stash and scratch."""
        bank = (self.weights_SHDK, self.bias_SK, self.activation_SK)
        held = (*bank, self.scores_STK, self.stash_SRD, *self.scratch)
        return sum(int(tensor.nbytes) for tensor in held)

    def site(self, name: str) -> ScoreSite:
        return ScoreSite(self, self.sites.index(name))

    def stash_site(self, name: str) -> StashSite:
        """A site that needs `score_from_stash`."""
        return StashSite(self, self.sites.index(name))

    def leave_to_other_stages(self, names: Iterable[str]) -> None:
        """Other stages of a pipeline tap these sites, and see to it that the taps run."""
        for name in names:
            self.ran_S[self.sites.index(name)] = 1

    def score_from_stash(self, name: str) -> None:
        """From now on this site's rows are scored from the stash."""
        self._is_stashed[self.sites.index(name)] = True
        self._held, self._placed = {}, None  # the next bank is written whole

    def load(self, columns: EngineBank) -> None:
        """Write the bank to the device; called between steps, queued on the current stream.

        Only what is new is written: a bank of hundreds of probes changes within one step's time.
        """
        before, placed = self._held, self._placed
        self._held, self._placed = {}, None  # if this stops half-way, the next load writes all
        if columns.directions_PD is not None and columns.placed is placed:
            # The same probes in the same slots: only their directions are new.
            for part in block_slots(columns.slots, columns.directions_PD):
                self._write(part)
            self._held = dict.fromkeys(columns.slots)
        else:
            self._held = self._change(before, columns)
        self._placed = columns.placed

    def _change(
        self, before: Mapping[SiteSlot, Probe | None], columns: EngineBank
    ) -> dict[SiteSlot, Probe | None]:
        held = {(c.site_index, c.slot_index): c.probe for c in columns.columns}
        for site, slot in before.keys() - held.keys():
            self.weights_SHDK[site, :, :, slot] = 0
        for part in changed_slots(before, held):
            self._write(part)
        self._set_numbers(held)
        if tuple(held) != tuple(before):
            self._place(tuple(held))
        return {**held}

    def _set_numbers(self, held: Mapping[SiteSlot, Probe]) -> None:
        """Write what each probe has besides its direction."""
        bias_SK, activation_SK = np.zeros((2, *self.bias_SK.shape), np.float32)
        places = tuple(np.array(list(held), np.intp).reshape(-1, 2).T)
        bias_SK[places] = [probe.bias for probe in held.values()]
        activation_SK[places] = [ACTIVATION_CODES[one.activation] for one in held.values()]
        self.bias_SK.copy_(torch.from_numpy(bias_SK))
        self.activation_SK.copy_(torch.from_numpy(activation_SK))

    def _write(self, part: SlotRows) -> None:
        """Write the directions of neighbouring slots, each as halves that add up to it."""
        rest_PD = self._upload(part.rows_PD)
        end = part.slot + len(rest_PD)
        for half, dtype in enumerate(self._halves):
            split_PD = rest_PD.to(dtype)
            self.weights_SHDK[part.site, half, :, part.slot : end].copy_(split_PD.T)
            if half + 1 < len(self._halves):
                rest_PD = rest_PD - split_PD.float()

    def _place(self, slots: Sequence[SiteSlot]) -> None:
        """Write where the scores of each column are."""
        counts = Counter(site for site, _ in slots)
        stashed = [counts[site] * is_so for site, is_so in enumerate(self._is_stashed)]
        self.stashed_S.copy_(torch.tensor(stashed, dtype=torch.int32))
        self.num_stashed = sum(stashed)
        _, max_tokens, capacity = self.scores_STK.shape
        offsets = [site * max_tokens * capacity + slot for site, slot in slots]
        self.num_columns = len(offsets)
        self.offset_C[: self.num_columns].copy_(torch.tensor(offsets, dtype=torch.int64))

    def gather(self, num_tokens: int) -> torch.Tensor:
        """Scores of this step's first `num_tokens` rows, in the bank's column order."""
        capacity = self.scores_STK.shape[2]
        first_T = torch.arange(num_tokens, device=self.device) * capacity
        at_TP = first_T[:, None] + self.offset_C[None, : self.num_columns]
        # Not scores[at_TP]: on a CPU that wakes the whole thread pool for a few thousand numbers.
        return self.scores_STK.view(-1).index_select(0, at_TP.view(-1)).view(at_TP.shape)

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


class ScoreSite:
    """A tap in the forward pass: it scores the residual stream at one site."""

    def __init__(self, tables: ScoreTables, index: int) -> None:
        self._score, self._tail = tables.score, tables.tail
        self._bank = (
            tables.weights_SHDK[index],
            tables.bias_SK[index],
            tables.activation_SK[index],
        )
        self._scores_TK = tables.scores_STK[index]
        self._ran = tables.ran_S[index]
        self._stash_RD, self._is_capturing = tables.stash_SRD[index], tables.is_capturing

    def read(self, hidden: torch.Tensor) -> None:
        """Called by the tap op. Graphs capture it once: fixed addresses, no wait for the host."""
        rows_TD, scores_TK = self._prepared(hidden)
        self._score(rows_TD, *self._bank, scores_TK, self._ran)
        if self._is_capturing:
            self._stash_RD[: len(rows_TD)].copy_(rows_TD)
        self._tail.tap_ran(len(rows_TD))

    def _prepared(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row per token, and the tensor for their scores."""
        hidden_TD = hidden.view(-1, hidden.shape[-1])
        num_tokens = hidden_TD.shape[0]
        if num_tokens > self._scores_TK.shape[0]:
            raise TapMissingError(
                f"a forward of {num_tokens} rows, tables hold {self._scores_TK.shape[0]}; "
                f"max_num_batched_tokens is not what the engine reported: please report this"
            )
        return hidden_TD, self._scores_TK[:num_tokens]


class StashSite(ScoreSite):
    """A tap that leaves the residual rows in the stash; they are scored when the forward is over.

    A step with more rows than the stash holds is a long prefill and never captured in a graph: its
    rows are scored here at once. Those that fit are in the stash even then, so that what is scored
    from there is never a row of an earlier step.
    """

    def __init__(self, tables: ScoreTables, index: int) -> None:
        super().__init__(tables, index)
        self._copy_to_stash = tables.copy_to_stash

    def read(self, hidden: torch.Tensor) -> None:
        rows_TD, _ = self._prepared(hidden)
        self._copy_to_stash(rows_TD, self._stash_RD, self._ran)
        if len(rows_TD) > len(self._stash_RD):
            super().read(rows_TD)
        else:
            self._tail.tap_ran(len(rows_TD))
