"""The branch joins at the start of a block's attention, where there is exactly one to join at."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from clairai.compat import model_ops


class Attention(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Stands where vLLM's own stands; tests/engine uses that one."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, *, scale: float = 1.0) -> Any:
        self.given = (query, key, scale)
        return query + key * scale


class OtherAttention(Attention):
    pass


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.projection = nn.Linear(2, 2)
        self.inner = nn.ModuleList(inner)


@pytest.fixture(autouse=True)
def vllm_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing vLLM itself takes seconds, warns and logs."""
    module = ModuleType("vllm.model_executor.layers.attention")
    module.Attention = Attention  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_one_attention_of_a_block_is_found() -> None:
    attention = Attention()
    assert model_ops.find_attention(Block(nn.Linear(1, 1), attention)) is attention


@pytest.mark.parametrize(
    "block",
    [Block(), Block(Attention(), Attention()), Block(OtherAttention())],
    ids=["none", "two", "another kind"],
)
def test_a_block_without_exactly_one_plain_attention_is_tapped_without_a_branch(
    block: Block,
) -> None:
    assert model_ops.find_attention(block) is None


def test_a_joined_attention_waits_first_and_then_does_what_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention, token = Attention(), torch.zeros(1, dtype=torch.int32)
    waited: list[object] = []

    def join(x: torch.Tensor, given_token: torch.Tensor) -> None:
        assert not hasattr(attention, "given")
        waited.extend((x, given_token))

    monkeypatch.setattr(torch.ops.clairai, "join", join, raising=False)
    model_ops.attach_join(attention, token)
    query, key = torch.randn(3, 2), torch.randn(3, 2)
    found = attention(query, key, scale=2.0)
    assert waited[0] is query
    assert waited[1] is token
    assert torch.equal(found, query + key * 2.0)
    assert attention.given[0] is query
    assert isinstance(attention, Attention)
