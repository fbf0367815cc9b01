"""A graph of a whole forward publishes its step when all taps have run; all graphs do, or none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clairai.compat import step_hooks
from clairai.compat.step_hooks import publish_in_graphs, watch_forwards
from clairai.engine.side_stream import AfterTaps, NoSideStream
from clairai.engine.step import ForwardInputs


class Model(torch.nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Runs so many taps, each of three tokens."""

    def __init__(self, tail: AfterTaps, told: list[Any]) -> None:
        super().__init__()
        self._tail, self._told = tail, told

    def forward(self, num_taps: int) -> torch.Tensor:
        for at in range(num_taps):
            self._told.append(f"tap {at}")
            self._tail.tap_ran(3)
        self._told.append("last block")
        return torch.zeros(3, 8)


class Forwards:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def forwarded(self, inputs: Callable[[], ForwardInputs]) -> None:
        self._told.append(f"forwarded {inputs()}")

    def captured(self, num_tokens: int) -> None:
        self._told.append(f"publish {num_tokens}")

    def disable_graphs(self) -> None:
        self._told.append("keep out")


class Engine:
    """As vLLM: forwards, and graphs that are captured around them."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.is_capturing = False
        tail = AfterTaps(NoSideStream())
        self.model = Model(tail, self.told)
        inputs: Any = lambda: "inputs"  # noqa: E731
        watch_forwards(self.model, inputs, tail, Forwards(self.told), lambda: self.is_capturing)

    def forward(self, num_taps: int = 2) -> list[Any]:
        self.told.clear()
        self.model(num_taps)
        return list(self.told)

    def capture(self, num_taps: int = 2) -> list[Any]:
        self.is_capturing = True
        told = self.forward(num_taps)
        self.is_capturing = False
        return told


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_forward_that_runs_as_python_is_told_when_it_is_over(engine: Engine) -> None:
    assert engine.forward() == ["tap 0", "tap 1", "last block", "forwarded inputs"]


def test_a_graph_publishes_as_soon_as_the_last_tap_has_run(engine: Engine) -> None:
    engine.forward()
    assert engine.capture() == ["tap 0", "tap 1", "publish 3", "last block"]
    assert engine.capture() == ["tap 0", "tap 1", "publish 3", "last block"]


def test_pieces_that_are_replayed_run_no_tap_and_are_no_measure_of_how_many_there_are(
    engine: Engine,
) -> None:
    engine.forward()
    assert engine.forward(num_taps=0) == ["last block", "forwarded inputs"]
    assert engine.capture() == ["tap 0", "tap 1", "publish 3", "last block"]


def test_a_graph_before_which_nothing_ran_keeps_publishing_out_of_all(engine: Engine) -> None:
    assert engine.capture() == ["tap 0", "tap 1", "last block", "keep out"]


@pytest.mark.parametrize(("num_taps", "is_published"), [(1, False), (3, True)])
def test_a_graph_with_other_taps_keeps_publishing_out_of_all(
    engine: Engine, num_taps: int, is_published: bool
) -> None:
    """Too early is as wrong as never: a tap would not have run yet."""
    engine.forward()
    told = engine.capture(num_taps)
    assert ("publish 3" in told) is is_published
    assert told[-1] == "keep out"


class Held(AfterTaps):
    """Notes whether it stays in line."""

    is_in_line = False

    def stay_on_main_stream(self) -> None:
        self.is_in_line = True


def published(model: Model, tapped: str = "pre_attn.1") -> str:
    """How the graphs of a model with two blocks publish."""
    tail = Held(NoSideStream())
    tables: Any = SimpleNamespace(tail=tail, sites=("pre_attn.0", tapped))
    runner, inputs = SimpleNamespace(get_model=lambda: model), SimpleNamespace()
    publish_in_graphs(runner, inputs, tables, Forwards([]), "post_block.1")  # type: ignore[arg-type]
    if not (model._forward_hooks and model._forward_pre_hooks):
        return "not"
    return "in line" if tail.is_in_line else "beside"


@pytest.fixture
def model() -> Model:
    made = Model(AfterTaps(NoSideStream()), [])
    made.weight = torch.nn.Parameter(torch.zeros(1000))
    return made


@pytest.mark.parametrize("tapped", ["pre_attn.1", "post_block.1"])
def test_a_small_models_graphs_publish_in_line_wherever_the_last_tap_is(
    model: Model, tapped: str
) -> None:
    assert published(model, tapped) == "in line"


@pytest.mark.parametrize(("tapped", "how"), [("pre_attn.1", "beside"), ("post_block.1", "not")])
def test_a_large_models_graphs_publish_beside_what_follows_the_last_tap(
    model: Model, tapped: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_hooks, "LARGE_MODEL_BYTES", 4000)
    assert published(model, tapped) == how


def test_a_model_whose_graphs_end_inside_of_it_is_left_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert published(model) == "not"


def test_a_model_that_is_compiled_with_its_hooks_is_left_alone(model: Model) -> None:
    model._compiled_call_impl = model._call_impl  # as Module.compile does
    assert published(model) == "not"
