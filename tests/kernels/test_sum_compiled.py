"""The kernels of checksums compile for a GPU where there is none: the interpreter forgives more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clairai.weights import sum_kernel

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize("kernel", [sum_kernel.sum_parts, sum_kernel.copy_parts])
def test_a_checksum_stays_in_registers(
    kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = dict(sum_kernel.CONSTANTS)
    signature = {n: "constexpr" if n in constants else "*i64" for n in kernel.arg_names}
    aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1)}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": sum_kernel.NUM_WARPS, "enable_fp_fusion": True}
    made = triton.compile(source, target=HOPPER, options=options)
    assert made.asm["cubin"]
    assert ".local" not in made.asm["ptx"]  # where a compiler puts what does not fit
    assert made.metadata.shared <= 1024
