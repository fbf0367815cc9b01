"""The device tables of steering: vector rows, programs, and the map of which row runs which.

T = tokens in this step, D = model width, S = sites, V = vector rows, P = programs, O = ops of a
program at a site, W = words of an op, Z = gate slots, G = gates of a request.

Runs in: the worker. Program 0 does nothing. A gate slot holds the state of one request's gates, if
any of them is stateful. Every tensor is allocated once and keeps its address, so a captured CUDA
graph stays valid while the contents change. A GPU runs steer_kernel.py; steer_twin.py is the same
in plain torch: it serves CPU engines and is the kernel's oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.engine.steer.steering_plan import MAX_GATES, MAX_OPS
from clairai.errors import TapMissingError

# The words of an op: kind, vector row, gate, flags, and four that are float32.
KIND, ROW, GATE, FLAGS, FIRST_REAL, OP_WORDS = 0, 1, 2, 3, 4, 8
READ, ADD, ABLATE, CLAMP, REPLACE = 1, 2, 3, 4, 5  # kinds
BIAS, THRESHOLD, SHARPNESS, RELEASE = 4, 5, 6, 7  # of READ
SCALE, LOW, HIGH, INVERSE_NORM = 4, 5, 6, 7  # of the others
NO_GATE: Final = -1
SKIPS_SPECIAL, IS_MATCHED, IS_SOFT, IS_HELD, IS_LATCHED = 1, 2, 4, 8, 16  # flags
ACTIVATION_SHIFT: Final = 8  # flag bits from here on are the activation's code

# The words of a map entry. A request with a stateful gate has a gate slot; RUN is the number of its
# rows on its first row of the step, and -1 on the others. Without one both are 0. FRESH is 1 where
# the rows start at position 0.
PROGRAM, RUN, GATE_SLOT, FRESH, MAP_WORDS = 0, 1, 2, 3, 4


class SteerFunction(Protocol):
    """Steers rows at a site: steer_kernel.SteerLauncher on a GPU, else steer_twin.steer_twin."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        tables: SteerTables,
        site: int,
    ) -> None: ...


class SteerTables:
    """One for each worker; what a forward pass reads is changed between steps."""

    def __init__(
        self,
        sites: Sequence[str],
        *,
        width: int,
        max_tokens: int,
        gate_slots: int,
        rows: int,
        programs: int,
        vocabulary: int,
        device: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is the model's: that of the rows."""
        self.sites, self.width, self.max_tokens = tuple(sites), width, max_tokens
        self.device, self.dtype = torch.device(device), dtype
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.vectors_VD = torch.zeros(rows, width, device=device)
        self.words_PSOW = torch.zeros(programs + 1, len(sites), MAX_OPS, OP_WORDS, **ints)
        self.reals_PSOW = self.words_PSOW.view(torch.float32)  # the same memory
        self.num_ops_PS = torch.zeros(programs + 1, len(sites), **ints)
        self.map_T4 = torch.zeros(max_tokens, MAP_WORDS, **ints)
        self.gates_TG = torch.zeros(max_tokens, MAX_GATES, device=device)
        self.state_ZG = torch.zeros(gate_slots, MAX_GATES, device=device)
        # The stateful gates of the request in this slot that read at this site, one bit each.
        self.reads_ZS = torch.zeros(gate_slots, len(sites), dtype=torch.uint8, device=device)
        self.special_K = torch.zeros(vocabulary, dtype=torch.uint8, device=device)
        # How often each site ran: proves that no compiled graph has lost one.
        self.ran_S = torch.zeros(len(sites), **ints)
        self.ran = self.ran_S.unbind()  # the same memory, site by site
        # In an engine that speculates: the state of each stateful gate behind each row of the step.
        self.states_TG: torch.Tensor | None = None
        self.token_ids_T: torch.Tensor | None = None
        self.positions_T: torch.Tensor | None = None
        self.num_mapped = 0  # the map is clear from this row on
        self.steer: SteerFunction = _choose_steer_function(self)

    @property
    def nbytes(self) -> int:
        """Device memory that the tables take."""
        held = (self.vectors_VD, self.words_PSOW, self.num_ops_PS, self.map_T4, self.gates_TG)
        small = (self.state_ZG, self.reads_ZS, self.special_K, self.ran_S)
        states = () if self.states_TG is None else (self.states_TG,)
        return sum(int(tensor.nbytes) for tensor in (*held, *small, *states))

    @property
    def keeps_states(self) -> bool:
        return self.states_TG is not None

    def leave_to_other_stages(self, names: Iterable[str]) -> None:
        """Other stages of a pipeline steer at these sites, and see to it that their ops run."""
        for name in names:
            self.ran_S[self.sites.index(name)] = 1

    def site(self, name: str) -> SteerSite:
        return SteerSite(self, self.sites.index(name))

    def use_token_ids(self, token_ids_T: torch.Tensor) -> None:
        """Read token ids from the runner's own buffer; call it before graphs are captured."""
        self.token_ids_T = token_ids_T

    def use_positions(self, positions_T: torch.Tensor) -> None:
        """Read positions that only the device knows from the runner's own buffer."""
        self.positions_T = positions_T

    def keep_states(self) -> None:
        """Keep the state behind each row, for `restore_states`; call it before graphs are captured.

        The column of a gate that a request does not have means nothing.
        """
        self.states_TG = torch.zeros_like(self.gates_TG)

    def restore_states(
        self,
        gate_slot_K: NDArray[np.int64],
        last_K: NDArray[np.int64],
        index_K: NDArray[np.int64],
        rejected_R: torch.Tensor,
    ) -> None:
        """Behind a step, in stream order: its last rows, `rejected_R[index_K]` each, never were.

        `last_K` is the last row of each request; at least one of its rows has been.
        """
        assert self.states_TG is not None
        slots_K, lasts_K, indices_K = self._upload(np.stack([gate_slot_K, last_K, index_K]))
        rows_K = lasts_K - rejected_R.index_select(0, indices_K)
        self.state_ZG.index_copy_(0, slots_K, self.states_TG.index_select(0, rows_K))

    def choose_programs(
        self, row_N: NDArray[np.int64], place_N: NDArray[np.int64], program_W: NDArray[np.int64]
    ) -> None:
        """Set the programs of rows whose positions only the device knows, in stream order.

        Row n runs `program_W[place_N[n] + its position]`.
        """
        assert self.positions_T is not None
        num_rows = len(row_N)
        given = self._upload(np.concatenate([row_N, place_N, program_W]))
        rows_N, places_N, programs_W = given.split([num_rows, num_rows, len(program_W)])
        at_N = self.positions_T.index_select(0, rows_N) + places_N
        chosen_N = programs_W.index_select(0, at_N).to(self.map_T4.dtype)
        self.map_T4[:, PROGRAM].index_copy_(0, rows_N, chosen_N)

    def _upload(self, values: NDArray[np.int64]) -> torch.Tensor:
        """A copy on the device that work launched from now on can read."""
        like = torch.from_numpy(values)
        if self.device.type != "cuda":
            return like
        staged = self._staged(like)
        staged.copy_(like)
        return staged.to(self.device, non_blocking=True)

    def kernel_arguments(self, site: int) -> tuple[Any, ...]:
        """The tables as arguments of a kernel at this site: see `steer` in steer_kernel.py."""
        program = (self.map_T4, self.words_PSOW, self.reals_PSOW, self.num_ops_PS)
        states_TG = self.gates_TG if self.states_TG is None else self.states_TG  # any: not written
        kept = (self.vectors_VD, self.gates_TG, self.state_ZG, states_TG, self.reads_ZS)
        token_ids_T, num_ids = self.map_T4, 0  # any tensor: nothing is read of 0 ids
        if self.token_ids_T is not None:
            token_ids_T, num_ids = self.token_ids_T, len(self.token_ids_T)
        tokens = (token_ids_T, self.special_K, self.ran_S)
        num_programs, num_sites = self.num_ops_PS.shape
        sizes = (num_programs, len(self.vectors_VD), len(self.state_ZG), num_ids)
        return (*program, *kept, *tokens, site, num_sites, *sizes, len(self.special_K))

    def set_special(self, token_ids: Sequence[int]) -> None:
        """Make exactly these the special tokens."""
        vocabulary = len(self.special_K)
        outside = [token_id for token_id in token_ids if not 0 <= token_id < vocabulary]
        if outside:
            raise ValueError(f"token {outside[0]} is outside the vocabulary of {vocabulary}")
        special_K = torch.zeros_like(self.special_K, device="cpu")
        special_K[list(token_ids)] = 1
        self.special_K.copy_(special_K)

    def put_map(self, map_N4: NDArray[np.int32]) -> None:
        """Write the first rows of the map."""
        self._put(self.map_T4[: len(map_N4)], map_N4)

    def put_rows(self, indices: Sequence[int], rows: Sequence[NDArray[np.float32]]) -> None:
        """Write vector rows through one block of pinned memory, which is expensive to allocate.

        Neighbouring rows are one copy: a request with a vector for every layer waits for it.
        """
        staged_ND = self._staged(self.vectors_VD[: len(rows)])
        for staged_D, values_D in zip(staged_ND.numpy(), rows, strict=True):
            if values_D.shape != (self.width,):
                raise ValueError(f"shape {values_D.shape} where {(self.width,)} belongs")
            staged_D[...] = values_D
        first = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or indices[end] != indices[end - 1] + 1:
                place = self.vectors_VD[indices[first] : indices[end - 1] + 1]
                place.copy_(staged_ND[first:end], non_blocking=True)
                first = end

    def _staged(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory for an asynchronous copy to `like`.

        torch reuses pinned memory only after the copies from it are done.
        """
        is_pinned = self.device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=is_pinned)

    def put_program(
        self, index: int, words_SOW: NDArray[np.int32], num_ops_S: NDArray[np.int32]
    ) -> None:
        self._put(self.words_PSOW[index], words_SOW)
        self._put(self.num_ops_PS[index], num_ops_S)

    def put_gate_state(self, gate_slot: int, reads_S: NDArray[np.uint8]) -> None:
        """Give a slot to the gates of another request, all closed."""
        self._put(self.reads_ZS[gate_slot], reads_S)
        self._put(self.state_ZG[gate_slot], np.zeros(self.state_ZG.shape[1], np.float32))

    def _put(self, place: torch.Tensor, values: NDArray[Any]) -> None:
        """Copy in stream order: work launched before still reads the old contents."""
        if values.shape != tuple(place.shape):
            raise ValueError(f"shape {values.shape} where {tuple(place.shape)} belongs")
        if self.device.type != "cuda":
            place.numpy()[...] = values
            return
        staged = self._staged(place)
        staged.numpy()[...] = values
        place.copy_(staged, non_blocking=True)

    def check_all_ran(self) -> None:
        ran_S = self.ran_S.tolist()
        missing = [name for name, ran in zip(self.sites, ran_S, strict=True) if not ran]
        if missing:
            raise TapMissingError(
                f"{len(missing)} of {len(self.sites)} steered sites did not run during warm-up "
                f"(first: {', '.join(missing[:4])}); the engine refuses to serve without them. "
                f"Clear vLLM's compile cache or set VLLM_DISABLE_COMPILE_CACHE=1, and report it"
            )


def _choose_steer_function(tables: SteerTables) -> SteerFunction:
    if tables.device.type == "cuda":
        from clairai.engine.steer.steer_kernel import SteerLauncher

        return SteerLauncher(tables.width)
    from clairai.engine.steer.steer_twin import steer_twin

    return steer_twin


class SteerSite:
    """One place in the forward pass where the residual stream can be changed."""

    def __init__(self, tables: SteerTables, index: int) -> None:
        self._tables = tables
        self._index = index

    def apply(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Called by the op inside the forward pass.

        A CUDA graph captures it once and replays it: fixed addresses, no host sync. The stream is
        `x + residual`, or `x` alone. A steered row goes into `residual`, with 0 in `x`, so that
        their sum is exactly the new row; without a residual it replaces the row in `x`.
        """
        x_TD = self._rows(x)
        residual_TD = None if residual is None else self._rows(residual)
        self._tables.steer(x_TD, residual_TD, self._tables, self._index)

    def _rows(self, given: torch.Tensor) -> torch.Tensor:
        """A view with one row per token; never a copy, since rows are changed in place."""
        rows_TD = given if given.dim() == 2 else given.view(-1, given.shape[-1])
        num_tokens, width = rows_TD.shape
        if num_tokens > self._tables.max_tokens or width != self._tables.width:
            raise TapMissingError(
                f"a forward of {num_tokens} rows of {width}, tables hold {self._tables.max_tokens} "
                f"of {self._tables.width}; max_num_batched_tokens is not what the engine reported: "
                f"please report this"
            )
        return rows_TD
