"""On a GPU: taps in captured graphs give the right rows and values, on both model runners."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from tests.engine import attribution, models, planted, watching
from tests.engine.process import EngineProcess
from tests.fidelity import scenarios
from tests.fidelity.oracle import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

WIDTH: Final = 576
POINTS: Final = ["pre_attn.0", "post_attn.9", "post_block.9", "post_block.19", "post_block.29"]
TEXTS: Final = [
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
]
PROMPTS: Final = models.random_prompts(9, (3, 17, 40, 64, 5, 90), 40_000)
RUNNERS: Final = {"V1": "0", "V2": "1"}
# Who publishes a graph's steps: a small model's graph in line; a large one's beside the blocks that
# follow the last tap, else the host.
PUBLISHERS: Final[dict[str, dict[str, Any]]] = {
    "graph, in line": {"points": POINTS},
    "graph, beside": {"points": POINTS[:-1], "plant": planted.large_model},
    "host": {"points": POINTS, "plant": planted.large_model},
}
NOISE: Final = 0.03  # of a value, what bfloat16 makes of ten layers


def start(folder: Path, runtime: Path, runner: str, **changes: Any) -> EngineProcess:
    environment = {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]} | changes.pop("environment", {})
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 30,  # not what others leave of the GPU
    }
    return EngineProcess(runtime=runtime, environment=environment, **(arguments | changes))


def start_all(
    folder: Path, runtime: Path, runner: str, changes: Sequence[dict[str, Any]]
) -> list[EngineProcess]:
    """At the same time: a start takes most of a test's time."""
    with ThreadPoolExecutor(len(changes)) as pool:
        starting = [pool.submit(partial(start, folder, runtime, runner, **one)) for one in changes]
        return [each.result() for each in starting]


Engines = dict[tuple[str, str], EngineProcess]  # by runner, and by who publishes a graph's steps


@pytest.fixture(scope="module")
def engines(real_model: Path, runtime: Path) -> Iterator[Engines]:
    """vLLM's defaults: torch.compile, piecewise and full graphs, async scheduling."""
    changes = {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 800}  # they preempt
    kinds = [(runner, publisher) for runner in RUNNERS for publisher in PUBLISHERS]
    with ThreadPoolExecutor(len(kinds)) as pool, ExitStack() as opened:
        starting = {}
        for runner, publisher in kinds:
            given = {**changes, **PUBLISHERS[publisher]}
            config = clairai.config(points=given.pop("points"), capacity=WIDTH)
            given["additional_config"] = config
            starting[runner, publisher] = pool.submit(start, real_model, runtime, runner, **given)
        yield {kind: opened.enter_context(each.result()) for kind, each in starting.items()}


@pytest.fixture(params=[*RUNNERS])
def engine(request: pytest.FixtureRequest, engines: Engines) -> EngineProcess:
    return engines[request.param, "graph, in line"]


def test_pitfall_17_warm_up_leaves_no_rows(engines: Engines) -> None:
    assert [each.call(watching.published) for each in engines.values()] == [0] * len(engines)


@pytest.mark.parametrize("publisher", [*PUBLISHERS])
@pytest.mark.parametrize("runner", [*RUNNERS])
def test_pitfall_06_no_row_lands_on_another_request(
    runner: str, publisher: str, engines: Engines, report: Callable[..., None]
) -> None:
    engine = engines[runner, publisher]
    assert engine.call(watching.publishers) == publisher
    plan = attribution.Plan(num_requests=2000, num_at_once=256, max_prompt=200, max_new=40, seed=3)
    verdict = engine.call(attribution.run, plan)
    report(test="attribution", publisher=publisher, rows=verdict.rows, wrong=len(verdict.wrong))
    assert verdict.wrong == []
    assert verdict.unaccounted == 0
    assert verdict.lost == 0
    assert verdict.recomputed_rows > 0
    assert verdict.cached_tokens > 0


def test_every_row_in_bfloat16_is_as_near_as_hugging_face_in_bfloat16_is(
    engine: EngineProcess, real_model: Path, report: Callable[..., None]
) -> None:
    tapped = engine.call(scenarios.tap_everything, TEXTS, POINTS, WIDTH, 12)
    found = scenarios.cosines(tapped, real_model)
    floor = scenarios.bfloat16_cosines(tapped, real_model)
    report(test="fidelity", arch="smollm2 bfloat16", cosine=found, hugging_face=floor)
    for point in POINTS:
        assert 1 - found[point] <= 2 * (1 - floor[point]) + 1e-6, (point, found, floor)


@pytest.mark.parametrize("runner", [*RUNNERS])
def test_rows_are_right_where_norms_stay_vllms(
    runner: str, real_model: Path, runtime: Path, report: Callable[..., None]
) -> None:
    """As in a quantised model: rows are copied to the stash, and long steps are scored at once."""
    changes = {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 800}
    config = clairai.config(points=POINTS, capacity=WIDTH, fused=False)
    with start(real_model, runtime, runner, additional_config=config, **changes) as engine:
        assert engine.call(planted.num_fused_norms) == 0
        plan = attribution.Plan(
            num_requests=500, num_at_once=256, max_prompt=200, max_new=40, seed=3
        )
        verdict = engine.call(attribution.run, plan)
        tapped = engine.call(scenarios.tap_everything, TEXTS, POINTS, WIDTH, 12)
    report(test="attribution", publisher="vLLM's norms", rows=verdict.rows, wrong=verdict.wrong)
    assert verdict.wrong == []
    assert (verdict.unaccounted, verdict.lost) == (0, 0)
    found = scenarios.cosines(tapped, real_model)
    floor = scenarios.bfloat16_cosines(tapped, real_model)
    for point in POINTS:
        assert 1 - found[point] <= 2 * (1 - floor[point]) + 1e-6, (point, found, floor)


def test_the_relative_error_in_bfloat16_is_no_more_than_hugging_faces_own(
    engine: EngineProcess, real_model: Path, report: Callable[..., None]
) -> None:
    """Against float32, decode included: what bfloat16 itself costs, and no more for the tap."""
    tapped = engine.call(scenarios.tap_everything, TEXTS, POINTS, WIDTH, 32)
    found = scenarios.relative_errors(tapped, real_model)
    for point, errors in found.items():
        report(test="relative error", arch="smollm2 bfloat16", point=point, p999=errors)
        cells = " | ".join(f"{name} {error:.2e}" for name, error in errors.items())
        sys.stdout.write(f"| {point} | {cells} |\n")
    for point, errors in found.items():
        for kind in ("values", "rows"):
            assert errors[f"{kind} float32"] <= 1.5 * errors[f"{kind} floor"] + 1e-3, (point, found)


def test_every_value_in_float32_is_hugging_faces_and_the_same_in_eager(
    real_model: Path, runtime: Path, report: Callable[..., None]
) -> None:
    """vLLM's own float32 attention on this GPU is coarser than float32 (Triton's tensor cores).

    Before the first attention the values must be exact; after it, graph and eager must agree.
    """
    config = clairai.config(points=POINTS, capacity=WIDTH)
    changes = [
        {"dtype": "float32", "enforce_eager": is_eager, "additional_config": config}
        for is_eager in (False, True)
    ]
    found = {}
    for is_eager, engine in enumerate(start_all(real_model, runtime, "V2", changes)):
        with engine:
            found[bool(is_eager)] = engine.call(scenarios.tap_everything, TEXTS, POINTS, WIDTH, 12)
    errors = {result.point: result.p999 for result in scenarios.judge(found[False], real_model)}
    report(test="fidelity", arch="smollm2 float32", p999=errors)
    assert errors["pre_attn.0"] == 0.0
    assert max(errors.values()) <= 1e-2
    for point in POINTS:
        for graph, eager in zip(found[False][point], found[True][point], strict=True):
            difference = relative_error(graph.scores_NP[:-1], eager.scores_NP[:-1])
            report(test="graph against eager", point=point, worst=float(difference.max()))
            assert difference.max() <= 1e-2, point


@pytest.mark.parametrize("runner", [*RUNNERS])
def test_pitfall_18_an_idle_plugin_is_bit_identical_under_graphs(
    runner: str, real_model: Path, runtime: Path
) -> None:
    changes = [{"environment": {"VLLM_PLUGINS": ""}}, {}]
    alone, idle = start_all(real_model, runtime, runner, changes)
    with alone, idle:
        without = alone.call(watching.logprobs, PROMPTS)
        assert idle.call(watching.traces) == []
        assert idle.call(watching.logprobs, PROMPTS) == without


@pytest.mark.parametrize("runner", ["V2"])
def test_pitfall_10_a_warm_cache_never_serves_a_graph_with_other_taps(
    runner: str, real_model: Path, runtime: Path, tmp_path: Path
) -> None:
    environment = {"VLLM_CACHE_ROOT": str(tmp_path)}
    wanted = ["post_block.9", "post_block.10"]
    found = []
    for points in (wanted[:1], ["post_block.*"], wanted[:1]):
        with start(
            real_model,
            runtime,
            runner,
            environment=environment,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},  # as many as are asked for
            additional_config=clairai.config(points=points, capacity=WIDTH),
        ) as engine:
            asked = wanted if points != wanted[:1] else points
            found.append(engine.call(scenarios.tap_everything, TEXTS, asked, WIDTH, 4))
    first, all_layers, again = found
    for mine, theirs in zip(first["post_block.9"], again["post_block.9"], strict=True):
        np.testing.assert_allclose(mine.scores_NP[:-1], theirs.scores_NP[:-1], rtol=1e-2, atol=1e-1)
    assert apart(first["post_block.9"], all_layers["post_block.9"]) <= NOISE
    assert apart(first["post_block.9"], all_layers["post_block.10"]) > NOISE  # it would show


def apart(mine: Sequence[Any], theirs: Sequence[Any]) -> float:
    """By how much most values differ, of their row's usual one.

    Graphs with other taps round otherwise here and there, and a few values in bfloat16 then differ
    much; those of the next layer all do.
    """
    shares = []
    for one, other in zip(mine, theirs, strict=True):
        one_ND, other_ND = one.scores_NP[:-1], other.scores_NP[:-1]
        usual_N1 = np.median(np.abs(one_ND), axis=1, keepdims=True)
        shares.append(np.median(np.abs(one_ND - other_ND) / usual_N1))
    return float(max(shares))
