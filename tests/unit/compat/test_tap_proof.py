"""Start-up finds a tap that runs in some forwards and not in others. The models are toys."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clairai.compat import worker
from clairai.compat.block_norms import find_passed_norms
from clairai.compat.pipeline_stages import Stage
from clairai.compat.tap_proof import TapProof
from clairai.engine.score.score_tables import ScoreTables
from clairai.errors import TapMissingError
from clairai.points import Point

WIDTH = 4
Norm = Callable[[torch.Tensor], torch.Tensor]


def fused(x_TD: torch.Tensor, norm: Norm) -> torch.Tensor:
    """As fused_allreduce_rms_norm: passes the norm by for small batches."""
    return x_TD if len(x_TD) <= 8 else norm(x_TD)


class RMSNorm(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Taps the site of its name, which it looks up as the ops do."""

    def __init__(self, named: dict[str, Any], name: str) -> None:
        super().__init__()
        self._sites, self._name = named, name

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        self._sites[self._name].read(x_TD)
        return x_TD


class CallingModel(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    def __init__(self, named: dict[str, Any]) -> None:
        super().__init__()
        self.first_norm = RMSNorm(named, "clairai.a")
        self.second_norm = RMSNorm(named, "clairai.b")

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        normed_TD: torch.Tensor = self.second_norm(self.first_norm(x_TD))
        return normed_TD


class PassingModel(CallingModel):
    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return fused(self.first_norm(x_TD), norm=self.second_norm)


class HidingModel(CallingModel):
    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return fused(fused(x_TD, self.first_norm), self.second_norm)


class RepeatingModel(CallingModel):
    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.second_norm(self.first_norm(self.second_norm(x_TD)))


def proof_of(kind: type[CallingModel], *, has_graphs: bool = False) -> tuple[Any, TapProof]:
    tables = ScoreTables(("a", "b"), width=WIDTH, capacity=1, max_tokens=32, device="cpu")
    named = {"clairai.a": tables.site("a"), "clairai.b": tables.site("b"), "layers.0": object()}
    model = kind(named)
    proof = TapProof(named, "clairai", has_graphs=has_graphs)
    proof.watch(model)
    return model, proof


def forward(model: Any, *sizes: int) -> None:
    for size in sizes:
        model(torch.zeros(size, WIDTH))


def test_a_model_that_calls_its_norms_is_served() -> None:
    model, proof = proof_of(CallingModel)
    forward(model, 32, 8, 1)
    proof.finish()


@pytest.mark.attack(118)
@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_norm_that_small_batches_pass_by_is_found_though_it_ran_in_others(
    has_graphs: bool,
) -> None:
    model, proof = proof_of(PassingModel, has_graphs=has_graphs)
    forward(model, 32, 16, 8)
    with pytest.raises(TapMissingError, match=r"1 of 2 taps .* of 8 tokens \(first: clairai.b\)"):
        proof.finish()


def test_a_norm_that_a_forward_calls_twice_is_found() -> None:
    model, proof = proof_of(RepeatingModel)
    forward(model, 8)
    with pytest.raises(TapMissingError, match=r"1 of 2 taps .* \(first: clairai.b, 2 times\)"):
        proof.finish()


@pytest.mark.attack(119)
def test_a_forward_without_any_tap_is_found_where_no_graph_can_explain_it() -> None:
    model, proof = proof_of(HidingModel)
    forward(model, 32, 8)
    with pytest.raises(TapMissingError, match="2 of 2 taps did not run in a forward of 8 tokens"):
        proof.finish()


def test_replays_of_graphs_run_no_tap_and_are_no_fault() -> None:
    model, proof = proof_of(HidingModel, has_graphs=True)
    forward(model, 32, 8)
    proof.finish()


def test_after_start_up_the_model_has_no_hooks() -> None:
    model, proof = proof_of(PassingModel)
    forward(model, 32)
    proof.finish()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def served(kind: type[CallingModel], *, has_graphs: bool = False) -> tuple[Any, TapProof]:
    """A model whose taps all ran at start-up."""
    model, proof = proof_of(kind, has_graphs=has_graphs)
    forward(model, 32)
    proof.finish()
    return model, proof


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_step_without_one_of_the_taps_ends_the_engine(has_graphs: bool) -> None:
    model, proof = served(PassingModel, has_graphs=has_graphs)
    forward(model, 32)
    proof.check_step(32)
    forward(model, 8)
    with pytest.raises(TapMissingError, match=r"1 of 2 taps did not run in a step of 8 tokens"):
        proof.check_step(8)


def test_a_step_without_any_tap_ends_the_engine_where_no_graph_can_explain_it() -> None:
    model, proof = served(HidingModel)
    proof.check_step(0)  # nothing was scheduled
    forward(model, 8)
    with pytest.raises(TapMissingError, match=r"2 of 2 taps did not run in a step of 8 tokens"):
        proof.check_step(8)
    model, proof = served(HidingModel, has_graphs=True)
    forward(model, 8)
    proof.check_step(8)


def checked_runner(*, is_publisher: bool = True, use_ray: bool = False) -> Any:
    """A model runner whose steps are checked, and its worker, whose second tap small steps miss."""
    model, proof = served(PassingModel)

    def execute_model(scheduled: Any, *, dummy_run: bool = False) -> str:
        forward(model, scheduled.total_num_scheduled_tokens)
        return "dummy" if dummy_run else "output"

    runner = SimpleNamespace(execute_model=execute_model)
    parallel = SimpleNamespace(tensor_parallel_size=1, use_ray=use_ray)
    engine: Any = SimpleNamespace(
        model_runner=runner,
        rank=1,
        clairai_tap_proof=proof,
        clairai_stage=Stage(0, 1, is_publisher),
        vllm_config=SimpleNamespace(parallel_config=parallel),
    )
    worker._check_every_step(engine)
    return engine


def test_every_step_of_the_runner_is_checked_whoever_calls_it() -> None:
    runner = checked_runner().model_runner
    assert runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=32)) == "output"
    small = SimpleNamespace(total_num_scheduled_tokens=8)
    assert checked_runner().model_runner.execute_model(small, dummy_run=True) == "dummy"
    with pytest.raises(TapMissingError, match="in a step of 8 tokens"):
        runner.execute_model(small)


def test_a_rank_whose_answer_nobody_reads_ends_with_its_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with pytest.raises(TapMissingError):
        checked_runner(is_publisher=False).model_runner.execute_model(
            SimpleNamespace(total_num_scheduled_tokens=8)
        )
    assert codes == [1]
    assert "rank 1 ends, and the engine with it" in caplog.text
    assert "1 of 2 taps did not run in a step of 8 tokens" in caplog.text


def test_steps_and_control_messages_exclude_each_other_where_they_have_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    engine = checked_runner(use_ray=True)
    held: list[bool] = []

    def note(*_: Any) -> None:
        held.append(engine.clairai_step_lock.locked())

    monkeypatch.setattr(worker, "answer_control", note)
    monkeypatch.setattr(engine.clairai_tap_proof, "check_step", note)
    engine.vllm_config.weight_transfer_config = None
    worker.handle_control(engine, b"")
    engine.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=32))
    assert held == [True, True]
    assert not engine.clairai_step_lock.locked()


def test_forwards_between_two_steps_are_no_fault() -> None:
    """Dummy runs; and steps that a graph publishes itself are not asked about."""
    model, proof = served(CallingModel)
    forward(model, 8, 8, 8)
    proof.check_step(8)


@pytest.mark.attack(120)
def test_norms_that_are_given_away_are_found_in_the_source() -> None:
    passing, _ = proof_of(PassingModel)
    assert find_passed_norms(passing) == {
        passing.second_norm: "PassingModel gives second_norm to fused"
    }
    hiding, _ = proof_of(HidingModel)
    assert {*find_passed_norms(hiding)} == {hiding.first_norm, hiding.second_norm}
    calling, _ = proof_of(CallingModel)
    assert find_passed_norms(calling) == {}


def worker_of(model: Any, num_ranks: int) -> Any:
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=num_ranks))
    runner = SimpleNamespace(get_model=lambda: model)
    return SimpleNamespace(vllm_config=config, model_runner=runner)


def test_such_a_norm_is_refused_with_several_ranks_and_called_with_one() -> None:
    model, _ = proof_of(PassingModel)
    points = [Point("pre_attn", 0), Point("post_attn", 0)]
    sites: Any = SimpleNamespace(
        site_of=dict(zip(points, ("a", "b"), strict=True)),
        modules={"a": model.first_norm, "b": model.second_norm},
    )
    ((point, reason),) = worker._find_bypassed(worker_of(model, 2), points, sites)
    assert point == points[1]
    assert reason.startswith("PassingModel gives second_norm to fused, which may pass it by")
    assert worker._find_bypassed(worker_of(model, 1), points, sites) == []
