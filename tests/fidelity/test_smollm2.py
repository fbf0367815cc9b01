"""Every value tapped in the real model equals Hugging Face's, decode positions too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

import clairai
from tests.engine import models
from tests.engine.process import EngineProcess
from tests.fidelity.scenarios import judge, tap_everything

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.timeout(900)]

WIDTH: Final = 576
LAYERS: Final = (0, 9, 19, 29)
POINTS: Final = [
    f"{k}.{layer}" for layer in LAYERS for k in ("pre_attn", "post_attn", "post_block")
]
TEXTS: Final = [
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
    "Dear Sir or Madam,\n\nI am writing to ask about the position that was advertised last week in "
    "the evening newspaper. I have worked for several years in a library, where I looked after the "
    "catalogue and helped visitors to find what they were looking for. I would be glad to come for "
    "an interview at any time that suits you.\n\nYours faithfully,",
]


def test_pitfall_02_every_value_is_hidden_plus_residual_as_hugging_face_has_it(
    runtime: Path, report: Callable[..., None]
) -> None:
    folder = models.real()
    with EngineProcess(
        runtime=runtime,
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,  # the long text is prefilled in three chunks
        additional_config=clairai.config(points=POINTS, capacity=WIDTH),
    ) as engine:
        tapped = engine.call(tap_everything, TEXTS, POINTS, WIDTH, 12)
    # Finer than the engine, whose rounding alone is to be seen: after 20 layers Hugging Face in
    # float32 is itself up to 9e-6 from that, on some processors.
    results = judge(tapped, folder, dtype="float64")
    report(test="fidelity", arch="smollm2", p999=max(result.p999 for result in results))
    assert [result.point for result in results] == POINTS
    for result in results:
        assert result.num_decode_rows == 11 * len(TEXTS)
        assert result.p999 <= 1e-5, result
        assert result.worst <= 1e-4, result
