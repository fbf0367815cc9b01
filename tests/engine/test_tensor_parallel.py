"""Two ranks, in processes of their own beside the engine core's: each steers, one speaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine import capturing, models, steering
from tests.engine.hooked import TOLERANCE, error_of, positions
from tests.engine.process import EngineProcess
from tests.engine.steering import Ask
from tests.fidelity.oracle import hidden_states, relative_error
from tests.fidelity.steered import Change, Floats, Gated, streams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WIDTH: Final = 64
PROMPT: Final = tuple(range(10, 60))  # more than a step
OTHER: Final = tuple(range(100, 140))
NUM_NEW: Final = 12


def _row(seed: int) -> Floats:
    row = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return row.astype(np.float64)


ROWS: Final = {"post_block.1": _row(1), "post_attn.2": _row(2)}
GATE_D: Final = _row(3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny("llama", tmp_path_factory.mktemp("parallel") / "llama")


@pytest.fixture(scope="module")
def threshold(model: Path) -> float:
    """About half of the tokens are above it."""
    states_TD = hidden_states(str(model), [*PROMPT, *OTHER])["post_block.0"]
    return float(np.median(states_TD.astype(np.float64) @ GATE_D))


@pytest.fixture(scope="module")
def parallel(
    model: Path, runtime: Path, threshold: float, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    with EngineProcess(
        runtime=runtime,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to the ranks
        },
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        tensor_parallel_size=2,
        additional_config=clairai.config(
            points=["all"],
            capacity=8,
            steering=True,
            capture={"folder": str(tmp_path_factory.mktemp("parallel") / "store")},
        ),
    ) as engine:
        points = {Point.parse(point): row.astype(np.float32) for point, row in ROWS.items()}
        engine.call(steering.put, [dumps(clairai.Vector("v", points))])
        gate = clairai.Probe(
            "g", Point.parse("post_block.0"), GATE_D.astype(np.float32), threshold=threshold
        )
        engine.call(steering.add_probes, [gate])
        yield engine


def test_gates_are_the_same_on_both_ranks_and_those_of_a_reference(
    parallel: EngineProcess, model: Path, threshold: float
) -> None:
    latched = {"vector": "v", "gate": {"probe": "g", "latch": True}}
    soft = {"vector": "v", "gate": {"probe": "g", "sharpness": 3.0}}
    asks = [Ask(PROMPT, (latched,)), Ask(OTHER, (soft,)), Ask(OTHER)]
    answers = parallel.call(steering.answer, asks)
    gate = Gated("post_block.0", GATE_D, threshold)
    always = positions(0)
    changes = [
        [Change("add", ROWS, always, gate=Gated(gate.point, GATE_D, threshold, latch=True))],
        [Change("add", ROWS, always, gate=Gated(gate.point, GATE_D, threshold, sharpness=3.0))],
        [],
    ]
    for ask, answer, change in zip(asks, answers, changes, strict=True):
        assert error_of(model, ask, answer, change) <= TOLERANCE
    first, second = parallel.call(_on_ranks, _gates)
    assert first == second
    assert np.frombuffer(first, np.float32).any()


def test_a_rule_ends_an_answer_whose_scores_come_from_another_process(
    parallel: EngineProcess,
) -> None:
    rule = {"probe": "g", "threshold": -1e9, "tokens": 3}
    (answer,) = parallel.call(steering.answer, [Ask(PROMPT, stop=(rule,))])
    assert len(answer.token_ids) == 4
    assert answer.stop_reason == "clairai: probe g >= -1e+09 for 3 tokens"


def test_both_ranks_take_up_a_change_in_the_same_step(parallel: EngineProcess, model: Path) -> None:
    rule = {"probe": "g", "threshold": -1e9, "action": "steer", "steer": [{"vector": "v"}]}
    ask = Ask(PROMPT, stop=(rule,))
    (answer,) = parallel.call(steering.answer, [ask])
    # The first generated token crosses; the second is sampled with it, the third is changed.
    change = Change("add", ROWS, positions(len(PROMPT) + 2))
    assert error_of(model, ask, answer, [change]) <= TOLERANCE


def test_rows_are_captured_once_and_with_the_steering_that_came_on_the_way(
    parallel: EngineProcess, model: Path
) -> None:
    rule = {"probe": "g", "threshold": -1e9, "action": "steer", "steer": [{"vector": "v"}]}
    asks = [
        capturing.Ask(PROMPT, True, fields={"stop": [rule]}),
        capturing.Ask(OTHER, {"points": ["post_block.3"], "positions": "generated"}),
    ]
    (amended,), (plain,) = parallel.call(capturing.capture, asks)
    changes = [Change("add", ROWS, positions(len(PROMPT) + 2))]
    for ask, found, change in zip(asks, (amended, plain), (changes, []), strict=True):
        tokens = [*ask.prompt, *found.token_ids]
        assert found.tokens == tuple(tokens[at] for at in found.positions)
        truth = streams(str(model), tokens, change)
        for point, rows in found.rows.items():
            wanted = truth[point][list(found.positions)].astype(np.float32)
            assert np.quantile(relative_error(rows, wanted), 0.999) <= 1e-5
    # A step that was on its way when the answer ended may have forwarded its last token, too.
    assert amended.positions[:61] == (*range(61),)
    assert plain.positions[:11] == (*range(40, 51),)
    assert len(amended.rows) == 12
    (applied,) = amended.stored["steering"]["applied"]
    assert applied["when"]["positions"] == [[len(PROMPT) + 2, None]]
    assert plain.stored["steering"] == {}


def _on_ranks(llm: Any, what: Any) -> list[bytes]:
    found: list[bytes] = llm.collective_rpc(what)
    return found


def _gates(worker: Any) -> bytes:
    tables = worker.clairai_steer_tables
    kept: bytes = tables.state_ZG.numpy().tobytes() + tables.gates_TG.numpy().tobytes()
    return kept
