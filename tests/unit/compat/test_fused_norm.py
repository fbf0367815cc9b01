"""Which norms are ours on a GPU: plain ones that are given two tensors, where vLLM fuses none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clairai.compat.model_ops import PLAIN_NORM, find_fusible
from clairai.compat.model_sites import Sites

WIDTH = 8


class Norm(nn.Module):  # type: ignore[misc]
    """As vLLM's RMSNorm is made; its name is set below."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=changes.pop("dtype", torch.float32)))
        self.has_weight, self.variance_size_override = True, None
        for name, value in changes.items():
            setattr(self, name, value)


def of(module: str, name: str) -> type[Norm]:
    return type(name, (Norm,), {"__module__": module})


@pytest.fixture
def sites() -> Sites:
    """A first norm, which is given one tensor; a plain one; others that are not quite that."""
    plain, gemma = of(*PLAIN_NORM), of(PLAIN_NORM[0], "GemmaRMSNorm")
    modules = {
        "pre_attn.0": plain(),
        "post_attn.0": plain(),
        "pre_attn.1": plain(dtype=torch.float64),
        "post_attn.1": plain(variance_size_override=4),
        "pre_attn.2": plain(has_weight=False),
        "post_attn.2": gemma(),
    }
    adding = frozenset(modules) - {"pre_attn.0"}
    return Sites(modules, {}, adding, {}, {}, 3, WIDTH)


def config(*, device: str = "cuda", quant: object = None, ranks: int = 1) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        quant_config=quant,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


def test_a_plain_norm_of_two_tensors_is_ours_and_no_other(sites: Sites) -> None:
    assert find_fusible(config(), sites, sites.modules) == ["post_attn.0"]


@pytest.mark.parametrize("engine", [config(device="cpu"), config(quant="fp8"), config(ranks=2)])
def test_no_norm_is_ours_on_a_cpu_or_where_vllm_fuses_it_with_its_neighbour(
    engine: Any, sites: Sites
) -> None:
    assert find_fusible(engine, sites, sites.modules) == []


def test_no_norm_is_ours_where_batches_must_not_matter(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert find_fusible(config(), sites, sites.modules) == []
