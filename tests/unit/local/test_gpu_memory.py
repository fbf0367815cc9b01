"""GPU memory on a toy driver, which answers the same calls as the real one."""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as real

from clairai.errors import RingError
from clairai.local.gpu_memory import HANDLE_BYTES, Gpu
from tests.support.cuda import CUresult, ToyDriver, install

CALLS = [name for name in vars(ToyDriver) if name.startswith("cu")]


def parameters_of(name: str) -> int:
    """The number of parameters of the real function, from its documentation."""
    head = getattr(real, name).__doc__.splitlines()[0]
    between = re.fullmatch(rf"{name}\((.*)\)", head)
    assert between is not None, head
    return len(between[1].split(",")) if between[1] else 0


def test_every_call_of_the_toy_is_one_of_the_real_driver_with_as_many_parameters() -> None:
    expected = {name: parameters_of(name) for name in CALLS}
    toy = {name: len(inspect.signature(vars(ToyDriver)[name]).parameters) - 1 for name in CALLS}
    assert toy == expected
    assert len(CALLS) > 15


def test_statuses_flags_and_attributes_have_the_names_that_are_asked_for() -> None:
    for status in CUresult:
        found = getattr(real.CUresult, status.name)
        assert (found.name, found) == (status.name, status)
    toy = ToyDriver()
    assert real.CU_MEMHOSTREGISTER_PORTABLE == toy.CU_MEMHOSTREGISTER_PORTABLE
    assert real.CU_MEMHOSTREGISTER_DEVICEMAP == toy.CU_MEMHOSTREGISTER_DEVICEMAP
    assert real.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE.value == 12  # cuda.h


def test_the_bytes_of_a_handle_reach_the_real_handle_and_come_back() -> None:
    raw = bytes(range(64))
    handle = Gpu.ipc_handle(SimpleNamespace(_driver=real), raw)  # type: ignore[arg-type]
    assert ctypes.string_at(handle.getPtr(), HANDLE_BYTES) == raw


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyDriver]:
    toy = install(monkeypatch)
    yield toy
    assert (toy.held, toy.opened) == ({}, set()), "a test must free what it allocates"


def test_without_cuda_bindings_the_error_names_the_package_and_the_host_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RingError, match=r"cuda-bindings; install it, .*\"ring_home\": \"host\""):
        Gpu(0)


def test_host_memory_is_mapped_for_the_gpu_and_unmapped_again(driver: ToyDriver) -> None:
    gpu = Gpu(0)
    there = gpu.map_host(4096, 8192)
    assert len(driver.held[4096]) == 8192
    assert there != 4096
    gpu.unmap_host(4096)
    assert driver.context == "context of 0"


def test_an_event_belongs_to_its_gpu_and_has_no_timing(driver: ToyDriver) -> None:
    assert (Gpu(1).event(), driver.context) == ("event of kind 2", "context of 1")
