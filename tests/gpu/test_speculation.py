"""On a GPU: with drafts, in captured graphs, an accepted token has one row and a rejected one none.

And each row is steered by its own position, and by gates that know of no rejected draft. The runner
is V2, which knows only on the device which drafts are rejected. The model is small and random, and
its drafters are made of it, so that they are right now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import clairai
from tests.engine import attribution, mutants, speculating
from tests.engine.process import EngineFailed, EngineProcess
from tests.gpu import forced

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

METHODS: Final = ("ngram", "draft_model", "eagle", "mtp")
# Those that vLLM schedules steps for before it knows which drafts of the last one stand.
AHEAD: Final = ("draft_model", "eagle", "mtp")
NUM_STEERED: Final = 400  # requests
NUM_CAPTURED: Final = 40
LOAD: Final = attribution.Plan(
    num_requests=1000,
    num_at_once=200,
    max_prompt=100,
    max_new=60,
    seed=3,
    temperature=0.0,
    vocabulary=forced.VOCABULARY,
    # The step that was scheduled before the answer was known to end has drafts of its own.
    num_behind=2 * speculating.NUM_DRAFTS,
)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of graphs; vLLM's own list has 51
SHARP: Final = 1.0  # at this temperature drafts are accepted by chance
Engines = dict[str, EngineProcess]  # by vLLM's method of speculation


def start(model: Path, runtime: Path, speculative: dict[str, Any], **changes: Any) -> EngineProcess:
    """vLLM's defaults otherwise: torch.compile, full and piecewise graphs, async scheduling."""
    points = ["pre_attn.0", "post_block.3"]
    return EngineProcess(
        runtime=runtime,
        environment={"VLLM_USE_V2_MODEL_RUNNER": changes.pop("runner", "1")},
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=256,
        # vLLM's warm-up of a draft model has one token more for each request than the target's, so
        # more than 1024 (v1/worker/gpu/warmup.py, 0.32:285).
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=400,  # they preempt: each of 200 requests can have 32 tokens
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,  # else vLLM does not count drafts
        compilation_config={"cudagraph_capture_sizes": [*SIZES]},
        speculative_config=speculative,
        additional_config=clairai.config(points=points, capacity=16, steering=True, **changes),
    )


def _make(method: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and how vLLM is told to speculate with it."""
    if method == "mtp":  # part of the target, and good for one token
        target = speculating.make_mtp(folder / "target", **forced.SHAPE)
        return target, {"method": method, "num_speculative_tokens": 1}
    target = speculating.make_target(folder / "target", **forced.SHAPE)
    given: dict[str, Callable[[], dict[str, Any]]] = {
        "ngram": lambda: {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": lambda: {
            "model": str(speculating.make_draft_model(target, folder / "draft"))
        },
        "eagle": lambda: {"model": str(speculating.make_eagle(target, folder / "eagle"))},
    }
    num_drafts = speculating.NUM_DRAFTS
    return target, {"method": method, "num_speculative_tokens": num_drafts, **given[method]()}


def _capture_into(folder: Path) -> dict[str, Any]:
    return {"consumers": {"fs": {"folder": str(folder / "captures")}}, "to": ["fs"]}


@pytest.fixture(scope="module")
def engines(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All started at the same time: a start takes most of a test's time."""
    made = {method: _make(method, tmp_path_factory.mktemp(method)) for method in METHODS}
    with ThreadPoolExecutor(len(made)) as pool, ExitStack() as opened:
        starting = {
            method: pool.submit(
                start, target, runtime, speculative, capture=_capture_into(target.parent)
            )
            for method, (target, speculative) in made.items()
        }
        yield {method: opened.enter_context(each.result()) for method, each in starting.items()}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("temperature", [0.0, SHARP])
def test_no_row_lands_on_another_request_and_no_rejected_draft_is_one(
    method: str, temperature: float, engines: Engines, report: Callable[..., None]
) -> None:
    plan = replace(LOAD, temperature=temperature)
    verdict, drafts = engines[method].call(speculating.with_drafts, attribution.run, plan)
    report(
        test=f"attribution with drafts by {method}",
        temperature=temperature,
        rows=verdict.rows,
        wrong=len(verdict.wrong),
        unaccounted=verdict.unaccounted,
        recomputed=verdict.recomputed_rows,
        drafts=drafts.proposed,
        accepted=drafts.accepted,
    )
    assert (verdict.wrong[:5], verdict.unaccounted, verdict.lost) == ([], 0, 0)
    assert verdict.recomputed_rows > 0
    assert drafts.proposed > drafts.accepted
    if temperature == 0.0:
        assert drafts.accepted > 0


def test_the_check_catches_a_draft_that_is_not_marked(method: str, engines: Engines) -> None:
    short = replace(LOAD, num_requests=64, num_at_once=64)
    verdict = engines[method].call(mutants.run, speculating.mark_nothing, short)
    assert verdict.wrong or verdict.unaccounted


def test_every_row_is_steered_by_its_own_position_and_by_gates_that_know_no_rejected_draft(
    method: str, engines: Engines, report: Callable[..., None]
) -> None:
    """Of as many requests as graphs of whole forwards were captured for, and of others."""
    verdict, drafts = engines[method].call(
        speculating.with_drafts, speculating.judge_steering, NUM_STEERED, 3
    )
    report(
        test=f"steering with drafts by {method}",
        rows=verdict.rows,
        steered=verdict.steered,
        wrong=len(verdict.wrong),
        drafts=drafts.proposed,
        accepted=drafts.accepted,
    )
    assert verdict.wrong[:5] == []
    assert 0 < verdict.steered < verdict.rows
    assert drafts.accepted > 0


def test_the_check_catches_a_gate_that_remembers_a_rejected_draft(
    method: str, engines: Engines
) -> None:
    mutant = speculating.remember_rejected
    assert engines[method].call(speculating.judge_steering_with, mutant, NUM_STEERED, 3).wrong


@pytest.mark.parametrize("method", AHEAD, indirect=True)
def test_the_check_catches_steering_by_positions_that_the_host_expects(
    method: str, engines: Engines
) -> None:
    mutant = speculating.trust_the_host
    assert engines[method].call(speculating.judge_steering_with, mutant, NUM_STEERED, 3).wrong


def test_every_captured_row_is_its_tokens_and_none_is_a_rejected_drafts(
    method: str, engines: Engines, report: Callable[..., None]
) -> None:
    """Of so few requests that none is preempted."""
    verdict = engines[method].call(speculating.judge_captures, NUM_CAPTURED, 3)
    report(test=f"captures with drafts by {method}", rows=verdict.rows, wrong=len(verdict.wrong))
    assert (verdict.wrong[:5], verdict.extra) == ([], 0)
    assert verdict.rows > 10 * NUM_CAPTURED


@pytest.mark.parametrize("method", AHEAD, indirect=True)
def test_the_check_catches_a_rejected_draft_that_is_captured(method: str, engines: Engines) -> None:
    mutant = speculating.capture_rejected
    assert engines[method].call(speculating.judge_captures_with, mutant, NUM_CAPTURED, 3).extra > 0


def test_the_v1_runner_is_refused_with_speculation(tmp_path: Path, runtime: Path) -> None:
    target, speculative = _make("ngram", tmp_path)
    with pytest.raises(EngineFailed, match="speculative decoding on a GPU with the V1 model"):
        start(target, runtime, speculative, runner="0")
