"""A step's end is told once: at once, or when the logits are on their way, or at the latest after.

The runner here has the shape of vLLM's V2 runner (v1/worker/gpu/model_runner.py, 0.26 and 0.32).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.compat import runner as compat
from clairai.tap.rows import Batch


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

    def execute_model(self, scheduled: Any, *, dummy_run: bool = False) -> str:
        if not dummy_run:
            self.prepare_inputs(scheduled)
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

    def amend(self, req_id: str, course: Any) -> None:
        raise NotImplementedError

    def place(self, batch: Batch) -> None:
        self._told.append(("place", int(batch.counts_R[0])))

    def end(self, inputs: Any) -> None:
        self._told.append("end")
        inputs()

    def blank(self) -> None:
        self._told.append("blank")


@pytest.fixture
def engine() -> Runner:
    made = Runner()
    compat.connect(made, [Listener(made.told)])
    return made


def scheduled(num_tokens: int) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[], finished_req_ids=set(), total_num_scheduled_tokens=num_tokens
    )


FEW, MANY = compat.MOST_BESIDE_LOGITS, compat.MOST_BESIDE_LOGITS + 1


def test_the_end_of_a_step_of_few_tokens_is_told_before_its_logits(engine: Runner) -> None:
    assert engine.execute_model(scheduled(FEW)) == "state"
    assert engine.sample_tokens(None) == "tokens"
    assert engine.told[:2] == [("begin", 0, []), ("place", FEW)]
    assert engine.told[2:] == ["forward", "end", "logits", "sampled"]


def test_the_end_of_a_step_of_many_is_told_when_its_logits_are_on_their_way(
    engine: Runner,
) -> None:
    engine.execute_model(scheduled(MANY))
    engine.sample_tokens(None)
    assert engine.told[:2] == [("begin", 0, []), ("place", MANY)]
    assert engine.told[2:] == ["forward", "logits", "end", "sampled"]
    assert engine.model.compute_logits("others") == "logits of others"
    assert engine.told.count("end") == 1


def test_a_step_without_logits_ends_with_its_sampling(engine: Runner) -> None:
    engine.execute_model(scheduled(MANY))
    engine.sample_tokens("no logits")
    assert engine.told[-3:] == ["forward", "sampled", "end"]


def test_a_step_that_nothing_came_after_ends_before_the_next_begins(engine: Runner) -> None:
    engine.execute_model(scheduled(MANY))
    engine.execute_model(scheduled(FEW))
    assert engine.told.index("end") < engine.told.index(("begin", 0, []), 1)
    assert engine.told.count("end") == 2


def test_warm_up_is_nobodys_step(engine: Runner) -> None:
    engine.execute_model(scheduled(MANY), dummy_run=True)
    engine.sample_tokens(None)
    engine._dummy_run(5)
    assert engine.told == ["forward", "logits", "sampled", "blank", "dummy 5"]
