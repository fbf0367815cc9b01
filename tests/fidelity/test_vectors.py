"""The shipped vectors, whose rows vLLM computed, are what Hugging Face computes from the pairs.

N = texts, T = tokens of the longest, D = model width
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clairai.points import Point
from clairai.vector.files import load
from scripts.make_demo_vectors import FOLDER, KINDS, PAIRS, Kind
from tests.engine import models

pytestmark = pytest.mark.timeout(900)

NUM_UNSETTLED = 4  # the first tokens of an answer do not count


@dataclass(frozen=True)
class Speaker:
    """As much of the model as the vectors are of, and its tokenizer."""

    network: Any
    tokenizer: Any

    def mean_rows(self, point: Point, chats: list[tuple[str, str]]) -> NDArray[np.float64]:
        """Of each answer the mean of its rows at the point, [N, D]."""
        import torch

        encoded = [self._encoded(*chat) for chat in chats]
        longest = max(len(ids) for ids, _ in encoded)
        # Padded on the right, where nothing before looks at it: the model is causal.
        ids_NT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in encoded])
        with torch.no_grad():
            states = self.network(ids_NT, output_hidden_states=True).hidden_states
        # hidden_states[0] is the embedding: the output of block L is at L + 1
        rows_NTD = states[point.layer + 1].double()
        means = [rows_NTD[index, said].mean(0) for index, (_, said) in enumerate(encoded)]
        return np.stack([mean.numpy() for mean in means])

    def _encoded(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids, and the places of those that count."""
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first = text.rindex(answer)
        ends = [end for _, end in encoded["offset_mapping"]]
        said = [at for at, end in enumerate(ends) if first < end <= first + len(answer)]
        return encoded["input_ids"], said[NUM_UNSETTLED:]


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = str(models.real())
    network = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    last = max(point.layer for kind in KINDS for point in _vector(kind).points)
    network.layers = network.layers[: last + 2]  # the last state has had the final norm applied
    return Speaker(network, AutoTokenizer.from_pretrained(folder))


def _vector(kind: Kind) -> Any:
    return load(FOLDER / f"{kind.name}.safetensors")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_shipped_vector_is_the_difference_of_means_of_its_pairs(
    speaker: Speaker, kind: Kind
) -> None:
    pairs = [json.loads(line) for line in (PAIRS / f"{kind.name}.jsonl").read_text().splitlines()]
    vector = _vector(kind)
    last = vector.points[-1]  # what is right there went through all that is before it
    positive_ND, negative_ND = (
        speaker.mean_rows(last, [(pair["prompt"], pair[side]) for pair in pairs])
        for side in ("positive", "negative")
    )
    expected_D = positive_ND.mean(axis=0) - negative_ND.mean(axis=0)
    np.testing.assert_allclose(vector.rows[last], expected_D, rtol=0, atol=2e-4)
    assert np.linalg.norm(expected_D) > 10
