"""New weights under LoRA adapters: an adapter goes on to change whatever weights serve.

The truth is Hugging Face's model with the adapter merged into the weights that were sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import clairai
from tests.engine import adapters, models, ranked, weighed
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


class Adapted(NamedTuple):
    """A running engine, two sets of weights, an adapter, and both sets with it merged in."""

    engine: EngineProcess
    weights: tuple[Path, Path]
    adapter: Path
    merged: tuple[Path, Path]


@pytest.fixture(scope="module")
def adapted(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapted")
    old = models.tiny("llama", folder / "old")
    new = weighed.perturb(old, folder / "new", strength=1.0)
    adapter = adapters.make(old, folder / "adapter", seed=3, size=2.0)
    merged = [adapters.merge(each, adapter, folder / f"{each.name}-merged") for each in (old, new)]
    with EngineProcess(
        runtime=runtime,
        model=str(old),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        weight_transfer_config={"backend": "clairai_ipc"},
        additional_config=clairai.config(points=["post_block.1"]),
    ) as engine:
        yield Adapted(engine, (old, new), adapter, (merged[0], merged[1]))


def test_an_adapter_changes_the_weights_that_serve_after_a_hand_over(adapted: Adapted) -> None:
    engine = adapted.engine
    for weights, merged in zip(adapted.weights, adapted.merged, strict=True):
        engine.call(ranked.send, str(weights))
        assert engine.call(ranked.answers) == ranked.greedy(weights)
        assert engine.call(ranked.answers, str(adapted.adapter)) == ranked.greedy(merged)


def test_a_part_of_the_model_is_sent_by_the_names_of_the_checkpoint(adapted: Adapted) -> None:
    """vLLM renames the layers that adapters wrap."""
    engine, (old, new) = adapted.engine, adapted.weights
    engine.call(ranked.send, str(old))
    engine.call(ranked.send_part, new, ranked.is_attention)
    kind, text = engine.call(ranked.refuse_part, new, ranked.is_query)
    assert (kind, "k_proj.weight" in text) == ("WeightsError", True)
    engine.call(ranked.send_part, new, ranked.is_no_attention)
    assert engine.call(ranked.answers) == ranked.greedy(new)
    assert engine.call(ranked.answers, str(adapted.adapter)) == ranked.greedy(adapted.merged[1])
