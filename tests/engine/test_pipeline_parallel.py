"""Two stages, with one rank each and with two: a row has the scores of all, a capture the rows.

The tests run in this order, on one engine for each layout; the last one kills a rank.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load

import clairai
from clairai.engine.capture.capture_resolver import is_sampled
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine import attribution, capturing, models, ranked, steering
from tests.engine import server as parts
from tests.engine.hooked import TOLERANCE, error_of, positions
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.serving import serving
from tests.engine.steering import Ask
from tests.fidelity.oracle import hidden_states, relative_error
from tests.fidelity.steered import Change, Floats, Gated

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

# Of 4 layers; the second stage begins at layer 2, whose first norm is given post_block.1.
POINTS: Final = ("pre_attn.0", "post_attn.1", "post_block.1", "post_attn.2", "post_block.3")
PLAN: Final = attribution.Plan(
    num_requests=80,
    num_at_once=24,
    max_prompt=96,
    max_new=24,
    seed=5,
    abort_share=0.5,
    shared_share=0.8,
    vocabulary=512,
    max_rounds=20,
)
PROMPTS: Final = (tuple(range(100, 150)), tuple(range(300, 320)), (7,))
WIDTH: Final = 64
SHARE: Final = 2**-12  # of requests that are captured without asking for it
RULED: Final = [stream for stream in range(1, 1 << 16) if is_sampled(stream, SHARE)][:2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny("llama", tmp_path_factory.mktemp("stages") / "llama")


@pytest.fixture(scope="module")
def vocabulary_VD(model: Path) -> NDArray[np.float32]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return np.asarray(file.get_tensor("model.embed_tokens.weight").float().numpy())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="pp2"),
        pytest.param(2, id="tp2-pp2", marks=pytest.mark.layouts),
    ],
)
def stages(
    request: pytest.FixtureRequest,
    model: Path,
    runtime: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    num_ranks, ruling = int(request.param), PROBES[1]
    folder = tmp_path_factory.mktemp("staged")
    clairai.save(folder / "ruling.safetensors", ruling)
    with EngineProcess(
        runtime=runtime,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0", "1"] * num_ranks),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to the ranks
        },
        start_s=600.0,
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=26,
        enable_prefix_caching=True,
        pipeline_parallel_size=2,
        tensor_parallel_size=num_ranks,
        additional_config=clairai.config(
            points=list(POINTS),
            probes=folder / "ruling.safetensors",
            capacity=8,
            steering=True,
            capture={
                "folder": str(folder / "store"),
                "sample": SHARE,
                "when": {"probe": ruling.name, "above": _between(model, ruling)},
            },
        ),
    ) as engine:
        points = {Point.parse(point): row.astype(np.float32) for point, row in ROWS.items()}
        engine.call(steering.put, [dumps(clairai.Vector("v", points))])
        engine.call(_remove, ruling.name)  # the load has probes of its own
        yield engine


def _probe(point: str, seed: int) -> clairai.Probe:
    direction_D = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return clairai.Probe(f"at:{point}", Point.parse(point), direction_D)


def _row(seed: int) -> Floats:
    row = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return row.astype(np.float64)


# A vector at points of both stages.
ROWS: Final = {point: _row(20 + seed) for seed, point in enumerate(POINTS[1:])}
GATE: Final = "at:pre_attn.0"
PROBES: Final = tuple(_probe(point, seed) for seed, point in enumerate(POINTS))


def _highest(model: Path, probe: clairai.Probe, tokens: tuple[int, ...]) -> float:
    states_TD = hidden_states(str(model), list(tokens))[str(probe.point)]
    return float((states_TD.astype(np.float64) @ probe.direction_D).max())


def _between(model: Path, probe: clairai.Probe) -> float:
    """A threshold that one of the first two prompts reaches."""
    return float(np.mean([_highest(model, probe, tokens) for tokens in PROMPTS[:2]]))


def test_every_row_belongs_to_its_request(
    stages: EngineProcess, vocabulary_VD: NDArray[np.float32]
) -> None:
    """The first stage scores the embedding; the last one says whose row it is."""
    verdict = stages.call(attribution.run, PLAN, vocabulary_VD)
    assert verdict.wrong == []
    assert (verdict.unaccounted, verdict.lost) == (0, 0)
    assert min(verdict.cached_tokens, verdict.recomputed_rows, verdict.aborted) > 0


def test_a_row_has_the_scores_of_all_stages_as_one_process_computes_them(
    stages: EngineProcess, model: Path
) -> None:
    stages.call(steering.add_probes, list(PROBES))
    for tokens, names, scores_TP, _ in stages.call(ranked.score, PROMPTS):
        states = hidden_states(str(model), tokens)
        assert len(scores_TP) == len(tokens)
        for probe in PROBES:
            states_TD = states[str(probe.point)].astype(np.float64)
            direction_D = probe.direction_D.astype(np.float64)
            size_T = np.linalg.norm(states_TD, axis=1) * np.linalg.norm(direction_D)
            found_T = scores_TP[:, names.index(probe.name)]
            error_T = np.abs(found_T - states_TD @ direction_D) / size_T
            assert np.quantile(error_T, 0.999) <= 1e-5, probe.name


@pytest.mark.parametrize(
    "points",
    [("post_attn.1",), ("post_block.3",), POINTS],
    ids=["the-first-stage", "the-last-stage", "both"],
)
def test_a_capture_has_the_rows_of_any_stages_as_one_process_computes_them(
    stages: EngineProcess, model: Path, points: tuple[str, ...]
) -> None:
    asks = [
        capturing.Ask(PROMPTS[0], {"points": list(points)}),
        capturing.Ask(PROMPTS[2], {"points": list(points), "positions": "prompt"}),
        capturing.Ask(PROMPTS[0], False),
    ]
    # Alone: vLLM's CPU build cannot cut the prompt of a request with a seed.
    two = capturing.Ask(PROMPTS[1], {"points": list(points), "positions": "generated"}, n=2)
    (whole,), (prompt,), (left_out,) = stages.call(capturing.capture, asks)
    (both,) = stages.call(capturing.capture, [two])
    asked, answers = [*asks[:2], two, two], [whole, prompt, *both]
    expected = [range(len(PROMPTS[0]) + 11), range(1), range(20, 31), range(20, 31)]
    for ask, found, at in zip(asked, answers, expected, strict=True):
        assert (found.state, found.lost, found.reason) == ("kept", 0, "")
        assert found.positions == (*at,)
        # A step that was on its way when the answer ended may have forwarded its last token, too.
        assert found.told >= len(points) * len(at)
        _check_rows(model, ask, found, points)
    assert left_out.state == ""


def _check_rows(
    model: Path, ask: capturing.Ask, found: capturing.Found, points: tuple[str, ...]
) -> None:
    tokens = [*ask.prompt, *found.token_ids]
    assert found.tokens == tuple(tokens[at] for at in found.positions)
    assert set(found.rows) == set(points)
    truth = hidden_states(str(model), tokens)
    for point, rows in found.rows.items():
        error = relative_error(rows, truth[point][list(found.positions)])
        assert np.quantile(error, 0.999) <= 1e-5, point


def test_captured_rows_are_their_requests_under_load(
    stages: EngineProcess, vocabulary_VD: NDArray[np.float32]
) -> None:
    """At pre_attn.0 a row is the embedding of its token: the first stage sent it, to the bit."""
    rng = np.random.default_rng(7)
    shared = tuple(rng.integers(5, 500, 64).tolist())
    asks = [
        capturing.Ask(
            (*shared[: 32 * (number % 3)], *rng.integers(5, 500, 1 + number % 29).tolist()),
            {"points": ["pre_attn.0", POINTS[1 + number % 4]], "positions": which},
            num_new=4 + number % 24,
        )
        for number, which in enumerate(["all", "generated", "last_prompt", {"from": 3}] * 10)
    ]
    found = [one for (one,) in stages.call(capturing.capture, asks)]
    for ask, one in zip(asks, found, strict=True):
        assert (one.state, one.lost) == ("kept", 0)
        tokens = (*ask.prompt, *one.token_ids)
        assert one.tokens == tuple(tokens[at] for at in one.positions)
        np.testing.assert_array_equal(one.rows["pre_attn.0"], vocabulary_VD[list(one.tokens)])
    assert max(one.num_cached for one in found) > 0


def test_a_score_of_the_first_stage_decides_what_is_kept(
    stages: EngineProcess, model: Path
) -> None:
    highest = [_highest(model, PROBES[1], tokens) for tokens in PROMPTS[:2]]
    asks = [
        capturing.Ask(tokens, None, num_new=1, fields={"stream": stream})
        for tokens, stream in zip(PROMPTS, RULED, strict=False)
    ]
    for ask, own, other in zip(asks, highest, reversed(highest), strict=True):
        ((found,),) = stages.call(capturing.capture, [ask])
        if own > other:
            assert (found.state, found.positions) == ("kept", (*range(len(ask.prompt)),))
            _check_rows(model, ask, found, POINTS)
        else:
            assert (found.state, found.rows) == ("discarded", {})
            assert found.discarded == len(POINTS) * len(ask.prompt)


def test_rows_that_do_not_come_with_their_step_end_the_requests_that_wanted_them(
    stages: EngineProcess,
) -> None:
    """A stage that sends no rows would leave those of another step in their places."""
    asks = [
        capturing.Ask(PROMPTS[0], {"points": ["post_attn.1", "post_block.3"]}),
        capturing.Ask(PROMPTS[0], {"points": ["post_block.3"]}),
    ]
    stages.call(_send_no_rows)
    try:
        for ask, reason in zip(asks, ("error", "length"), strict=True):
            (output,) = stages.call(_finish_reasons, [ask])
            assert output == reason
    finally:
        stages.call(_send_rows_again)
    ((found,),) = stages.call(capturing.capture, asks[:1])
    assert (found.state, found.lost) == ("kept", 0)


def test_rows_are_steered_at_points_of_both_stages_and_through_gates_of_the_first(
    stages: EngineProcess, model: Path
) -> None:
    """The gates read in the first stage, and act in both."""
    direction_D = PROBES[0].direction_D.astype(np.float64)
    states_TD = hidden_states(str(model), list(PROMPTS[0]))["pre_attn.0"].astype(np.float64)
    threshold = float(np.median(states_TD @ direction_D))  # about half of the tokens are above it
    at = {"probe": GATE, "threshold": threshold}
    entries: tuple[tuple[dict[str, Any], ...], ...] = (
        ({"vector": "v"},),
        ({"vector": "v", "gate": at},),
        ({"vector": "v", "gate": at | {"sharpness": 3.0}},),
        ({"vector": "v", "gate": at | {"latch": True}},),
        (),
    )
    asks = [Ask(PROMPTS[0], steer) for steer in entries]
    answers = stages.call(steering.answer, asks)
    gated = functools.partial(Gated, "pre_attn.0", direction_D, threshold)
    changes = [
        [Change("add", ROWS, positions(0))],
        [Change("add", ROWS, positions(0), gate=gated())],
        [Change("add", ROWS, positions(0), gate=gated(sharpness=3.0))],
        [Change("add", ROWS, positions(0), gate=gated(latch=True))],
        [],
    ]
    for ask, answer, change in zip(asks, answers, changes, strict=True):
        assert error_of(model, ask, answer, change) <= TOLERANCE
    # A gate that is always open, or never, would be steered as without one, or not at all.
    assert len({max(answer.logprobs[0].values()) for answer in answers}) >= 3


def test_a_gate_that_reads_behind_where_it_acts_is_refused(stages: EngineProcess) -> None:
    late = {"vector": "v", "gate": {"probe": "at:post_block.3", "threshold": 0.0}}
    (answer,) = stages.call(steering.answer, [Ask(PROMPTS[0], (late,))])
    assert (answer.token_ids, answer.finish_reason) == ((), "error")


@pytest.mark.parametrize("point", ["post_attn.1", "post_block.3"])
def test_a_rule_ends_an_answer_by_a_score_of_any_stage(stages: EngineProcess, point: str) -> None:
    rule = {"probe": f"at:{point}", "threshold": -1e9, "tokens": 3}
    (answer,) = stages.call(steering.answer, [Ask(PROMPTS[0], stop=(rule,))])
    assert len(answer.token_ids) == 4
    assert answer.stop_reason == f"clairai: probe at:{point} >= -1e+09 for 3 tokens"


def test_a_change_of_the_bank_reaches_the_scores_of_every_stage(
    stages: EngineProcess, model: Path
) -> None:
    """Each stage has the new probe of the old name, in the same step."""
    turned = [_probe(point, 10 + seed) for seed, point in enumerate(POINTS)]
    stages.call(_replace, turned)
    for tokens, names, scores_TP, _ in stages.call(ranked.score, PROMPTS[:1]):
        states = hidden_states(str(model), tokens)
        for probe in turned:
            expected_T = states[str(probe.point)].astype(np.float64) @ probe.direction_D
            found_T = scores_TP[:, names.index(probe.name)]
            np.testing.assert_allclose(found_T, expected_T, rtol=1e-3, atol=1e-3)


def test_a_killed_rank_of_the_first_stage_ends_the_engine(stages: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match=r"EngineDeadError|EngineCore encountered an issue"):
        stages.call(_kill_first_rank)


@pytest.mark.layouts
def test_a_client_of_a_server_gets_the_rows_of_both_stages_as_one_capture(
    cut_model: Path, tmp_path: Path
) -> None:
    options = (
        *("--pipeline-parallel-size", "2", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "128", "--max-num-seqs", "4", "--block-size", "32"),
    )
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    probe = clairai.Probe("deep", Point.parse("post_block.3"), np.ones(parts.WIDTH, np.float32))
    ours = ("--capture", str(tmp_path / "store"))
    prompt, points = [*range(100, 130)], ["pre_attn.0", "post_block.3"]
    body = {
        "model": parts.MODEL,
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "clairai": {"capture": {"points": points}},
    }
    with (
        serving(cut_model, tmp_path, options, cpu, [probe], ours) as served,
        served.client() as client,
    ):
        answer = client.post("/v1/completions", json=body).json()
        told = parts.settled(served.url, answer["clairai"]["capture"])
        assert (told["state"], told["lost"]) == ("kept", 0)
        file = load(client.get(f"/v1/captures/{told['id']}").content)
        listed = client.get("/v1/captures").json()["data"]
    assert [one["id"] for one in listed] == [told["id"]]
    tokens = [*prompt, *answer["choices"][0]["token_ids"]][:-1]
    truth = hidden_states(str(cut_model), tokens)
    for number, point in enumerate(sorted(points)):
        rows_ND = file["rows.values"][file["point"] == number][: len(tokens)]
        assert len(rows_ND) == len(tokens)
        assert np.quantile(relative_error(rows_ND, truth[point]), 0.999) <= 1e-5, point


def _replace(llm: Any, probes: list[clairai.Probe]) -> None:
    clairai.ProbeBank(llm).replace(*probes)


def _remove(llm: Any, probe: str) -> None:
    clairai.ProbeBank(llm).remove(probe)


def _finish_reasons(llm: Any, asks: list[capturing.Ask]) -> list[str]:
    return [output.outputs[0].finish_reason for output in capturing.generate(llm, asks)]


def _send_no_rows(llm: Any) -> None:
    llm.collective_rpc(_forget_rows)


def _send_rows_again(llm: Any) -> None:
    llm.collective_rpc(_remember_rows)


def _forget_rows(worker: Any) -> None:
    from clairai.engine.capture.stage_rows import StageCapture

    del worker
    planted: Any = StageCapture
    planted.real_take_rows, planted.take_rows = StageCapture.take_rows, lambda _: None


def _remember_rows(worker: Any) -> None:
    from clairai.engine.capture.stage_rows import StageCapture

    del worker
    planted: Any = StageCapture
    planted.take_rows = planted.real_take_rows


def _kill_first_rank(llm: Any) -> None:
    pids = llm.collective_rpc(_pid)
    os.kill(pids[0], signal.SIGKILL)
    ranked.score(llm, PROMPTS)


def _pid(worker: Any) -> int:
    del worker
    return os.getpid()
