"""On a GPU: the compiled steer kernel equals reference and twin, eager and in a captured graph.

T = tokens, D = width. No engine is started here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steer_twin import steer_twin
from clairai.engine.steer.steering_plan import PlanAction, PlanGate, PlanRow, SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from clairai.fields.ranges import OPEN_END
from tests.support.random_plans import row
from tests.support.steered_engine import fixed_history, fleet, random_history

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROUNDING = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5}
ALWAYS = ((0, OPEN_END),)
MAX_TOKENS, NUM_SITES = 8192, 4


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_row_of_any_history_equals_the_reference(dtype: str) -> None:
    for seed in range(40):
        held = fleet(getattr(torch, dtype), device="cuda:0")
        rng = np.random.default_rng(seed)
        assert random_history(held, rng, num_steps=12, tolerance=ROUNDING[dtype]) == []


def test_the_sequence_is_right_for_many_plans() -> None:
    for seed in range(40):
        assert not any(fixed_history(fleet(device="cuda:0"), seed))


def tables(width: int, dtype: str) -> SteerTables:
    return SteerTables(
        [f"s{index}" for index in range(NUM_SITES)], width=width, max_tokens=MAX_TOKENS,
        gate_slots=8, rows=128, programs=16, vocabulary=64, device="cuda:0",
        dtype=getattr(torch, dtype),
    )  # fmt: skip


def plan(width: int, seed: int) -> SteeringPlan:
    """All four ops over all sites, one gate that is soft and one that remembers."""
    rng = np.random.default_rng(seed)

    def rows() -> tuple[PlanRow, ...]:
        return tuple(row(f"s{i}", rng.standard_normal(width)) for i in range(NUM_SITES))

    actions = (
        PlanAction("v", "", "add", rows(), 0.5, ALWAYS, is_matched=True, gate=0),
        PlanAction("v", "", "ablate", rows(), 1.0, ((3, OPEN_END),), gate=1),
        PlanAction("v", "", "clamp", rows(), 1.0, ALWAYS, low=-0.5, high=0.5),
        PlanAction("v", "", "replace", rows(), 0.25, ((0, 90), (95, OPEN_END))),
    )
    soft = PlanGate("toy", rows()[0], 0.1, "sigmoid", 0.5, sharpness=3.0)
    held = PlanGate("toy", rows()[0], 0.1, "none", 2.0, release=-1.0, latch=seed % 2 == 0)
    return SteeringPlan(actions, (soft, held))


def forward(held: SteerTables, streams: torch.Tensor) -> None:
    for index in range(NUM_SITES):
        held.site(f"s{index}").apply(streams[index, 0], streams[index, 1])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("width", [576, 4096, 8192])
def test_the_kernel_equals_its_twin_at_the_sizes_of_real_models(width: int, dtype: str) -> None:
    held = tables(width, dtype)
    steering = WorkerSteering(held, {f"s{index}": f"s{index}" for index in range(NUM_SITES)})
    for number in range(4):
        steering.add(f"r{number}", plan(width, number))
    for counts in ([1, 1, 1, 1], [300, 7, 1, 64]):
        names, starts_R = [f"r{number}" for number in range(4)], np.zeros(4, np.int32)
        steering.place(StepBatch(names, np.array(counts, np.int32), starts_R))
        shape = (NUM_SITES, 2, sum(counts) + 5, width)
        by_kernel = torch.randn(shape, device="cuda").to(held.dtype)
        by_twin = by_kernel.clone()
        forward(held, by_kernel)
        kernel_state = held.state_ZG.clone()
        for index in range(NUM_SITES):
            steer_twin(by_twin[index, 0], by_twin[index, 1], held, index)
        bound = 3 * ROUNDING[dtype]
        torch.testing.assert_close(by_kernel, by_twin, rtol=bound, atol=bound)
        torch.testing.assert_close(held.state_ZG, kernel_state)
        assert (by_kernel[:, 0, : sum(counts)] == 0).all()  # clamp and replace act on every row


def test_a_captured_graph_follows_the_map_and_the_programs() -> None:
    """Captured before any request is steered; replayed while steered ones come and go."""
    width, num_tokens = 576, 16
    held, eager = tables(width, "bfloat16"), tables(width, "bfloat16")
    sites = {f"s{index}": f"s{index}" for index in range(NUM_SITES)}
    steerings = WorkerSteering(held, sites), WorkerSteering(eager, sites)
    given = torch.randn(NUM_SITES, 2, num_tokens, width, device="cuda", dtype=torch.bfloat16)
    streams = given.clone()
    forward(held, streams)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(held, streams)
    for number, counts in enumerate(([5, 3], [1, 1], [1, 9], [2])):
        names = [f"r{number - place}" for place in range(len(counts))]
        batch = StepBatch(names, np.array(counts, np.int32), np.full(len(counts), number, np.int32))
        for steering in steerings:
            steering.add(f"r{number}", plan(width, number))
            steering.place(batch)
        streams.copy_(given)
        graph.replay()
        expected = given.clone()
        forward(eager, expected)
        assert torch.equal(streams, expected)
        assert torch.equal(held.state_ZG, eager.state_ZG)
        assert torch.equal(streams[:, :, sum(counts) :], given[:, :, sum(counts) :])
        assert not torch.equal(streams, given)


def test_a_map_sent_for_the_next_step_does_not_affect_the_running_one() -> None:
    """The host runs ahead: what it sends is ordered behind the forward it had launched before."""
    held = tables(4096, "bfloat16")
    steering = WorkerSteering(held, {"s0": "s0"})
    added = row("s0", np.ones(4096))
    steering.add("r", SteeringPlan((PlanAction("v", "", "add", (added,), 1.0, ALWAYS),)))
    site = held.site("s0")
    rows = torch.zeros(400, 64, 4096, device="cuda", dtype=torch.bfloat16)
    for number in range(400):
        is_steered = number % 2 == 0
        step = StepBatch(
            ["r" if is_steered else "q"], np.array([64], np.int32), np.zeros(1, np.int32)
        )
        steering.place(step)
        site.apply(rows[number], None)
    assert (rows[::2] == 1).all()
    assert (rows[1::2] == 0).all()
