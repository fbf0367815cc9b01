"""Two ranks get new weights: all of them or none, whatever one of them does.

The reference is an engine that was started with the other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
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
from clairai.weights import Sender
from tests.engine import models, ranked, weighed
from tests.engine import server as parts
from tests.engine.process import ChildProcess, EngineFailed, EngineProcess, choose_context

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ONE_LAYER: Final = ".layers.1."


class Pair(NamedTuple):
    """Two models of one shape, and what an engine that was started with each of them answers."""

    old: Path
    new: Path
    old_answers: list[tuple[int, ...]]
    new_answers: list[tuple[int, ...]]


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
def parallel(pair: Pair, runtime: Path) -> Iterator[EngineProcess]:
    with EngineProcess(
        runtime=runtime,
        environment={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to the ranks
        },
        **_arguments(
            pair.old,
            tensor_parallel_size=2,
            weight_transfer_config={"backend": "clairai_ipc"},
            additional_config=clairai.config(points=["post_block.1"], capacity=4),
        ),
    ) as engine:
        yield engine


def _is_of_one_layer(name: str) -> bool:
    return ONE_LAYER in name


def _is_of_the_others(name: str) -> bool:
    return ONE_LAYER not in name


def test_both_ranks_get_a_whole_set_and_there_is_one_version(
    parallel: EngineProcess, pair: Pair
) -> None:
    assert parallel.call(ranked.answers) == pair.old_answers
    sent = parallel.call(ranked.send, str(pair.new), "step-1")
    assert parallel.call(ranked.answers) == pair.new_answers
    state = parallel.call(ranked.state)
    assert state.devices == ("cpu", "cpu")
    assert (state.version, state.label, state.digest) == (1, "step-1", sent.digest)
    back = parallel.call(ranked.send, str(pair.old))
    assert (back.version, parallel.call(ranked.answers)) == (2, pair.old_answers)


def test_a_part_of_the_model_changes_that_part_alone(parallel: EngineProcess, pair: Pair) -> None:
    whole = parallel.call(ranked.send, str(pair.old))
    for chosen in (_is_of_one_layer, _is_of_the_others):
        sent = parallel.call(ranked.send_part, pair.new, chosen)
    assert parallel.call(ranked.answers) == pair.new_answers
    assert sent.version == whole.version + 2
    back = parallel.call(ranked.send_part, pair.old, _is_of_one_layer)
    assert parallel.call(ranked.answers) not in (pair.old_answers, pair.new_answers)
    parallel.call(ranked.send_part, pair.old, _is_of_the_others)
    assert parallel.call(ranked.answers) == pair.old_answers
    # Equal weights have equal digests, however they came.
    assert len({whole.digest, sent.digest, back.digest}) == 3
    assert parallel.call(ranked.state).digest == whole.digest


def test_half_a_layer_is_refused_by_name(parallel: EngineProcess, pair: Pair) -> None:
    kind, text = parallel.call(ranked.refuse_part, pair.new, ranked.is_query)
    assert kind == "WeightsError"
    assert "k_proj.weight" in text
    assert "send all 3 tensors of that layer" in text
    assert parallel.call(ranked.answers) == pair.old_answers


def test_a_probe_comes_with_the_weights_or_alone(parallel: EngineProcess, pair: Pair) -> None:
    parallel.call(ranked.add_probe, "p", 64)
    row_D = np.linspace(-1, 1, 64, dtype=np.float32)
    before = parallel.call(ranked.state).version
    alone = parallel.call(ranked.send, {"probe::p": row_D})
    both = parallel.call(ranked.send_with_probe, pair.new, {"probe::p": 2 * row_D})
    assert (alone.version, both.version) == (before, before + 1)
    assert both.bank_version is not None
    assert parallel.call(ranked.answers) == pair.new_answers
    parallel.call(ranked.send, str(pair.old))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_keeps_all_ranks_at_the_old_weights(
    parallel: EngineProcess, pair: Pair, rank: int
) -> None:
    before = parallel.call(ranked.state)
    parallel.call(ranked.plant, rank, "prepare")
    kind, text = parallel.call(ranked.refuse, str(pair.new))
    assert kind == "WeightsRoomError"
    assert "planted" in text
    assert parallel.call(ranked.answers) == pair.old_answers
    assert parallel.call(ranked.state) == before
    assert parallel.call(ranked.send, str(pair.new)).version == before.version + 1
    parallel.call(ranked.send, str(pair.old))


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_load_that_failed_on_one_rank_only_a_whole_set_is_accepted(
    parallel: EngineProcess, pair: Pair, rank: int
) -> None:
    before = parallel.call(ranked.state).version
    parallel.call(ranked.plant, rank, "load")
    kind, text = parallel.call(ranked.refuse, str(pair.new))
    assert (kind, parallel.call(ranked.state).is_torn) == ("WeightsTornError", True)
    assert "1 of 2 ranks have the new weights" in text
    kind, text = parallel.call(ranked.refuse_part, pair.new, _is_of_one_layer)
    assert kind == "WeightsTornError"
    assert "a part of the model" in text
    sent = parallel.call(ranked.send, str(pair.old))
    assert parallel.call(ranked.answers) == pair.old_answers
    assert sent.version > before + 1, "no version stands for what was in pieces"
    assert not parallel.call(ranked.state).is_torn


@pytest.mark.parametrize("how", [ranked.train_by_ray, ranked.train_by_ray_with_arguments])
def test_vllms_own_trainers_send_by_the_backends_name_to_ray_actors(
    parallel: EngineProcess, pair: Pair, how: Any
) -> None:
    before = parallel.call(ranked.state).version
    parallel.call(how, pair.new)
    assert parallel.call(ranked.answers_anew) == pair.new_answers
    parallel.call(how, pair.old)
    assert parallel.call(ranked.answers_anew) == pair.old_answers
    assert parallel.call(ranked.state).version == before + 2
    parallel.call(ranked.train_on_another_rank, pair.new)
    assert parallel.call(ranked.state).version == before + 2


def test_tensors_that_exist_only_briefly_are_copied_when_they_come(
    parallel: EngineProcess, pair: Pair
) -> None:
    """As FSDP gathers them: each is overwritten when the next one is asked for."""
    parallel.call(ranked.send_briefly, pair.new)
    assert parallel.call(ranked.answers_anew) == pair.new_answers
    parallel.call(ranked.send_briefly, pair.old)
    assert parallel.call(ranked.answers_anew) == pair.old_answers


def test_a_rank_that_is_killed_between_the_phases_ends_the_engine_and_says_so(
    parallel: EngineProcess, pair: Pair
) -> None:
    """The last test: vLLM has no engine with a rank less."""
    parallel.call(ranked.plant, 1, "kill")
    kind, text = parallel.call(ranked.refuse, str(pair.new))
    assert kind == "EngineGoneError"
    assert "a rank has ended" in text
    assert parallel.call(ranked.cannot_answer), "nobody is answered by a mixture"
    kind, text = parallel.call(ranked.refuse, str(pair.new))  # the trainer itself goes on
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
        answer = httpx.post(f"{self.url}{path}", json=body, headers=key, timeout=120)
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
