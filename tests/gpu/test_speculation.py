"""On a GPU: with drafts, in captured graphs, an accepted token has one row and a rejected one none.

The runner is V2, which knows only on the device which drafts are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import clairai
from tests.engine import attribution, models, mutants, speculating
from tests.engine.process import EngineFailed, EngineProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

METHODS: Final = ("draft_model", "eagle", "ngram")
LOAD: Final = attribution.Plan(
    num_requests=1500,
    num_at_once=200,
    max_prompt=200,
    max_new=40,
    seed=3,
    temperature=0.0,
    num_drafts=speculating.NUM_DRAFTS,
)
SHARP: Final = 1.0  # at this temperature drafts are accepted by chance


def start(model: Path, runtime: Path, speculative: dict[str, Any], **changes: Any) -> EngineProcess:
    points = ["pre_attn.0", "post_block.3"]
    return EngineProcess(
        runtime=runtime,
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
        plant=speculating.allow_gpu,
        model=str(model),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=256,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=800,  # they preempt
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        speculative_config=speculative,
        additional_config=clairai.config(points=points, capacity=16, **changes),
    )


def _speculative(method: str, target: Path, folder: Path) -> dict[str, Any]:
    given: dict[str, Callable[[], dict[str, Any]]] = {
        "ngram": lambda: {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": lambda: {"model": str(models.cut(target, 3, folder / "draft"))},
        "eagle": lambda: {"model": str(speculating.make_eagle(target, folder / "eagle"))},
    }
    num_drafts = speculating.NUM_DRAFTS
    return {"method": method, "num_speculative_tokens": num_drafts, **given[method]()}


@pytest.fixture(scope="module", params=METHODS)
def engine(
    request: pytest.FixtureRequest,
    real_model: Path,
    runtime: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """vLLM's defaults otherwise: torch.compile, full and piecewise graphs, async scheduling."""
    folder = tmp_path_factory.mktemp(request.param)
    target = models.cut(real_model, 4, folder / "target")
    with start(target, runtime, _speculative(request.param, target, folder)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, SHARP])
def test_no_row_lands_on_another_request_and_no_rejected_draft_is_one(
    engine: EngineProcess, temperature: float, report: Callable[..., None]
) -> None:
    plan = attribution.Plan(**(vars(LOAD) | {"temperature": temperature}))
    verdict, drafts = engine.call(speculating.with_drafts, attribution.run, plan)
    report(
        test="attribution with drafts",
        rows=verdict.rows,
        wrong=len(verdict.wrong),
        drafts=drafts.proposed,
        accepted=drafts.accepted,
    )
    assert (verdict.wrong[:5], verdict.unaccounted, verdict.lost) == ([], 0, 0)
    assert verdict.recomputed_rows > 0
    assert drafts.proposed > drafts.accepted


def test_the_check_catches_a_draft_that_is_not_marked(engine: EngineProcess) -> None:
    short = attribution.Plan(**(vars(LOAD) | {"num_requests": 64, "num_at_once": 64}))
    verdict = engine.call(mutants.run, speculating.mark_nothing, short)
    assert verdict.wrong or verdict.unaccounted


def test_steering_is_refused_with_speculation(real_model: Path, runtime: Path) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(EngineFailed, match="do not go with speculative decoding on a GPU"):
        start(real_model, runtime, speculative, steering=True)
