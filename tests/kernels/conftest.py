"""Runs the kernels in Triton's interpreter, on tensors of the host (TRITON_INTERPRET).

Triton reads the variable when a kernel is defined, so a process either interprets or compiles. A
plain run of pytest collects test_compiled.py and test_interpreted.py; that one starts an
interpreting process, which collects the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = ("test_compiled.py", "test_interpreted.py", "test_checksum_compiled.py")
INTERPRETED = (
    "test_device_transfer.py",
    "test_norm_kernel.py",
    "test_project_kernel.py",
    "test_publish_in_graph.py",
    "test_publish_kernel.py",
    "test_publish_planted.py",
    "test_score_kernel.py",
    "test_stash_kernel.py",
    "test_stash_copy_kernel.py",
    "test_steer_kernel.py",
    "test_checksum_kernel.py",
)
collect_ignore = list(COMPILED if IS_INTERPRETING else INTERPRETED)


@pytest.fixture(scope="session", autouse=IS_INTERPRETING)
def bfloat16_products() -> Iterator[None]:
    """The interpreter multiplies the bits of a bfloat16 as if they were an integer's; mend that.

    Triton's documentation names it a known limitation. A bfloat16 is the upper half of a float32.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits: NDArray[np.uint32] = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: object, a: TensorHandle, b: TensorHandle, *given: object) -> TensorHandle:
        return original(self, widened(a), widened(b), *given)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield
