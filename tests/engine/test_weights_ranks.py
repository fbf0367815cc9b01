"""New weights reach all ranks of an engine or none, whatever one of them does.

The ranks hold parts of every layer (`tp2`), some of the layers (`pp2`), or parts of some. The
reference of the first is an engine that was started with the other weights, that of pipelines
Hugging Face's model with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import pytest

import clairai
from bench.weights_shape import write_tokenizer
from clairai.launch.engine_command import EngineCommand, ListenAddress
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess as ServerProcess
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from clairai.weights import Sender
from tests.engine import adapters, models, ranked, steering, weighed
from tests.engine import server as parts
from tests.engine.process import ChildProcess, EngineFailed, EngineProcess, choose_context
from tests.engine.steering import Ask
from tests.fidelity.oracle import hidden_states

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ONE_LAYER: Final = ".layers.1."
WIDTH: Final = 64
# Of 4 layers; with two stages, the first point is of the first one.
POINTS: Final = ("post_block.0", "post_block.1", "post_block.3")


class Pair(NamedTuple):
    """Two models of one shape, and the right answers of each."""

    old: Path
    new: Path
    old_answers: list[tuple[int, ...]]
    new_answers: list[tuple[int, ...]]


@dataclass(frozen=True)
class Parallel:
    """A running engine of several ranks."""

    engine: EngineProcess
    pair: Pair
    num_ranks: int
    adapter: Path

    def call(self, scenario: Any, *args: Any) -> Any:
        return self.engine.call(scenario, *args)


def _arguments(model: Path, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    return given | more


@pytest.fixture(scope="module")
def pair(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("ranks")
    old = models.tiny("llama", folder / "old")
    new = weighed.perturb(old, folder / "new", strength=1.0)
    found = []
    for model in (old, new):
        with EngineProcess(runtime=runtime, **_arguments(model)) as engine:
            found.append(engine.call(ranked.answers))
    assert found[0] != found[1]
    return Pair(old, new, *found)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One tensor is the embedding of the first stage and the head of the last."""
    folder = tmp_path_factory.mktemp("tied")
    old = models.tiny("llama", folder / "old", tie_word_embeddings=True)
    new = weighed.perturb(old, folder / "new", strength=1.0)
    answers = [ranked.greedy(model) for model in (old, new)]
    assert answers[0] != answers[1]
    return Pair(old, new, *answers)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 1), id="tp2"),
        pytest.param((1, 2), id="pp2", marks=pytest.mark.layouts),
        pytest.param((2, 2), id="tp2-pp2", marks=pytest.mark.layouts),
    ],
)
def parallel(
    request: pytest.FixtureRequest, runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parallel]:
    num_parts, num_stages = request.param
    pair: Pair = request.getfixturevalue("pair" if num_stages == 1 else "tied")
    adapter = adapters.make(pair.old, tmp_path_factory.mktemp("adapter") / "a", seed=3, size=2.0)
    with EngineProcess(
        runtime=runtime,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0", "1"] * (num_parts * num_stages // 2)),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to the ranks
        },
        start_s=600.0,
        **_arguments(
            pair.old,
            tensor_parallel_size=num_parts,
            pipeline_parallel_size=num_stages,
            weight_transfer_config={"backend": "clairai_ipc"},
            enable_lora=True,
            max_loras=2,
            max_lora_rank=8,
            additional_config=clairai.config(points=list(POINTS), capacity=4, steering=True),
        ),
    ) as engine:
        yield Parallel(engine, pair, num_parts * num_stages, adapter)


def _is_of_one_layer(name: str) -> bool:
    return ONE_LAYER in name


def _is_embedding(name: str) -> bool:
    return "embed_tokens" in name


def _is_of_the_others(name: str) -> bool:
    return ONE_LAYER not in name and not _is_embedding(name)


def test_both_ranks_get_a_whole_set_and_there_is_one_version(parallel: Parallel) -> None:
    assert parallel.call(ranked.answers) == parallel.pair.old_answers
    sent = parallel.call(ranked.send, str(parallel.pair.new), "step-1")
    assert parallel.call(ranked.answers) == parallel.pair.new_answers
    state = parallel.call(ranked.state)
    assert state.devices == ("cpu",) * parallel.num_ranks
    assert (state.version, state.label, state.digest) == (1, "step-1", sent.digest)
    back = parallel.call(ranked.send, str(parallel.pair.old))
    assert (back.version, parallel.call(ranked.answers)) == (2, parallel.pair.old_answers)


def test_a_part_of_the_model_changes_that_part_alone(parallel: Parallel) -> None:
    whole = parallel.call(ranked.send, str(parallel.pair.old))
    for chosen in (_is_embedding, _is_of_one_layer, _is_of_the_others):
        sent = parallel.call(ranked.send_part, parallel.pair.new, chosen)
    assert parallel.call(ranked.answers) == parallel.pair.new_answers
    assert sent.version == whole.version + 3
    back = parallel.call(ranked.send_part, parallel.pair.old, _is_of_one_layer)
    assert parallel.call(ranked.answers) not in (
        parallel.pair.old_answers,
        parallel.pair.new_answers,
    )
    for chosen in (_is_embedding, _is_of_the_others):
        parallel.call(ranked.send_part, parallel.pair.old, chosen)
    assert parallel.call(ranked.answers) == parallel.pair.old_answers
    # Equal weights have equal digests, however they came.
    assert len({whole.digest, sent.digest, back.digest}) == 3
    assert parallel.call(ranked.state).digest == whole.digest


def test_a_tensor_that_no_rank_has_is_refused_by_name(parallel: Parallel) -> None:
    extra = {"model.layers.4.mlp.up_proj.weight": np.zeros((128, WIDTH), np.float32)}
    kind, text = parallel.call(ranked.refuse, extra)
    assert kind == "WeightsError"
    assert "the engine has nothing named" in text
    assert parallel.call(ranked.answers) == parallel.pair.old_answers


def test_half_a_layer_is_refused_by_name(parallel: Parallel) -> None:
    kind, text = parallel.call(ranked.refuse_part, parallel.pair.new, ranked.is_query)
    assert kind == "WeightsError"
    assert "k_proj.weight" in text
    assert "send all 3 tensors of that layer" in text
    assert parallel.call(ranked.answers) == parallel.pair.old_answers


def _check_scores(
    parallel: Parallel, folder: Path, directions: dict[str, np.ndarray], version: int
) -> None:
    """Every row is scored as Hugging Face's model of this folder is, and says its version."""
    for tokens, names, scores_TP, weights in parallel.call(ranked.score):
        states = hidden_states(str(folder), tokens)
        assert weights == (version,)
        for point, direction_D in directions.items():
            states_TD = states[point].astype(np.float64)
            size_T = np.linalg.norm(states_TD, axis=1) * np.linalg.norm(direction_D)
            error_T = scores_TP[:, names.index(f"at:{point}")] - states_TD @ direction_D
            assert np.quantile(np.abs(error_T) / size_T, 0.999) <= 1e-5, point


def test_scores_at_every_rank_are_those_of_the_weights_that_serve(parallel: Parallel) -> None:
    """Directions come with the weights, alone as one bank, and alone by name."""
    rng = np.random.default_rng(4)
    directions = {point: rng.standard_normal(WIDTH).astype(np.float32) for point in POINTS}
    for point, direction_D in directions.items():
        probe = clairai.Probe(f"at:{point}", Point.parse(point), direction_D)
        parallel.call(steering.add_probes, [probe])
    version = parallel.call(ranked.state).version
    _check_scores(parallel, parallel.pair.old, directions, version)
    turned = {point: rng.standard_normal(WIDTH).astype(np.float32) for point in POINTS}
    with_weights = {f"probe::at:{point}": row_D for point, row_D in turned.items()}
    sent = parallel.call(ranked.send_with_probe, parallel.pair.new, with_weights)
    _check_scores(parallel, parallel.pair.new, turned, sent.version)
    parallel.call(ranked.send_bank, {f"at:{point}": directions[point] for point in POINTS})
    _check_scores(parallel, parallel.pair.new, directions, sent.version)
    first = {POINTS[0]: turned[POINTS[0]]}
    parallel.call(ranked.send, {f"probe::at:{point}": row_D for point, row_D in first.items()})
    _check_scores(parallel, parallel.pair.new, directions | first, sent.version)
    back = parallel.call(ranked.send, str(parallel.pair.old))
    _check_scores(parallel, parallel.pair.old, directions | first, back.version)


def test_a_change_under_running_requests_is_between_two_steps_of_all_ranks(
    parallel: Parallel, tmp_path: Path
) -> None:
    """Without attention, a token and the weights decide all scores of its row.

    vLLM's own trainers wait for no request. A row is then of the old weights or of the new ones, as
    it says; with two stages the scores of both are of the same.
    """
    old, new = (
        ranked.without_attention(folder, tmp_path / folder.name)
        for folder in (parallel.pair.old, parallel.pair.new)
    )
    probes = [
        clairai.Probe(f"row:{point}", Point.parse(point), np.eye(WIDTH, dtype=np.float32)[at])
        for at, point in enumerate(POINTS)
    ]
    parallel.call(steering.add_probes, probes)
    before = parallel.call(ranked.send, str(old)).version
    rows = parallel.call(ranked.train_while_answering, new, [probe.name for probe in probes])
    expected = {before: _score_tokens(old, probes), before + 1: _score_tokens(new, probes)}
    assert {*rows} == {*expected}, "rows of both versions"
    for version, (tokens_R, scores_RP) in rows.items():
        np.testing.assert_allclose(scores_RP, expected[version][tokens_R], rtol=1e-3, atol=1e-3)
        other_RP = expected[2 * before + 1 - version][tokens_R]
        assert (np.abs(scores_RP - other_RP) > 1e-2).all(axis=1).mean() > 0.9, "they can be told"
    parallel.call(ranked.send, str(parallel.pair.old))


def _score_tokens(folder: Path, probes: list[clairai.Probe]) -> np.ndarray:
    """The scores of each token of the vocabulary, in a model without attention."""
    halves = [hidden_states(str(folder), list(range(at, at + 256))) for at in (0, 256)]
    return np.stack(
        [
            np.concatenate([half[str(probe.point)] for half in halves]) @ probe.direction_D
            for probe in probes
        ],
        axis=1,
    )


def test_a_request_that_has_begun_keeps_its_weights(parallel: Parallel) -> None:
    before = parallel.call(ranked.state)
    kind, text = parallel.call(ranked.refuse_while_answering, parallel.pair.new)
    assert kind == "WeightsBusyError"
    assert "requests have begun" in text
    assert parallel.call(ranked.state) == before


def test_new_rows_of_a_vector_steer_at_every_rank(parallel: Parallel) -> None:
    rng = np.random.default_rng(8)

    def make(name: str) -> clairai.Vector:
        rows_PD = rng.standard_normal((len(POINTS), WIDTH)).astype(np.float32)
        return clairai.Vector(name, dict(zip(map(Point.parse, POINTS), rows_PD, strict=True)))

    first, becomes = make("v"), make("becomes")
    parallel.call(steering.put, [dumps(one) for one in (first, becomes)])
    asks = [Ask(ranked.PROMPTS[0], ({"vector": one.name},)) for one in (first, becomes)]
    steered, right = parallel.call(steering.answer, asks)
    assert steered.logprobs != right.logprobs
    rows_PD = np.stack([becomes.rows[point] for point in becomes.points])
    sent = parallel.call(ranked.send, {"steer::v": rows_PD})
    assert sent.vectors_version is not None
    steered, right = parallel.call(steering.answer, asks)
    assert steered.logprobs == right.logprobs


def test_an_adapter_changes_the_weights_that_serve(parallel: Parallel, tmp_path: Path) -> None:
    for folder in (parallel.pair.new, parallel.pair.old):
        parallel.call(ranked.send, str(folder))
        merged = adapters.merge(folder, parallel.adapter, tmp_path / folder.name)
        assert parallel.call(ranked.answers, str(parallel.adapter)) == ranked.greedy(merged)


def test_a_probe_comes_with_the_weights_or_alone(parallel: Parallel) -> None:
    parallel.call(ranked.add_probe, "p", 64)
    row_D = np.linspace(-1, 1, 64, dtype=np.float32)
    before = parallel.call(ranked.state).version
    alone = parallel.call(ranked.send, {"probe::p": row_D})
    both = parallel.call(ranked.send_with_probe, parallel.pair.new, {"probe::p": 2 * row_D})
    assert (alone.version, both.version) == (before, before + 1)
    assert both.bank_version is not None
    assert parallel.call(ranked.answers) == parallel.pair.new_answers
    parallel.call(ranked.send, str(parallel.pair.old))


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_that_cannot_keeps_all_ranks_at_the_old_weights(
    parallel: Parallel, rank: int
) -> None:
    before = parallel.call(ranked.state)
    rank %= parallel.num_ranks
    parallel.call(ranked.plant, rank, "prepare")
    kind, text = parallel.call(ranked.refuse, str(parallel.pair.new))
    assert kind == "WeightsRoomError"
    assert f"rank {rank}: planted" in text if rank else "planted" in text
    assert parallel.call(ranked.answers) == parallel.pair.old_answers
    assert parallel.call(ranked.state) == before
    assert parallel.call(ranked.send, str(parallel.pair.new)).version == before.version + 1
    parallel.call(ranked.send, str(parallel.pair.old))


@pytest.mark.parametrize("rank", [0, -1])
def test_after_a_load_that_failed_on_one_rank_only_a_whole_set_is_accepted(
    parallel: Parallel, rank: int
) -> None:
    before = parallel.call(ranked.state).version
    rank %= parallel.num_ranks
    parallel.call(ranked.plant, rank, "load")
    kind, text = parallel.call(ranked.refuse, str(parallel.pair.new))
    assert (kind, parallel.call(ranked.state).is_torn) == ("WeightsTornError", True)
    assert f"{parallel.num_ranks - 1} of {parallel.num_ranks} ranks have the new weights" in text
    kind, text = parallel.call(ranked.refuse_part, parallel.pair.new, _is_of_one_layer)
    assert kind == "WeightsTornError"
    assert "a part of the model" in text
    sent = parallel.call(ranked.send, str(parallel.pair.old))
    assert parallel.call(ranked.answers) == parallel.pair.old_answers
    assert sent.version > before + 1, "no version stands for what was in pieces"
    assert not parallel.call(ranked.state).is_torn


@pytest.mark.parametrize("how", [ranked.train_by_ray, ranked.train_by_ray_with_arguments])
def test_vllms_own_trainers_send_by_the_backends_name_to_ray_actors(
    parallel: Parallel, how: Any
) -> None:
    before = parallel.call(ranked.state).version
    parallel.call(how, parallel.pair.new)
    assert parallel.call(ranked.answers_anew) == parallel.pair.new_answers
    parallel.call(how, parallel.pair.old)
    assert parallel.call(ranked.answers_anew) == parallel.pair.old_answers
    assert parallel.call(ranked.state).version == before + 2
    parallel.call(ranked.train_on_another_rank, parallel.pair.new)
    assert parallel.call(ranked.state).version == before + 2


def test_tensors_that_exist_only_briefly_are_copied_when_they_come(parallel: Parallel) -> None:
    """As FSDP gathers them: each is overwritten when the next one is asked for."""
    parallel.call(ranked.send_briefly, parallel.pair.new)
    assert parallel.call(ranked.answers_anew) == parallel.pair.new_answers
    parallel.call(ranked.send_briefly, parallel.pair.old)
    assert parallel.call(ranked.answers_anew) == parallel.pair.old_answers


def test_a_rank_that_is_killed_between_the_phases_ends_the_engine_and_says_so(
    parallel: Parallel,
) -> None:
    """The last test: vLLM has no engine with a rank less."""
    parallel.call(ranked.plant, 1, "kill")
    kind, text = parallel.call(ranked.refuse, str(parallel.pair.new))
    assert kind == "EngineGoneError"
    assert "a rank has ended" in text
    assert parallel.call(ranked.cannot_answer), "nobody is answered by a mixture"
    kind, text = parallel.call(ranked.refuse, str(parallel.pair.new))  # the trainer itself goes on
    assert (kind, text.partition(";")[0]) == ("EngineGoneError", "vLLM has ended the engine")


class Served(NamedTuple):
    """A server of two ranks, in vLLM's development mode, which has its routes for trainers."""

    url: str
    runtime: Path

    def answers(self) -> list[tuple[int, ...]]:
        return [self._answer(prompt) for prompt in ranked.PROMPTS]

    def _answer(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        body = {"model": parts.MODEL, "prompt": list(prompt), "max_tokens": ranked.NUM_NEW}
        body |= {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        answer = self._post("/v1/completions", body)
        (choice,) = answer.json()["choices"]
        return tuple(choice["token_ids"])

    def post(self, path: str) -> None:
        self._post(path, {})

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        key = {"Authorization": f"Bearer {parts.KEY}"}
        answer = httpx.post(f"{self.url}{path}", json=body, headers=key, timeout=parts.DEADLINE_S)
        answer.raise_for_status()
        return answer

    def sender(self, folder: Path | None = None) -> Sender:
        return Sender(self.url, api_key=parts.KEY, runtime_dir=str(folder or self.runtime))


@pytest.fixture(scope="module")
def served(pair: Pair, runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    write_tokenizer(pair.old)
    given = {
        "--served-model-name": parts.MODEL,
        "--dtype": "float32",
        "--max-model-len": "128",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "32",
        "--tensor-parallel-size": "2",
        "--weight-transfer-config": '{"backend": "clairai_ipc"}',
    }
    command = EngineCommand(
        str(pair.old),
        clairai.config(points=["post_block.1"], runtime_dir=str(runtime)),
        ListenAddress(port=parts.free_port(), api_key=parts.KEY),
        ("--enforce-eager", *(text for both in given.items() for text in both)),
        parts.CPU | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    log = EngineLog(tmp_path_factory.mktemp("ranks") / "vllm.log")
    with ServerProcess(command, log=log) as server:
        assert server.wait_ready()
        yield Served(command.address.url, runtime)


def test_a_server_of_two_ranks_takes_weights_by_its_sockets_and_over_http(
    served: Served, pair: Pair, tmp_path: Path
) -> None:
    assert served.answers() == pair.old_answers
    near = served.sender().send(pair.new)
    assert (near.home, served.answers()) == ("host", pair.new_answers)
    far = served.sender(tmp_path).send(pair.old)
    assert (far.home, served.answers()) == ("http", pair.old_answers)
    assert far.version == near.version + 1


@pytest.fixture(scope="module")
def trainer() -> Iterator[ChildProcess]:
    """A process that has imported vLLM, and no engine."""
    with ChildProcess(choose_context({}), nullcontext) as process:
        yield process


def test_vllms_own_trainer_sends_by_the_backends_name_over_its_routes(
    served: Served, trainer: ChildProcess, pair: Pair
) -> None:
    for model, answers in ((pair.new, pair.new_answers), (pair.old, pair.old_answers)):
        served.post("/pause")
        trainer.call(ranked.train_over_http, served.url, model, str(served.runtime))
        served.post("/resume")
        assert served.answers() == answers


def test_the_call_of_older_trainers_sends_over_http_too(
    served: Served, trainer: ChildProcess, pair: Pair
) -> None:
    asked = {"mode": "http", "url": served.url, "runtime_dir": str(served.runtime)}
    for model, answers in ((pair.new, pair.new_answers), (pair.old, pair.old_answers)):
        served.post("/pause")
        served.post("/start_weight_update")
        trainer.call(ranked.train_with_arguments, model, asked)
        served.post("/finish_weight_update")
        served.post("/resume")
        assert served.answers() == answers


def test_what_a_trainer_sends_wrongly_ends_its_update_and_leaves_the_weights(
    served: Served, trainer: ChildProcess, pair: Pair
) -> None:
    asked = {"mode": "http", "url": served.url, "runtime_dir": str(served.runtime)}
    served.post("/start_weight_update")
    with pytest.raises(
        EngineFailed, match=r"/update_weights answered 500.*k_proj.weight.* missing"
    ):
        trainer.call(ranked.train_with_arguments, pair.new, asked, ranked.is_query)
    assert served.answers() == pair.old_answers
    served.post("/start_weight_update")  # the one before has ended
    trainer.call(ranked.train_with_arguments, pair.old, asked)
    served.post("/finish_weight_update")
    assert served.answers() == pair.old_answers
