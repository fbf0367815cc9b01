"""The kernel that fills the stash copies rows bit by bit, and writes nothing else.

T = tokens, D = model width, R = rows of the stash.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from clairai.engine.score import stash_copy_kernel
from clairai.engine.score.score_tables import CopyFunction, copy_to_stash_twin
from clairai.engine.score.stash_copy_kernel import MAX_BLOCK_D, StashCopier
from tests.kernels.planting import planted

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NOTHING = 7.0  # where no row was written
SHAPES = [(1, 1, 4), (3, 70, 4), (5, 70, 4), (4, 576, 4), (2, MAX_BLOCK_D + 1, 2), (3, 3000, 8)]


def rows(num_tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, width, generator=generator).to(dtype)


def stashed_by(copy: CopyFunction, rows_TD: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    """Copy twice to the middle one of three stashes; returns all stashes, and which sites ran."""
    stash_SRD = torch.full((3, num_rows, rows_TD.shape[1]), NOTHING, dtype=rows_TD.dtype)
    ran_S = torch.zeros(3, dtype=torch.int32)
    for _ in range(2):  # a second step notes the same
        copy(rows_TD, stash_SRD[1], ran_S[1])
    return [stash_SRD, ran_S]


def check(rows_TD: torch.Tensor, num_rows: int, module: ModuleType = stash_copy_kernel) -> None:
    found = stashed_by(module.StashCopier(rows_TD.shape[1]), rows_TD, num_rows)
    expected = stashed_by(copy_to_stash_twin, rows_TD, num_rows)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width", "num_rows"), SHAPES)
def test_it_copies_what_the_stash_holds_and_nothing_else(
    num_tokens: int, width: int, num_rows: int, dtype: str
) -> None:
    check(rows(num_tokens, width, DTYPES[dtype]), num_rows)


def test_the_twin_copies_the_first_rows_and_notes_that_it_ran() -> None:
    rows_TD = rows(5, 3)
    stash_SRD, ran_S = stashed_by(copy_to_stash_twin, rows_TD, 4)
    assert torch.equal(stash_SRD[1], rows_TD[:4])
    assert (stash_SRD[[0, 2]] == NOTHING).all()
    assert ran_S.tolist() == [0, 1, 0]


def test_rows_may_lie_in_larger_memory_and_their_numbers_apart() -> None:
    memory = rows(6, 200)
    check(memory[:, 30:100], 4)
    check(memory[::2, 30:100], 4)
    check(memory[:, ::2], 4)
    check(memory.T, 4)


def test_a_forward_without_rows_launches_nothing() -> None:
    stash_SRD, ran_S = stashed_by(StashCopier(8), rows(0, 8), 4)
    assert (stash_SRD == NOTHING).all()
    assert not ran_S.any()


PLANTED = {
    "rows lie side by side": ("far * stride_x + d", "far * D + d"),
    "all rows go to the first place": ("stash_ptr + far * D", "stash_ptr + far * 0"),
    "only the first block": ("d = block * BLOCK_D + ", "d = 0 * block + "),
    "beyond the width": ("x_D, mask=d < D)", "x_D, mask=d < D + 1)"),
    "it never ran": ("tl.store(ran_ptr, 1)", "tl.store(ran_ptr, 0)"),
    "more rows than the stash holds": (
        "min(len(rows_TD), len(stash_RD))",
        "len(rows_TD)",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    module = planted(stash_copy_kernel, tmp_path, *PLANTED[bug])
    with pytest.raises(AssertionError):
        check(rows(5, 2200)[:, 20 : MAX_BLOCK_D + 25], 4, module)
