"""Quantised models, and dtypes of 16 bits: values, steering and captures against Hugging Face.

Hugging Face has the weights that the quantised checkpoint stands for, as plain ones, and rounds the
inputs of its linear layers where the format does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from tests.engine import quantised
from tests.engine.quantised import Quantised
from tests.fidelity import dtype_floor
from tests.fidelity.dtype_floor import Distance, Observed, Truth, Wanted
from tests.fidelity.test_architectures import POINTS, PROMPTS, WIDTH, start

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WANTED: Final = Wanted(PROMPTS, POINTS, WIDTH, ("pre_attn.1", "post_attn.2", "post_block.3"))
Make = Callable[[str], Quantised]


@pytest.fixture(scope="session")
def made(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("quantised")
    known: dict[str, Quantised] = {"plain": Quantised(tiny("llama"), tiny("llama"))}

    def make(form: str) -> Quantised:
        if form not in known:
            known[form] = quantised.quantise(tiny("llama"), folder, form)
        return known[form]

    return make


def observe(folder: Path, runtime: Path, scratch: Path, dtype: str, **changes: Any) -> Observed:
    capture = {"folder": str(scratch / "captures")}
    config = clairai.config(points=["all"], capacity=2 * WIDTH, steering=True, capture=capture)
    with start(folder, runtime, dtype=dtype, additional_config=config, **changes) as engine:
        return dtype_floor.observe(engine, WANTED)


def captures_of(found: Observed, truth: Truth) -> dict[str, Distance]:
    return dtype_floor.measure_captures(found.captured, truth, PROMPTS[-1], POINTS)


@pytest.mark.parametrize(
    "is_eager", [True, pytest.param(False, marks=pytest.mark.wide, id="compiled")]
)
def test_a_model_in_w8a8_has_the_values_of_one_that_rounds_its_inputs_as_it_does(
    is_eager: bool, made: Make, runtime: Path, tmp_path: Path, report: Callable[..., None]
) -> None:
    """In float32. A value may fall on the other side of a rounding: then its row is a step off."""
    folders = made("w8a8")
    found = observe(folders.folder, runtime, tmp_path, "float32", enforce_eager=is_eager)
    truth = Truth(folders.plain, "float32", quantised.round_inputs_to_int8)
    unrounded = dtype_floor.measure_values(found, Truth(folders.plain, "float32"), POINTS)
    for point, distance in dtype_floor.measure_values(found, truth, POINTS).items():
        report(test="form", form="w8a8", dtype="float32", point=point, **distance.numbers)
        assert distance.numbers["p90"] <= 1e-5, point
        assert distance.engine.max() <= 0.1, point
        if point != "pre_attn.0":  # it would show
            assert np.median(unrounded[point].engine) > 1e-3, point
    for point, distance in captures_of(found, truth).items():
        assert distance.numbers["p90"] <= 1e-5, point
    assert dtype_floor.measure_steering(found.steered, truth, WANTED).engine.max() <= 1e-3
    assert dtype_floor.measure_steering(found.plain, truth, WANTED).engine.max() > 0.1


WIDE: Final = (
    *(("w4a16", "float16"), ("gptq", "bfloat16"), ("gptq", "float16"), ("awq", "bfloat16")),
    *(("awq", "float16"), ("w8a8", "bfloat16"), ("w8a8", "float16")),
    *(("plain", "bfloat16"), ("plain", "float16")),
)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("w4a16", "bfloat16"), *(pytest.param(*pair, marks=pytest.mark.wide) for pair in WIDE)],
)
def test_everything_in_16_bits_is_as_near_as_hugging_face_in_that_dtype_is(
    form: str,
    dtype: str,
    made: Make,
    runtime: Path,
    tmp_path: Path,
    report: Callable[..., None],
) -> None:
    folders = made(form)
    found = observe(folders.folder, runtime, tmp_path, dtype)
    change = quantised.round_inputs_to_int8 if form == "w8a8" else None
    truth = Truth(folders.plain, dtype, change)
    for point, distance in dtype_floor.measure_values(found, truth, POINTS).items():
        report(test="form", form=form, dtype=dtype, point=point, **distance.numbers)
        assert distance.is_near, (point, distance.numbers)
    for point, distance in captures_of(found, truth).items():
        assert distance.is_near, (point, distance.numbers)
    steered = dtype_floor.measure_steering(found.steered, truth, WANTED)
    report(test="form", form=form, dtype=dtype, point="logprobs, steered", **steered.numbers)
    assert steered.is_near, steered.numbers
    assert not dtype_floor.measure_steering(found.plain, truth, WANTED).is_near  # it would show
    if change is not None:
        unrounded = Truth(folders.plain, dtype)
        shares = dtype_floor.measure_shares(found, truth, unrounded, POINTS[1:])
        for engine, floor in shares.values():
            assert engine >= max(floor - 0.15, 0.2), shares
