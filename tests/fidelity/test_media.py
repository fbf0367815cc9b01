"""Rows of images: their values, marks, prefix cache, steering, captures, and preemption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import clairai
from tests.engine import preempting
from tests.engine.process import ChildProcess, EngineProcess
from tests.fidelity import judge_rows, observe_model, tiny_media, tiny_models, verify_media
from tests.fidelity.scenarios import Tapped
from tests.fidelity.tiny_media import MediaPrompt
from tests.fidelity.verify_model import Truth, truth_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ARCHITECTURE: Final = "Idefics3ForConditionalGeneration"  # text tokens between the tiles of images
RECIPE: Final = tiny_media.RECIPES[ARCHITECTURE]
POINTS: Final = [
    f"{k}.{layer}" for layer in range(4) for k in ("pre_attn", "post_attn", "post_block")
]
POINT: Final = "post_block.2"
LONG_ANSWER: Final = 40


@dataclass(frozen=True)
class Served:
    """A model that takes images, as vLLM runs it and as Hugging Face does."""

    engine: EngineProcess
    truth: ChildProcess
    prepared: verify_media.Prepared

    def verify(self) -> verify_media.MediaVerdict:
        return verify_media.verify(self.engine, self.truth, self.prepared, POINTS, RECIPE)

    def error(self, prompts: list[MediaPrompt], tapped: Tapped) -> float:
        asked = list(zip(prompts, judge_rows.sequences(tapped), strict=True))
        truths = self.truth.call(verify_media.media_streams, asked)
        return judge_rows.worst_error(tapped, truths)


@pytest.fixture(scope="module")
def served(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Few blocks of memory, so that requests are preempted."""
    scratch = tmp_path_factory.mktemp("images")
    capture = {"folder": str(scratch / "captures"), "encoder": "raw"}
    settings = clairai.config(
        points=["all"], capacity=2 * tiny_models.WIDTH, steering=True, capture=capture
    )
    with truth_process() as truth:
        tiny = truth.call(Truth.make, ARCHITECTURE, scratch / "model")
        truth.call(Truth.load, scratch / "model", tiny.kind)
        prepared = truth.call(Truth.load_media, ARCHITECTURE, scratch / "model")
        arguments: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 8,
            "block_size": 32,
            "num_gpu_blocks_override": 14,
            "additional_config": settings,
            "limit_mm_per_prompt": {"image": RECIPE.most},
        }
        model = str(scratch / "model")
        changes = {**arguments, **verify_media.ENGINE}
        with EngineProcess(runtime=runtime, model=model, **changes) as engine:
            yield Served(engine, truth, prepared)


def test_rows_marks_cache_and_steering_of_images_are_right(served: Served) -> None:
    verdict = served.verify()
    assert verdict.reason == ""
    assert verdict.engine_error is None
    assert verdict.error is not None
    assert verdict.error <= judge_rows.BOUND
    assert verdict.is_cut  # by the end of a step
    assert verdict.num_media == 4 * 20  # of four images, five tiles of four


def test_a_preempted_request_has_the_rows_of_its_own_image(served: Served) -> None:
    prompts = [MediaPrompt((4, ("image", seed), 2)) for seed in range(20, 27)]
    prompts.append(MediaPrompt((40,)))
    num_preempted, tapped = served.engine.call(
        tap_preempted, [prompt.for_vllm(RECIPE) for prompt in prompts]
    )
    assert num_preempted > 0
    assert served.error(prompts, tapped) <= judge_rows.BOUND
    for scores in tapped[POINT]:
        assert scores.missing == 0
        assert scores.media.tolist() == served.prepared.media_of(scores.token_ids.tolist())


def tap_preempted(llm: Any, prompts: list[Any]) -> tuple[int, Tapped]:
    with observe_model.unit_bank(llm, [POINT], tiny_models.WIDTH), preempting.counted(llm) as seen:
        tapped, _ = observe_model.tap(
            llm, prompts, [POINT], prompt_scores=True, num_new=LONG_ANSWER
        )
    return len(seen), tapped


def test_captured_rows_of_an_image_are_marked_and_right(served: Served) -> None:
    prompt = MediaPrompt((6, ("image", 31), 4))
    token_ids, media, rows_ND = served.engine.call(capture_prompt, prompt.for_vllm(RECIPE))
    assert media == served.prepared.media_of(token_ids)
    assert sum(map(bool, media)) == 20
    (truth,) = served.truth.call(verify_media.media_streams, [(prompt, token_ids)])
    assert judge_rows.p999(judge_rows.relative_error(rows_ND, truth[POINT]).ravel()) <= 1e-5


def capture_prompt(
    llm: Any, prompt: dict[str, Any]
) -> tuple[list[int], list[int], NDArray[np.float32]]:
    from vllm import SamplingParams

    wish = {"points": [POINT], "positions": "prompt"}
    params = SamplingParams(max_tokens=2, temperature=0.0, extra_args=clairai.request(capture=wish))
    outputs = llm.generate([prompt], params, use_tqdm=False)
    ((kept,),) = clairai.captures(llm, outputs)
    rows = kept.rows(POINT)
    assert rows.position.tolist() == [*range(len(outputs[0].prompt_token_ids))]
    return rows.token_id.tolist(), rows.media.tolist(), np.asarray(rows)


def test_a_cache_that_confuses_images_is_caught(served: Served) -> None:
    """The last test: the engine is of no use after it."""
    served.engine.call(forget_images)
    verdict = served.verify()
    assert verdict.is_wrong
    assert "of another image" in verdict.reason


def forget_images(llm: Any) -> None:
    """Plant the bug: what an image shows is no part of a block's hash."""
    from vllm.v1.core import kv_cache_utils

    del llm
    kv_cache_utils._gen_mm_extra_hash_keys = lambda *_: ([], 0)
