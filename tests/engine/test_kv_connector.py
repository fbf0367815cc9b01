"""A KV connector that vLLM ships, two engines and one folder: nobody gets KV steered otherwise.

Without a prefix cache of their own, tokens that were not forwarded came through the connector.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.errors import UnsupportedError
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from clairai.wire import ring_messages
from tests.engine import asks, capturing, models, steering
from tests.engine.hooked import TOLERANCE, error_of, positions
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Ask
from tests.fidelity.oracle import hidden_states, relative_error
from tests.fidelity.steered import Change, Floats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WIDTH: Final = 64
BLOCK: Final = 32
PROMPT: Final = tuple(range(10, 90))  # two whole blocks are stored
CACHED: Final = 64


def _row(seed: int) -> Floats:
    row = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return row.astype(np.float64)


ROWS: Final = {"post_block.1": _row(1), "post_attn.2": _row(2)}
STEERED: Final = ({"vector": "v"},)
DIRECTION_D: Final = _row(3).astype(np.float32)
ALWAYS: Final = [Change("add", ROWS, positions(0))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny("llama", tmp_path_factory.mktemp("connected") / "llama")


class Engines:
    """Starts engines that share a folder of KV."""

    def __init__(self, model: Path, runtime: Path, scratch: Path) -> None:
        self._model, self._runtime, self._scratch = model, runtime, scratch

    def start(self, connector: str = "ExampleConnector", **settings: Any) -> EngineProcess:
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._scratch / "kv")},
        }
        return EngineProcess(
            runtime=self._runtime,
            model=str(self._model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=512,  # vLLM's example stores what a prompt's first step has
            block_size=BLOCK,
            enable_prefix_caching=False,
            kv_transfer_config=transfer,
            additional_config=clairai.config(points=["all"], capacity=8, **settings),
        )

    def start_steered(self) -> EngineProcess:
        capture = {"folder": str(self._scratch / f"captures-{len(list(self._scratch.iterdir()))}")}
        engine = self.start(steering=True, capture=capture)
        points = {Point.parse(point): row.astype(np.float32) for point, row in ROWS.items()}
        engine.call(steering.put, [dumps(clairai.Vector("v", points))])
        return engine


@pytest.fixture(scope="module")
def engines(model: Path, runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(model, runtime, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def first(engines: Engines) -> Iterator[EngineProcess]:
    with engines.start_steered() as engine:
        yield engine


def test_steered_kv_reaches_only_requests_that_are_steered_the_same(
    first: EngineProcess, model: Path
) -> None:
    later = ({"vector": "v", "when": {"positions": [[70, None]]}},)  # behind what is stored
    other = ({"vector": "v", "scale": 0.5},)
    for ask, changes, num_cached in (
        (Ask(PROMPT, STEERED), ALWAYS, 0),
        (Ask(PROMPT), [], 0),  # the steered KV of the same tokens is there, and not for it
        (Ask(PROMPT, STEERED), ALWAYS, CACHED),
        (Ask(PROMPT), [], CACHED),
        (Ask(PROMPT, other), [Change("add", ROWS, positions(0), scale=0.5)], 0),
        (Ask(PROMPT, later), [Change("add", ROWS, positions(70))], CACHED),
    ):
        (answer,) = first.call(steering.answer, [ask])
        assert answer.num_cached == num_cached
        assert error_of(model, ask, answer, changes) <= TOLERANCE


def test_another_engine_finds_it_under_the_same_keys(
    first: EngineProcess, engines: Engines, model: Path
) -> None:
    prompt = tuple(reversed(PROMPT))
    pair = [Ask(prompt, STEERED), Ask(prompt)]
    for ask in pair:  # prefilled there
        first.call(steering.answer, [ask])
    with engines.start_steered() as second:  # and decoded here
        for ask, changes in zip(pair, (ALWAYS, []), strict=True):
            (answer,) = second.call(steering.answer, [ask])
            assert answer.num_cached == CACHED
            assert error_of(model, ask, answer, changes) <= TOLERANCE


def test_tokens_that_came_are_marked_as_cached_and_none_is_lost(first: EngineProcess) -> None:
    prompt = [*range(100, 180)]
    first.call(asks.generate_quietly, [prompt])
    rows = first.call(asks.events_of, [prompt])
    cached = [row[1:3] for row in rows if row[3] == ring_messages.CACHED]
    assert cached == [(0, CACHED)]
    forwarded = [row[1] for row in rows if row[3] <= ring_messages.DECODE]
    assert forwarded == [*range(CACHED, len(prompt) + 3)]


def test_rows_that_are_asked_for_are_forwarded_although_the_connector_has_their_tokens(
    first: EngineProcess, model: Path
) -> None:
    prompt = tuple(range(200, 280))
    first.call(asks.generate_quietly, [list(prompt)])
    truth_TD = hidden_states(str(model), list(prompt))["post_block.3"]
    scored_T = first.call(_score_prompt, prompt)
    expected_T = truth_TD @ DIRECTION_D
    assert np.abs(scored_T - expected_T).max() <= 1e-5 * np.abs(expected_T).max()
    whole, answer = [
        capturing.Ask(prompt, {"points": ["post_block.3"], "positions": positions})
        for positions in ("prompt", "generated")
    ]
    ((kept,),) = first.call(capturing.capture, [whole])
    assert (kept.num_cached, kept.lost, kept.positions) == (0, 0, (*range(len(prompt)),))
    assert np.quantile(relative_error(kept.rows["post_block.3"], truth_TD), 0.999) <= 1e-5
    ((kept,),) = first.call(capturing.capture, [answer])
    assert (kept.num_cached, kept.lost, kept.positions[0]) == (CACHED, 0, len(prompt))


def _score_prompt(llm: Any, prompt: tuple[int, ...]) -> Any:
    bank = clairai.ProbeBank(llm)
    bank.add(clairai.Probe("p", Point.parse("post_block.3"), DIRECTION_D))
    outputs = asks.generate(llm, [list(prompt)], extra=clairai.request(prompt_scores=True))
    ((scores,),) = clairai.scores(llm, outputs)
    bank.remove("p")
    return scores["p"][: len(prompt)]


@pytest.mark.parametrize("what", ["steering", "capture"])
def test_a_connector_whose_keys_do_not_carry_the_plan_is_refused(
    engines: Engines, what: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"steering": True} if what == "steering" else {}
    if what == "capture":
        settings = {"capture": {"folder": str(tmp_path / "captures")}}
    with pytest.raises(EngineFailed, match="go with the KV connector DecodeBenchConnector") as said:
        engines.start("DecodeBenchConnector", **settings)
    assert UnsupportedError.__name__ in str(said.value)
