"""The projection kernel makes the bytes of rp8, bit for bit, for rows of every kind.

M = rows, D = model width, K = projected.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from clairai.engine.capture import rp8_kernel
from clairai.engine.capture.encode import signs_twin
from clairai.store.codecs.rp8 import Rp8
from tests.kernels.planting import planted

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def rows(num_rows: int, width: int, seed: int) -> torch.Tensor:
    """Of very different sizes, some zero."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((num_rows, width)) * 10.0 ** rng.integers(-4, 4, (num_rows, 1))
    made[rng.random((num_rows, width)) < 0.2] = 0
    return torch.tensor(made, dtype=torch.float32)


def differences(rows_MD: torch.Tensor, encoder: Rp8, module: ModuleType = rp8_kernel) -> list[str]:
    signs_KD = signs_twin(encoder.seed, rows_MD.shape[1], encoder.k, CPU).t().contiguous()
    with np.errstate(all="ignore"):  # numpy warns of what a GPU computes in silence
        found = module.encode_rp8(rows_MD, signs_KD)
    expected = encoder.encode(rows_MD.float().numpy())
    assert set(found) == set(expected)
    return [n for n in found if found[n].numpy().tobytes() != expected[n].tobytes()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width", "k"), [(1, 1, 1), (3, 70, 5), (33, 64, 65)])
def test_the_bytes_are_those_of_the_codec(num_rows: int, width: int, k: int, dtype: str) -> None:
    given = rows(num_rows, width, seed=k).to(DTYPES[dtype])
    assert differences(given, Rp8(k=k, seed=7)) == []


def test_whatever_is_no_number_and_whatever_is_nothing() -> None:
    given = rows(8, 40, seed=1)
    given[0] = 0
    given[1, 3] = torch.inf
    given[2, 3], given[2, 9] = torch.inf, torch.inf
    given[3, 3], given[3, 9] = torch.inf, -torch.inf
    given[4, 11] = torch.nan
    given[5] = torch.inf
    given[6] = 3.5
    given[7] = torch.finfo(torch.float32).tiny / 1024  # below what is normal
    assert differences(given, Rp8(k=33, seed=3)) == []


def test_rows_beyond_those_taken_at_once_are_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rp8_kernel, "MAX_ROWS", 5)
    assert differences(rows(13, 70, seed=4), Rp8(k=5)) == []


def test_sums_beyond_those_combined_at_once_are_combined_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rp8_kernel, "COMBINED_K", 16)
    assert differences(rows(30, 200, seed=4), Rp8(k=150)) == []


def test_no_rows_are_no_rows() -> None:
    assert differences(torch.zeros(0, 16), Rp8(k=4)) == []


PLANTED = {
    "a limb is lost": ("tl.load(in_ptr + 3 * step", "0 * tl.load(in_ptr + 3 * step"),
    "limbs of seven bits": ("(whole - limb) >> 8", "(whole - limb) >> 7"),
    "one row's scale for all": ("tl.load(exponent_ptr + row)", "tl.load(exponent_ptr)"),
    "one infinity hides another": ("(tl.abs(infinite_K) < count)", "(count < -2)"),
    "one sign for all infinities": ("tl.where(x_D > 0, 1, -1)", "1"),
    "planes overlap": ("out_ptr + 2 * step", "out_ptr + step"),
    "NaN is zero": ("tl.where(num_nan > 0, -1, count)", "count"),
    "the lower end is the first": ("tl.min(tl.where(", "tl.max(tl.where("),
    "sums are too close": ("[:, None] * S", "[:, None] * K"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    given = rows(6, 40, seed=2)
    given[1, 3] = given[2, 3] = torch.inf
    given[2, 9] = -torch.inf
    given[4, 11] = torch.nan
    assert differences(given, Rp8(k=20), planted(rp8_kernel, tmp_path, *PLANTED[bug]))
