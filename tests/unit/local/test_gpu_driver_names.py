"""The toy driver answers to the same calls as the real one; the package itself needs no GPU."""

from __future__ import annotations

import ctypes
import inspect
import re
from types import SimpleNamespace

from cuda.bindings import driver

from clairai.local.gpu_memory import HANDLE_BYTES, Gpu
from tests.support.cuda import CUresult, ToyDriver

CALLS = [name for name in vars(ToyDriver) if name.startswith("cu")]


def parameters_of(name: str) -> int:
    """How many the real function takes: its first line of documentation says so."""
    head = getattr(driver, name).__doc__.splitlines()[0]
    between = re.fullmatch(rf"{name}\((.*)\)", head)
    assert between is not None, head
    return len(between[1].split(",")) if between[1] else 0


def test_every_call_of_the_toy_is_one_of_the_real_driver_with_as_many_parameters() -> None:
    real = {name: parameters_of(name) for name in CALLS}
    toy = {name: len(inspect.signature(vars(ToyDriver)[name]).parameters) - 1 for name in CALLS}
    assert toy == real
    assert len(CALLS) > 15


def test_statuses_flags_and_attributes_have_the_names_that_are_asked_for() -> None:
    for status in CUresult:
        real = getattr(driver.CUresult, status.name)
        assert (real.name, real) == (status.name, status)
    toy = ToyDriver()
    assert driver.CU_MEMHOSTREGISTER_PORTABLE == toy.CU_MEMHOSTREGISTER_PORTABLE
    assert driver.CU_MEMHOSTREGISTER_DEVICEMAP == toy.CU_MEMHOSTREGISTER_DEVICEMAP
    assert driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE.value == 12  # cuda.h


def test_the_bytes_of_a_handle_reach_the_real_handle_and_come_back() -> None:
    raw = bytes(range(64))
    handle = Gpu.ipc_handle(SimpleNamespace(_driver=driver), raw)  # type: ignore[arg-type]
    assert ctypes.string_at(handle.getPtr(), HANDLE_BYTES) == raw
