"""The checksum kernels compile for a GPU, which the interpreter does not check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clairai.weights import checksum_kernel

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_checksum_stays_in_registers_and_reads_16_bytes_at_once(
    is_copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = checksum_kernel.sum_parts
    constants = {**checksum_kernel.CONSTANTS, "IS_COPIED": is_copied}
    signature = {n: "constexpr" if n in constants else "i32" for n in kernel.arg_names}
    signature |= {"table_ptr": "*i64", "sums_ptr": "*i64"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1)}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": checksum_kernel.NUM_WARPS, "enable_fp_fusion": True}
    made = triton.compile(source, target=HOPPER, options=options)
    assert made.asm["cubin"]
    assert ".local" not in made.asm["ptx"]  # registers spilled to local memory
    wide = [line for line in made.asm["ptx"].splitlines() if ".v2.b64" in line]
    stores = sum("st.global" in line for line in wide)
    # 16 bytes for each row of the tile; without known alignment they would be 8.
    assert len(wide) - stores == checksum_kernel.TILE_R
    assert stores == (checksum_kernel.TILE_R if is_copied else 0)
    assert made.metadata.shared <= 1024
