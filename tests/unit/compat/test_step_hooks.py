"""Listeners hear of every real step, in the order in which the runner does things, and of no other.

The runner here has the shape of vLLM's V2 runner (v1/worker/gpu/model_runner.py, 0.26 and 0.32).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.compat import step_hooks as compat
from clairai.engine.publish.repeat_path import NoRepeatPath
from clairai.engine.step import StepBatch


class Model:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def compute_logits(self, hidden: str) -> str:
        self._told.append("logits")
        return f"logits of {hidden}"


class Runner:
    """Forwards, then makes logits if the step has any."""

    req_states = None

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.model = Model(self.told)
        self.input_buffers = SimpleNamespace(positions=torch.zeros(4), input_ids=torch.zeros(4))

    def prepare_inputs(self, scheduled: Any) -> Any:
        numbers = np.zeros(1, np.int32)
        return SimpleNamespace(
            req_ids=["a"],
            num_scheduled_tokens=numbers + scheduled.total_num_scheduled_tokens,
            num_computed_tokens_np=numbers,
        )

    def execute_model(self, scheduler_output: Any, *, dummy_run: bool = False) -> str:
        if not dummy_run:
            self.prepare_inputs(scheduler_output)
        self.told.append("forward")
        return "state"

    def sample_tokens(self, grammar: Any) -> str:
        if grammar != "no logits":
            self.model.compute_logits("hidden")
        self.told.append("sampled")
        return "tokens"

    def _dummy_run(self, num_tokens: int) -> None:
        self.told.append(f"dummy {num_tokens}")


class Listener:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def begin(self, new: Any, finished: Any) -> None:
        self._told.append(("begin", len(new), list(finished)))

    def amend(self, req_id: str, plan: Any) -> None:
        raise NotImplementedError

    def place(self, batch: StepBatch) -> None:
        self._told.append(("place", int(batch.counts_R[0])))

    def end(self, inputs: Any) -> None:
        self._told.append("end")
        inputs()

    def can_skip(self) -> bool:
        return False

    def before_dummy_run(self) -> None:
        self._told.append("before")

    def after_dummy_run(self) -> None:
        self._told.append("after")


@pytest.fixture
def engine() -> Runner:
    made = Runner()
    compat.connect_listeners(made, [Listener(made.told)], NoRepeatPath())
    return made


def scheduled(num_tokens: int) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[], finished_req_ids=set(), total_num_scheduled_tokens=num_tokens
    )


def test_a_step_is_told_from_its_beginning_to_the_end_of_its_forward(engine: Runner) -> None:
    assert engine.execute_model(scheduled(3)) == "state"
    assert engine.sample_tokens(None) == "tokens"
    assert engine.told[:2] == [("begin", 0, []), ("place", 3)]
    assert engine.told[2:] == ["forward", "end", "logits", "sampled"]


def test_the_scheduler_may_name_its_argument(engine: Runner) -> None:
    assert engine.execute_model(scheduler_output=scheduled(2)) == "state"
    assert engine.told[1] == ("place", 2)


def test_who_has_finished_is_told_when_the_next_step_begins(engine: Runner) -> None:
    step = scheduled(1)
    step.finished_req_ids.add("b")
    engine.execute_model(step)
    assert engine.told[0] == ("begin", 0, ["b"])


def test_warm_up_is_nobodys_step(engine: Runner) -> None:
    engine.execute_model(scheduled(5), dummy_run=True)
    engine.sample_tokens(None)
    engine._dummy_run(5)
    assert engine.told == ["forward", "logits", "sampled", "before", "dummy 5", "after"]
