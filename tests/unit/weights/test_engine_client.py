"""A Ray actor (a real one where Ray is installed) is asked the right questions in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.errors import UnsupportedError, WeightsBusyError, WeightsError, WeightsTornError
from clairai.weights import Sender, engine_client
from tests.support.probes import probe
from tests.support.toy_publisher import SECOND, running_publisher
from tests.support.weights import ToyLlm, engine, weights


class Method:
    """A method of a Ray actor: it has `remote` and cannot be called itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any, **named: Any) -> Callable[[], Any]:
        return lambda: self._function(*args, **named)


class Actor:
    """What Ray makes of an object: only its methods are visible."""

    def __init__(self, held: Any) -> None:
        for name in dir(held):
            if not name.startswith("_") and callable(getattr(held, name)):
                setattr(self, name, Method(getattr(held, name)))


class AsyncToy:
    """An AsyncLLM as a sender sees it; `told` lists its calls apart from questions."""

    def __init__(self, llm: ToyLlm) -> None:
        self._llm = llm
        self.told: list[str] = []

    def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        return self._llm.collective_rpc(method, args)

    def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.told.append(f"pause {mode} {clear_cache}")

    def resume_generation(self) -> None:
        self.told.append("resume")

    def update_weight_version(self, version: str) -> None:
        self.told.append(f"version {version}")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Callable[[], Any], timeout: float) -> Any:
        assert timeout >= 0
        return reference()

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path) as running:
        yield running


def is_serving(llm: ToyLlm, seed: int) -> bool:
    return all(torch.equal(llm.model[name], each) for name, each in weights(seed).items())


@pytest.mark.usefixtures("ray")
def test_an_actor_of_an_llm_is_asked_as_an_llm_is(llm: ToyLlm, tmp_path: Path) -> None:
    sent = Sender(Actor(llm), runtime_dir=str(tmp_path)).send(weights(1))
    assert (sent.version, sent.home) == (1, "host")
    assert is_serving(llm, 1)
    assert llm.resets == 1, "blocks of the old weights must not be used"


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("drain", ["wait", "abort"])
def test_an_actor_that_serves_is_paused_while_its_weights_change(
    llm: ToyLlm, tmp_path: Path, drain: Any
) -> None:
    held = AsyncToy(llm)
    Sender(Actor(held), runtime_dir=str(tmp_path), drain=drain).send(weights(1))
    assert is_serving(llm, 1)
    assert held.told == [f"pause {drain} True", "version 1", "resume"]


@pytest.mark.usefixtures("ray")
def test_a_refused_transfer_pauses_nothing(llm: ToyLlm, tmp_path: Path) -> None:
    held = AsyncToy(llm)
    wrong = weights(1) | {"model.layers.0.b": torch.zeros(15)}
    with pytest.raises(WeightsError, match="has shape"):
        Sender(Actor(held), runtime_dir=str(tmp_path)).send(wrong)
    assert held.told == []


@pytest.mark.usefixtures("ray")
def test_a_bank_alone_pauses_nothing(tmp_path: Path) -> None:
    with running_publisher(tmp_path) as step_publisher:
        step_publisher.install(step_publisher.bank.add([probe("p", point=SECOND)]))
        with engine(tmp_path, step_publisher) as llm:
            held = AsyncToy(llm)
            Sender(Actor(held), runtime_dir=str(tmp_path)).send({"probe::p": np.ones(3, "f4")})
            assert held.told == []
            assert step_publisher.bank.probes[0].direction_D.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.usefixtures("ray")
def test_half_loaded_weights_leave_the_actor_paused(llm: ToyLlm, tmp_path: Path) -> None:
    held = AsyncToy(llm)
    llm.fail_after = 2
    with pytest.raises(WeightsTornError, match="half-way"):
        Sender(Actor(held), runtime_dir=str(tmp_path)).send(weights(1))
    assert held.told == ["pause wait True"]


def test_requests_that_do_not_end_keep_the_old_weights(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(reference: Callable[[], Any], timeout: float) -> Any:
        answer = reference()
        if held.told == ["pause wait True"]:
            raise TimeoutError(timeout)
        return answer

    held = AsyncToy(llm)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))
    with pytest.raises(WeightsError, match="still run after 300 s"):
        Sender(Actor(held), runtime_dir=str(tmp_path)).send(weights(1))
    assert held.told == ["pause wait True", "resume"]
    assert is_serving(llm, 0)


@pytest.mark.usefixtures("ray")
def test_requests_that_a_pause_left_in_the_queue_are_waited_for(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, original = AsyncToy(llm), engine_client.RayEngine._ask_commit

    def busy_once(self: Any, manifest: bytes) -> Any:
        if held.told == ["pause wait True"]:
            raise WeightsBusyError("one has begun")
        return original(self, manifest)

    monkeypatch.setattr(engine_client.RayEngine, "_ask_commit", busy_once)
    Sender(Actor(held), runtime_dir=str(tmp_path)).send(weights(1))
    pause = "pause wait True"
    assert held.told == [pause, "resume", pause, "version 1", "resume"]
    assert is_serving(llm, 1)


def test_without_ray_an_actor_is_refused(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(UnsupportedError, match="ray is not imported"):
        Sender(Actor(llm), runtime_dir=str(tmp_path)).send(weights(1))
