"""On a GPU: quantised models under captured graphs have the values of what they stand for.

Formats whose kernels CUDA alone has: fp8 (made while the model is loaded), W8A8 (CUTLASS), W4A16,
GPTQ and AWQ (Marlin, or what vLLM takes before it). In float16, which is nearer to float64 than
bfloat16 is: a wrong value then shows beside what rounding does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import clairai
from tests.engine import models, quantised
from tests.engine.process import EngineProcess
from tests.engine.quantised import Quantised
from tests.fidelity import dtype_floor
from tests.fidelity.dtype_floor import Distance, Observed, Truth, Wanted
from tests.gpu import forced

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

DTYPE: Final = "float16"
POINTS: Final = [
    *("pre_attn.0", "post_attn.0", "post_block.0", "post_attn.2", "post_block.2", "post_block.3"),
]
WANTED: Final = Wanted(
    models.random_prompts(5, (1, 7, 50, 200), forced.VOCABULARY),
    POINTS,
    forced.WIDTH,
    ("post_attn.2", "post_block.3"),
    strength=8.0,  # in fp8 rounding changes logprobs by 0.4
)
FORMS: Final = ("plain", "fp8", "w8a8", "w4a16", "gptq", "awq")
CHANGES: Final[dict[str, Callable[[Any], None]]] = {
    "fp8": partial(quantised.round_to_fp8, served=DTYPE),
    "w8a8": quantised.round_inputs_to_int8,
}


def start(form: str, folder: Path, runtime: Path, captures: Path) -> EngineProcess:
    """vLLM's defaults: torch.compile, piecewise and full graphs."""
    config = clairai.config(
        points=POINTS,
        capacity=forced.WIDTH,
        steering=True,
        capture={"folder": str(captures / form)},
    )
    arguments: dict[str, Any] = {"quantization": "fp8"} if form == "fp8" else {}
    return EngineProcess(
        runtime=runtime,
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=DTYPE,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,  # the longest prompt comes in two chunks
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=256 << 20,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        additional_config=config,
        **arguments,
    )


Found = dict[str, tuple[Quantised, Observed]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[Found]:
    """An engine for each form, all at the same time: a start takes most of a test's time."""
    scratch = tmp_path_factory.mktemp("quantised")
    plain = forced.model(scratch / "base")
    made = {form: Quantised(plain, plain) for form in ("plain", "fp8")}
    made |= {form: quantised.quantise(plain, scratch, form) for form in quantised.FORMATS}

    def observe(form: str) -> Observed:
        with start(form, made[form].folder, runtime, scratch / "captures") as engine:
            return dtype_floor.observe(engine, WANTED)

    with contextlib.ExitStack() as undo:
        pool = undo.enter_context(ThreadPoolExecutor(len(FORMS)))
        asked = {form: pool.submit(observe, form) for form in FORMS}
        yield {form: (made[form], future.result()) for form, future in asked.items()}


def captures_of(found: Observed, truth: Truth) -> dict[str, Distance]:
    return dtype_floor.measure_captures(found.captured, truth, WANTED.prompts[-1], POINTS)


@pytest.mark.parametrize("form", FORMS)
def test_every_value_under_graphs_is_as_near_as_hugging_face_in_the_same_form_is(
    form: str, found: Found, report: Callable[..., None]
) -> None:
    folders, observed = found[form]
    truth = Truth(folders.plain, DTYPE, CHANGES.get(form))
    distances = dtype_floor.measure_values(observed, truth, POINTS)
    for point, distance in distances.items():
        report(test="form", form=form, dtype=DTYPE, point=point, **distance.numbers)
    for point, distance in distances.items():
        assert distance.is_near, (point, distance.numbers)
    for point, distance in captures_of(observed, truth).items():
        assert distance.is_near, (point, distance.numbers)


@pytest.mark.parametrize("form", [*CHANGES])
def test_no_quantisation_of_inputs_is_left_out(
    form: str, found: Found, report: Callable[..., None]
) -> None:
    folders, observed = found[form]
    truth, unrounded = (Truth(folders.plain, DTYPE, change) for change in (CHANGES[form], None))
    shares = dtype_floor.measure_shares(observed, truth, unrounded, POINTS[1:])
    report(test="form", form=form, dtype=DTYPE, shares=shares)
    for point, (engine, floor) in shares.items():
        assert engine >= max(floor - 0.15, 0.2), (point, shares)


@pytest.mark.parametrize("form", FORMS)
def test_steering_acts_as_a_hook_in_hugging_face_in_the_same_form(
    form: str, found: Found, report: Callable[..., None]
) -> None:
    folders, observed = found[form]
    truth = Truth(folders.plain, DTYPE, CHANGES.get(form))
    steered = dtype_floor.measure_steering(observed.steered, truth, WANTED)
    report(test="form", form=form, dtype=DTYPE, point="logprobs, steered", **steered.numbers)
    assert steered.is_near, steered.numbers
    assert not dtype_floor.measure_steering(observed.plain, truth, WANTED).is_near  # it would show
