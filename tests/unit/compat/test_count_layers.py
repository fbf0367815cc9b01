"""Layers are counted as Hugging Face's list of decoder layers has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clairai.compat.count_layers import count_layers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 4}, 4),
        ({"num_hidden_layers": 56, "num_layers": 28}, 28),  # LongCat: attentions, and layers
        ({"num_hidden_layers": 4, "num_layers": 4}, 4),  # ChatGLM: the same by two names
        ({"num_hidden_layers": 4, "num_layers": None}, 4),
    ],
)
def test_layers_are_those_of_the_list(config: dict[str, int], expected: int) -> None:
    assert count_layers(SimpleNamespace(hf_text_config=SimpleNamespace(**config))) == expected
