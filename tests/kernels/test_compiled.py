"""The steer kernel compiles for a GPU where there is none: the interpreter forgives more types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clairai.tap import steer_kernel

HOPPER = GPUTarget("cuda", 90, 32)
WIDTH = 4096
POINTERS = {
    **dict.fromkeys(("map_ptr", "words_ptr", "num_ops_ptr", "token_ids_ptr", "ran_ptr"), "*i32"),
    **dict.fromkeys(("reals_ptr", "vectors_ptr", "gates_ptr", "state_ptr"), "*fp32"),
    **dict.fromkeys(("reads_ptr", "special_ptr"), "*u8"),
}
CONSTANTS = ("BLOCK_D", "IS_PAIR")
ALIGNED = ("D", "stride_x", "stride_residual")  # as every real width is


def compiled(dtype: str, *, is_pair: bool) -> Any:
    types = POINTERS | dict.fromkeys(("x_ptr", "residual_ptr"), f"*{dtype}")
    names = steer_kernel.steer.arg_names
    signature = {n: "constexpr" if n in CONSTANTS else types.get(n, "i32") for n in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*types, *ALIGNED)}
    source = ASTSource(
        steer_kernel.steer, signature, {"BLOCK_D": WIDTH, "IS_PAIR": is_pair}, aligned
    )
    options = {"num_warps": 8, "enable_fp_fusion": True}
    return triton.compile(source, target=HOPPER, options=options)


@pytest.mark.parametrize(("dtype", "is_pair"), [("bf16", True), ("fp16", True), ("fp32", False)])
def test_a_row_stays_in_registers(
    dtype: str, is_pair: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compiled(dtype, is_pair=is_pair)
    assert made.asm["cubin"]
    assert ".local" not in made.asm["ptx"]  # where a compiler puts what does not fit
    assert made.metadata.shared <= 1024
