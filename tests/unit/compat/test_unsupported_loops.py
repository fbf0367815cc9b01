"""Owners whose loop changes the stream, or runs blocks twice, lose the points that would lie."""

from __future__ import annotations

from typing import Any

import pytest

from clairai.compat.model_sites import BLOCKS_REPEATED, STREAM_CHANGED, find_unsupported_points
from clairai.points import POINT_KINDS


class Plain:
    layers: Any

    def forward(self, hidden: Any, residual: Any) -> Any:
        kept = []
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual)
            kept.append(hidden + residual if index else hidden)
        return hidden, kept


class Added:
    layers: Any

    def forward(self, hidden: Any, extra: Any) -> Any:
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if index in extra:
                hidden = hidden + extra[index]
        return hidden


class Skipped:
    layers: Any

    def forward(self, hidden: Any, residual: Any, early: Any) -> Any:
        for index in range(4):
            layer = self.layers[index]
            hidden, residual = layer(hidden, residual)
            residual += early
        return hidden, residual


class Looped:
    layers: Any

    def forward(self, hidden: Any) -> Any:
        for _ in range(2):
            for layer in self.layers:
                hidden = layer(hidden)
        return hidden


def test_a_loop_that_only_runs_blocks_keeps_every_point() -> None:
    assert find_unsupported_points(Plain) == {}


@pytest.mark.parametrize("owner", [Added, Skipped])
def test_a_loop_that_changes_the_stream_has_no_post_block(owner: type[Any]) -> None:
    assert find_unsupported_points(owner) == {"post_block": f"{owner.__name__} {STREAM_CHANGED}"}


def test_blocks_that_run_twice_have_no_points() -> None:
    assert find_unsupported_points(Looped) == dict.fromkeys(
        POINT_KINDS, f"Looped {BLOCKS_REPEATED}"
    )


def test_the_real_loops_of_vllm_are_told_apart() -> None:
    llama = pytest.importorskip("vllm.model_executor.models.llama")
    qwen3_vl = pytest.importorskip("vllm.model_executor.models.qwen3_vl")
    solar = pytest.importorskip("vllm.model_executor.models.solar")
    assert find_unsupported_points(llama.LlamaModel) == {}
    assert [*find_unsupported_points(qwen3_vl.Qwen3LLMModel)] == ["post_block"]
    assert [*find_unsupported_points(solar.SolarModel)] == ["post_block"]
