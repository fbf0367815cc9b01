"""What a load needs is measured from the model and from the KV cache that the engine really has."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from clairai.compat.weight_transfer import LOAD_COPIES, measure_needs
from clairai.weights.room import LoadNeeds

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(64, 32, bias=False))


def cache(num_pages: int) -> torch.Tensor:
    pages = mmap.mmap(-1, num_pages * PAGE, mmap.MAP_PRIVATE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.int8)


def config(**caches: object) -> SimpleNamespace:
    layers = {name: SimpleNamespace(kv_cache=found) for name, found in caches.items()}
    layers["norm"] = SimpleNamespace()  # a layer without a cache
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_loading_takes_copies_of_the_largest_layer() -> None:
    needs = measure_needs(model(), config(), CPU)
    assert needs.host_nbytes == LOAD_COPIES * 64 * 32 * 4
    assert needs.promised_nbytes == 0


@pytest.mark.parametrize(("quantization", "copies"), [(None, 2), ("fp8", 4)])
def test_on_a_gpu_its_own_memory_is_asked_for_and_what_torch_keeps_is_free(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, copies: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    settings = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))
    needs = measure_needs(model(), settings, torch.device("cuda"))
    assert needs == LoadNeeds(gpu_nbytes=copies * 64 * 32 * 4, gpu_free_nbytes=1200)


def test_a_cache_is_promised_as_far_as_it_has_no_pages_and_a_shared_one_counts_once() -> None:
    own, shared = cache(16), cache(8)
    shared[2 * PAGE] = 1
    caches = config(a=own, b=[shared[: 4 * PAGE]], c=[[shared[4 * PAGE :]]], d=None)
    assert measure_needs(model(), caches, CPU).promised_nbytes == (16 + 7) * PAGE
    own.fill_(1)
    assert measure_needs(model(), caches, CPU).promised_nbytes == 7 * PAGE
