"""With drafts and without them an engine gives the same answers, rows, captures and decisions.

Greedily, in float32, on a tiny model; each method of speculation against one engine without it.
Also with the V2 model runner and steps that are scheduled ahead, as on a GPU: what the host knows
there of a step, and what only the device knows, is the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import clairai
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine import (
    attribution,
    capturing,
    models,
    mutants,
    ranked,
    speculating,
    steering,
    weighed,
)
from tests.engine.process import EngineProcess
from tests.engine.steering import Answer, Ask
from tests.fidelity.oracle import hidden_states

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

POINTS: Final = ("pre_attn.0", "post_attn.1", "post_block.2")
WIDTH: Final = int(models.SHAPE["hidden_size"])
PROMPTS: Final = [
    tuple(prompt)
    for prompt in models.random_prompts(5, (3, 17, 40, 70, 9, 30), speculating.VOCABULARY)
]
NUM_NEW: Final = 40
LOAD: Final = attribution.Plan(
    num_requests=80,
    num_at_once=16,
    max_prompt=100,
    max_new=60,
    seed=1,
    temperature=0.0,
    vocabulary=speculating.VOCABULARY,
    num_behind=speculating.NUM_DRAFTS,
)
V2: Final = {"plant": speculating.use_v2_on_cpu, "environment": speculating.V2_ON_CPU}
# What gives an engine several ranks, each in a process of its own.
SPREAD: Final = {
    "tensor_parallel_size": 2,
    "environment": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the test sends a function to the ranks
    },
}
# By name: vLLM's method, and what the engine is given besides.
WAYS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "ngram": ("ngram", {}),
    "draft_model": ("draft_model", {}),
    "eagle": ("eagle", {}),
    "mtp": ("mtp", {}),
    "ngram-tp2": ("ngram", SPREAD),
    "draft_model-tp2": ("draft_model", SPREAD),
    "eagle-tp2": ("eagle", SPREAD),
    "ngram-v2": ("ngram", V2),
    "draft_model-v2": ("draft_model", V2),
    "eagle-v2": ("eagle", V2),
    "mtp-v2": ("mtp", V2),
}
# Steps of which are scheduled before it is known which drafts of the last one stand.
AHEAD: Final = ("draft_model-v2", "eagle-v2", "mtp-v2")
QUICK: Final = ("ngram", "draft_model")
SLOW: Final = pytest.mark.layouts


def _noise(seed: int, size: float) -> NDArray[np.float32]:
    row = np.random.default_rng(seed).standard_normal(WIDTH)
    return np.asarray(row * size / np.linalg.norm(row), np.float32)


VECTOR: Final = dumps(
    clairai.Vector("push", {Point.parse(name): _noise(i, 0.8) for i, name in enumerate(POINTS)})
)
PROBES: Final = [
    clairai.Probe(f"p{i}", Point.parse(name), _noise(10 + i, 1.0), threshold=0.5)
    for i, name in enumerate(POINTS)
]
GATE: Final = {"probe": "p0", "threshold": 0.1}
# Everywhere; in the answer; up to and from a position of it; by gates without and with memory.
STEERED: Final[tuple[dict[str, Any], ...]] = (
    {"vector": "push", "scale": 0.5},
    {"vector": "push", "when": "generation"},
    {"vector": "push", "when": {"positions": [[0, 47]]}},
    {"vector": "push", "when": {"positions": [[45, 60]]}},
    {"vector": "push", "when": "generation", "gate": GATE},
    {"vector": "push", "when": "generation", "gate": GATE | {"latch": True}},
    {"vector": "push", "when": "generation", "gate": GATE | {"release": -0.2}},
)
RULE: Final = {"probe": "p1", "threshold": 0.3, "tokens": 2}


Scored = tuple[list[Answer], list[NDArray[np.float32]], list[int]]  # with how many rows lack


@dataclass(frozen=True)
class Run:
    """What one engine did with the same requests as all others."""

    plain: Scored
    steered: Scored
    cached: list[Answer]  # the same requests once more: the prefix cache has their prompts
    stopped: list[Answer]
    captured: list[list[capturing.Found]]


def _run(llm: Any) -> Run:
    """All that is compared; runs in the engine's process."""
    steering.put(llm, [VECTOR])
    steering.add_probes(llm, PROBES)
    plain = [Ask(prompt, num_new=NUM_NEW) for prompt in PROMPTS]
    steered = [
        Ask(prompt, (entry,), num_new=NUM_NEW) for entry in STEERED for prompt in PROMPTS[2:4]
    ]
    stopped = [replace(ask, stop=(RULE,)) for ask in plain]
    captured = [
        capturing.Ask(prompt, {"points": [POINTS[2]], "positions": "all"}, num_new=NUM_NEW)
        for prompt in PROMPTS
    ]
    run = Run(
        plain=speculating.answer_and_score_all(llm, plain),
        steered=speculating.answer_and_score_all(llm, steered),
        cached=steering.answer(llm, [*steered, *plain]),
        stopped=steering.answer(llm, stopped),
        captured=capturing.capture(llm, captured),
    )
    steering.remove_all(llm)
    steering.remove_probes(llm, [probe.name for probe in PROBES])
    return run


@dataclass(frozen=True)
class Folders:
    target: Path
    draft_model: Path
    eagle: Path
    mtp: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("speculation")
    target = speculating.make_target(folder / "target")
    return Folders(
        target,
        speculating.make_draft_model(target, folder / "draft"),
        speculating.make_eagle(target, folder / "eagle"),
        speculating.make_mtp(folder / "mtp"),
    )


def _start(model: Path, runtime: Path, captures: Path, **given: Any) -> EngineProcess:
    return EngineProcess(
        runtime=runtime,
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=128,  # prompts are cut up
        block_size=32,
        num_gpu_blocks_override=24,  # and requests preempted
        enable_prefix_caching=True,
        disable_log_stats=False,  # else vLLM does not count drafts
        weight_transfer_config={"backend": "clairai_ipc"},
        additional_config=clairai.config(
            points=list(POINTS),
            capacity=8,
            ring_mib=64,
            steering=True,
            capture={"consumers": {"fs": {"folder": str(captures)}}, "to": ["fs"]},
        ),
        **given,
    )


def _speculative(method: str, folders: Folders) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"model": str(folders.draft_model)},
        "eagle": {"model": str(folders.eagle)},
        "mtp": {},  # part of the target, and good for one token
    }
    num_drafts = 1 if method == "mtp" else speculating.NUM_DRAFTS
    return {"method": method, "num_speculative_tokens": num_drafts, **given[method]}


@pytest.fixture(scope="module")
def run_alone(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Run]:
    """What an engine without speculation does with this model."""
    known: dict[Path, Run] = {}

    def run(model: Path) -> Run:
        if model not in known:
            captures = tmp_path_factory.mktemp("alone") / "store"
            with _start(model, runtime, captures) as engine:
                known[model] = engine.call(_run)
        return known[model]

    return run


@dataclass(frozen=True)
class Speculating:
    name: str
    engine: EngineProcess
    run: Run
    drafts: speculating.Drafts
    alone: Run


def _params(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else SLOW, id=name) for name in names]


@pytest.fixture(scope="module", params=_params(WAYS))
def speculation(
    request: pytest.FixtureRequest,
    folders: Folders,
    runtime: Path,
    run_alone: Callable[[Path], Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Speculating]:
    name = str(request.param)
    method, changes = WAYS[name]
    model = folders.mtp if method == "mtp" else folders.target
    alone = run_alone(model)
    captures = tmp_path_factory.mktemp(name) / "store"
    given = changes | {"speculative_config": _speculative(method, folders)}
    with _start(model, runtime, captures, **given) as engine:
        run, drafts = engine.call(speculating.with_drafts, _run)
        yield Speculating(name, engine, run, drafts, alone)


def _largest_error(found: Scored, truth: Scored) -> float:
    """The 99.9th percentile, relative to the score or the RMS of its row.

    Of all tokens that both engines forwarded: the prefix cache may have served others of a prompt,
    as EAGLE leaves the last block that it finds there to be forwarded again.
    """
    answers, scores, missing = found
    assert missing == [0] * len(answers)
    errors = []
    for answer, one_NP, true_NP in zip(answers, scores, truth[1], strict=True):
        is_common_N = ~np.isnan(one_NP[:, 0]) & ~np.isnan(true_NP[:, 0])
        assert is_common_N[-len(answer.token_ids) : -1].all()
        truth_NP = true_NP[is_common_N].astype(np.float64)
        rms_N1 = np.sqrt((truth_NP**2).mean(1, keepdims=True))
        errors.append(np.abs(one_NP[is_common_N] - truth_NP) / np.maximum(np.abs(truth_NP), rms_N1))
    return float(np.quantile(np.concatenate(errors), 0.999))


def test_drafts_are_accepted_and_rejected(speculation: Speculating) -> None:
    """Else none of the tests below would say anything."""
    drafts = speculation.drafts
    assert drafts.accepted > 50
    assert drafts.proposed - drafts.accepted > 50


def test_every_token_has_the_scores_that_it_has_without_speculation(
    speculation: Speculating, report: Callable[..., None]
) -> None:
    found, truth = speculation.run.plain, speculation.alone.plain
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in truth[0]]
    error = _largest_error(found, truth)
    drafts = speculation.drafts
    report(
        test=f"speculation by {speculation.name}",
        error=error,
        drafts=drafts.proposed,
        accepted=drafts.accepted,
    )
    assert error <= 1e-5


def test_steering_acts_on_drafts_as_it_would_without_them(speculation: Speculating) -> None:
    found, truth = speculation.run.steered, speculation.alone.steered
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in truth[0]]
    assert _largest_error(found, truth) <= 1e-5
    kinds = {one.token_ids for one in found[0][::2]}
    assert len(kinds) >= len(STEERED) - 2  # they do different things


def test_the_prefix_cache_gives_no_request_what_another_ones_drafts_left(
    speculation: Speculating,
) -> None:
    answers, expected = speculation.run.cached, speculation.alone.cached
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    plain = speculation.alone.plain[0]
    assert [one.token_ids for one in answers[-len(plain) :]] == [one.token_ids for one in plain]
    assert any(one.num_cached for one in answers)


def test_a_stop_rule_ends_an_answer_at_the_same_token_though_several_come_at_once(
    speculation: Speculating,
) -> None:
    found, expected = speculation.run.stopped, speculation.alone.stopped
    assert [(one.token_ids, one.stop_reason) for one in found] == [
        (one.token_ids, one.stop_reason) for one in expected
    ]
    assert any(one.finish_reason == "stop" and len(one.token_ids) > 4 for one in found)


def test_what_is_captured_of_each_token_is_what_is_captured_without_drafts(
    speculation: Speculating,
) -> None:
    for (found,), (expected,) in zip(
        speculation.run.captured, speculation.alone.captured, strict=True
    ):
        assert (found.state, found.lost, found.positions) == ("kept", 0, expected.positions)
        assert found.tokens == expected.tokens
        errors = np.abs(found.rows[POINTS[2]] - expected.rows[POINTS[2]])
        assert errors.max() <= 1e-5 * np.abs(expected.rows[POINTS[2]]).max()


def test_no_row_lands_on_another_request_and_no_rejected_draft_is_one(
    speculation: Speculating, report: Callable[..., None]
) -> None:
    verdict, drafts = speculation.engine.call(speculating.with_drafts, attribution.run, LOAD)
    report(
        test=f"attribution with drafts by {speculation.name}",
        rows=verdict.rows,
        wrong=len(verdict.wrong),
        drafts=drafts.proposed,
        accepted=drafts.accepted,
    )
    assert (verdict.wrong, verdict.unaccounted, verdict.lost) == ([], 0, 0)
    assert verdict.decode_rows > 1_000
    assert verdict.recomputed_rows > 0, "nothing was preempted"
    assert verdict.aborted > 0
    assert drafts.accepted > 100


# A bug is planted in the process of the LLM; ranks have processes of their own.
@pytest.mark.parametrize(
    "speculation", _params(name for name in WAYS if WAYS[name][1] is not SPREAD), indirect=True
)
@pytest.mark.parametrize(
    "mutant", [speculating.keep_rejected, mutants.rows_shifted_by_one], ids=lambda one: one.__name__
)
def test_the_attribution_check_catches_a_draft_that_counts_as_a_row(
    speculation: Speculating, mutant: Callable[[], AbstractContextManager[None]]
) -> None:
    short = replace(LOAD, num_requests=12)
    verdict = speculation.engine.call(mutants.run, mutant, short)
    assert verdict.wrong or verdict.unaccounted


def test_every_row_is_steered_by_its_own_position_and_by_gates_that_know_no_rejected_draft(
    speculation: Speculating,
) -> None:
    verdict = speculation.engine.call(speculating.judge_steering, 16, 3)
    assert verdict.wrong == []
    assert 0 < verdict.steered < verdict.rows


# Of MTP too few drafts are rejected while a gate is closed.
@pytest.mark.parametrize(
    "speculation", _params(("draft_model", "draft_model-v2", "eagle-v2")), indirect=True
)
def test_a_gate_that_remembers_a_rejected_draft_is_caught(speculation: Speculating) -> None:
    mutant = speculating.remember_rejected
    assert speculation.engine.call(speculating.judge_steering_with, mutant, 16, 3).wrong


@pytest.mark.parametrize("speculation", _params(AHEAD), indirect=True)
def test_steering_by_positions_that_the_host_expects_is_caught(speculation: Speculating) -> None:
    mutant = speculating.trust_the_host
    assert speculation.engine.call(speculating.judge_steering_with, mutant, 16, 3).wrong


def test_every_captured_row_is_its_tokens_and_none_is_a_rejected_drafts(
    speculation: Speculating,
) -> None:
    """Of ranges within answers; of so few requests that none is preempted."""
    verdict = speculation.engine.call(speculating.judge_captures, 5, 3)
    assert (verdict.wrong, verdict.extra) == ([], 0)
    assert verdict.rows > 100


@pytest.mark.parametrize("speculation", _params(AHEAD), indirect=True)
def test_a_rejected_draft_that_is_captured_is_caught(speculation: Speculating) -> None:
    mutant = speculating.capture_rejected
    assert speculation.engine.call(speculating.judge_captures_with, mutant, 5, 3).extra > 0


def _score_new(llm: Any, folder: Path) -> list[tuple[list[int], list[str], Any, Any]]:
    """Sends other weights, then scores what the engine answers."""
    steering.add_probes(llm, PROBES)
    ranked.send(llm, str(folder))
    return ranked.score(llm)


def test_new_weights_are_served_whatever_the_drafter_still_knows_of_the_old_ones(
    speculation: Speculating, folders: Folders, tmp_path: Path
) -> None:
    """The last test of an engine: its drafter, if it is a model of its own, stays as it was."""
    model = folders.mtp if WAYS[speculation.name][0] == "mtp" else folders.target
    new = weighed.perturb(model, tmp_path / "new", strength=1.0)
    found, drafts = speculation.engine.call(speculating.with_drafts, _score_new, new)
    speculating.leave_out_mtp(new)
    expected = ranked.greedy(new)
    assert drafts.proposed > 0
    for prompt, answer, one in zip(ranked.PROMPTS, expected, found, strict=True):
        tokens, names, scores_NP, weights = one
        assert tokens == [*prompt, *answer[:-1]]
        assert {*weights} == {1}
        truth = hidden_states(str(new), tokens)
        for probe in PROBES:
            states_ND = truth[str(probe.point)].astype(np.float64)
            errors_N = scores_NP[:, names.index(probe.name)] - states_ND @ probe.direction_D
            lengths_N = np.linalg.norm(states_ND, axis=1) * np.linalg.norm(probe.direction_D)
            assert np.quantile(np.abs(errors_N) / lengths_N, 0.999) <= 1e-5
