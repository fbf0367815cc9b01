"""Which modules of a model get ops of ours, and that these change nothing else."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clairai.compat import model_ops
from clairai.compat.model_ops import PLAIN_NORM, find_fusible
from clairai.compat.model_sites import Sites

WIDTH = 8


class Norm(nn.Module):  # type: ignore[misc]
    """Like vLLM's RMSNorm; its name is set below."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=changes.pop("dtype", torch.float32)))
        self.has_weight, self.variance_size_override = True, None
        for name, value in changes.items():
            setattr(self, name, value)


def norm_class(module: str, name: str) -> type[Norm]:
    return type(name, (Norm,), {"__module__": module})


@pytest.fixture
def sites() -> Sites:
    """A first norm, which gets one tensor; a plain one; and some that differ from it."""
    plain, gemma = norm_class(*PLAIN_NORM), norm_class(PLAIN_NORM[0], "GemmaRMSNorm")
    modules = {
        "pre_attn.0": plain(),
        "post_attn.0": plain(),
        "pre_attn.1": plain(dtype=torch.float64),
        "post_attn.1": plain(variance_size_override=4),
        "pre_attn.2": plain(has_weight=False),
        "post_attn.2": gemma(),
    }
    adding = frozenset(modules) - {"pre_attn.0"}
    return Sites(modules, adding, {}, {}, 3, WIDTH)


def config(*, device: str = "cuda", quant: object = None, ranks: int = 1) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        quant_config=quant,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


def test_only_plain_norms_of_two_tensors_are_replaced(sites: Sites) -> None:
    assert find_fusible(config(), sites, sites.modules) == ["post_attn.0"]


@pytest.mark.parametrize("engine", [config(device="cpu"), config(quant="fp8"), config(ranks=2)])
def test_no_norm_is_replaced_on_a_cpu_or_where_vllm_fuses_it_itself(
    engine: Any, sites: Sites
) -> None:
    assert find_fusible(engine, sites, sites.modules) == []


def test_no_norm_is_replaced_where_results_must_not_depend_on_the_batch(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert find_fusible(config(), sites, sites.modules) == []


class Mlp(nn.Module):  # type: ignore[misc]
    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD


def test_a_module_with_a_forward_of_its_own_is_tapped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM leaves an MLP of Hugging Face's, whose projections it has joined."""
    mlp, read = Mlp(), []
    setattr(mlp, "forward", MethodType(lambda _self, x_TD: 2 * x_TD, mlp))  # noqa: B010
    monkeypatch.setattr(model_ops, "encode_name", str)
    monkeypatch.setattr(torch.ops.clairai, "tap", lambda x, *_: read.append(x), raising=False)
    model_ops.attach_tap(mlp, None, name="site", token=torch.zeros(1))
    x_TD = torch.ones(3, WIDTH)
    assert torch.equal(mlp(x_TD), 2 * x_TD)
    assert read[0] is x_TD


@pytest.mark.parametrize("is_one", [True, False])
def test_a_norm_that_is_given_one_tensor_twice_is_steered_as_one(
    is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cohere's. As a pair the new row would be written and then cleared."""
    called: list[str] = []
    for name in ("steer", "steer_alone"):
        monkeypatch.setattr(
            torch.ops.clairai, name, lambda *_, name=name: called.append(name), raising=False
        )
    x_TD = torch.ones(3, WIDTH)
    model_ops._steer(x_TD, x_TD if is_one else x_TD.clone(), torch.zeros(1), "site")
    assert called == ["steer_alone" if is_one else "steer"]
