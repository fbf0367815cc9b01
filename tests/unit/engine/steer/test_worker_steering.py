"""The host side of steering: what is sent to the tables, and when nothing is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clairai.engine.steer import steer_tables as t
from clairai.engine.steer.program_cache import SlotTable
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import PlanAction, PlanGate, SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from clairai.fields.ranges import OPEN_END, Range
from tests.support.random_plans import SITE_OF, SITES, WIDTH, row

MAX_TOKENS = 512
ALWAYS = ((0, OPEN_END),)


class Sent(SteerTables):
    """Tables that note what was put into them."""

    def __init__(self, *, rows: int = 8, programs: int = 4, gate_slots: int = 2) -> None:
        super().__init__(
            SITES, width=WIDTH, max_tokens=MAX_TOKENS, gate_slots=gate_slots, rows=rows,
            programs=programs, vocabulary=4, device="cpu",
        )  # fmt: skip
        self.maps: list[NDArray[np.int32]] = []
        self.rows: list[int] = []
        self.programs: list[int] = []

    def put_map(self, map_N4: NDArray[np.int32]) -> None:
        self.maps.append(map_N4.copy())
        super().put_map(map_N4)

    def put_rows(self, indices: Sequence[int], rows: Sequence[NDArray[np.float32]]) -> None:
        self.rows += indices
        super().put_rows(indices, rows)

    def put_program(
        self, index: int, words_SOW: NDArray[np.int32], num_ops_S: NDArray[np.int32]
    ) -> None:
        self.programs.append(index)
        super().put_program(index, words_SOW, num_ops_S)


def made(**room: int) -> tuple[Sent, WorkerSteering]:
    tables = Sent(**room)
    return tables, WorkerSteering(tables, SITE_OF)


def adding(number: float, *ranges: Range, gate: PlanGate | None = None) -> SteeringPlan:
    """Add a vector of this number; two plans of one number are the same content."""
    rows = (row("pre_attn.0", np.full(WIDTH, number)),)
    if gate is None:
        return SteeringPlan((PlanAction("v", "", "add", rows, 1.0, ranges or ALWAYS),))
    return SteeringPlan((PlanAction("v", "", "add", rows, 1.0, ranges or ALWAYS, gate=0),), (gate,))


def latched() -> PlanGate:
    return PlanGate("toy", row("pre_attn.0", np.ones(WIDTH)), 0.0, "none", 1.0, latch=True)


def batch(**requests: tuple[int, int]) -> StepBatch:
    """Of each request: where it starts, how many tokens."""
    starts, counts = zip(*requests.values(), strict=True) if requests else ((), ())
    return StepBatch([*requests], np.array(counts, np.int32), np.array(starts, np.int32))


def programs(tables: SteerTables, number: int) -> list[int]:
    found: list[int] = tables.map_T4[:number, t.PROGRAM].tolist()
    assert not tables.map_T4[number:].any()
    return found


def test_without_steered_requests_nothing_is_sent() -> None:
    tables, steering = made()
    for start in range(5):
        steering.place(batch(a=(start, 1), b=(start, 7)))
    assert tables.maps == []


def test_while_the_same_requests_decode_the_map_is_sent_once() -> None:
    tables, steering = made()
    steering.add("a", adding(1))
    steering.place(batch(a=(0, 4), b=(0, 3)))
    for start in range(5, 15):
        steering.place(batch(a=(start, 1), b=(start, 1)))
    assert len(tables.maps) == 2
    assert programs(tables, 2) == [1, 0]


def test_an_equal_map_is_not_sent_again_for_other_requests() -> None:
    tables, steering = made()
    for name in "ab":
        steering.add(name, adding(1))
    for step in (batch(a=(3, 1), x=(9, 1)), batch(b=(8, 1), y=(2, 1))):
        steering.place(step)
    assert len(tables.maps) == 1


def test_a_request_that_enters_another_segment_runs_its_program_from_there() -> None:
    tables, steering = made()
    steering.add("a", adding(1, (3, 5), (6, 8)))
    found = []
    for start in range(9):
        steering.place(batch(x=(start, 1), a=(start, 1)))
        found.append(programs(tables, 2))
    assert found == [[0, program] for program in (0, 0, 0, 1, 1, 0, 1, 1, 0)]
    steering.place(batch(a=(1, 8), x=(0, 2)))
    assert programs(tables, 10) == [0, 0, 1, 1, 0, 1, 1, 0, 0, 0]


def test_a_preempted_request_is_back_in_its_first_segment() -> None:
    tables, steering = made()
    steering.add("a", adding(1, (0, 2)))
    for start in (0, 1, 2, 3, 0):
        steering.place(batch(a=(start, 1)))
    assert programs(tables, 1) == [1]


def test_steered_rows_are_cleared_for_the_next_requests() -> None:
    tables, steering = made()
    steering.add("a", adding(1))
    steering.place(batch(a=(0, 9)))
    steering.place(batch(a=(9, 1), x=(0, 2)))
    assert programs(tables, 3) == [1, 0, 0]
    steering.remove("a")
    steering.place(batch(x=(2, 1)))
    assert (programs(tables, 0), tables.num_mapped) == ([], 0)
    assert len(tables.maps) == 3


def test_a_dummy_run_steers_no_row_and_the_next_step_steers_again() -> None:
    tables, steering = made()
    steering.add("a", adding(1))
    steering.place(batch(a=(0, 2)))
    steering.before_dummy_run()
    assert (programs(tables, 0), tables.num_mapped) == ([], 0)
    steering.place(batch(a=(0, 2)))
    assert programs(tables, 2) == [1, 1]


def test_the_run_of_a_stateful_request_starts_at_its_first_row() -> None:
    tables, steering = made()
    steering.add("plain", adding(1))
    steering.add("a", adding(1, (2, 9), gate=latched()))
    steering.add("b", adding(1, gate=latched()))
    steering.place(batch(plain=(0, 1), b=(4, 2), a=(0, 3)))
    assert tables.map_T4[:6].tolist() == [
        [1, 0, 0, 0], [2, 2, 1, 0], [2, -1, 1, 0], [0, 3, 0, 1], [0, -1, 0, 0], [2, -1, 0, 0],
    ]  # fmt: skip
    assert tables.reads_ZS.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_fresh_start_is_sent_once() -> None:
    tables, steering = made()
    steering.add("a", adding(1, gate=latched()))
    found = []
    for start in (0, 1, 2, 0, 1):
        steering.place(batch(a=(start, 1)))
        found.append(int(tables.map_T4[0, t.FRESH]))
    assert found == [1, 0, 0, 1, 0]


def test_requests_that_steer_alike_share_rows_and_programs() -> None:
    tables, steering = made()
    for name in "abcdefgh":
        steering.add(name, adding(1, (len(name), OPEN_END)))
    assert len(tables.rows) == len(tables.programs) == 1


def test_unused_rows_and_programs_stay_cached_until_their_slots_are_needed() -> None:
    tables, steering = made(rows=3, programs=3)
    for number in (1, 2, 3):
        steering.add(f"r{number}", adding(number))
        steering.remove(f"r{number}")
    steering.add("again", adding(1))
    assert len(tables.rows) == len(tables.programs) == 3
    steering.add("new", adding(4))  # in the place of the longest unused
    assert tables.rows[-1] == tables.rows[1]
    steering.remove("new")
    steering.add("last", adding(3))
    assert len(tables.rows) == len(tables.programs) == 4
    assert tables.vectors_VD[:, 0].tolist() == [1, 4, 3]


def added_one_by_one(*numbers: float) -> list[float]:
    """Requests that add these numbers; there is room for two rows, and for programs enough."""
    tables, steering = made(rows=2, programs=4)
    found = []
    for number in numbers:
        steering.add("a", adding(number))
        steering.place(batch(a=(0, 1)))
        x_TD = torch.zeros(1, WIDTH)
        tables.site("a").apply(x_TD, None)
        found.append(float(x_TD[0, 0]))
        steering.remove("a")
    return found


def test_a_program_is_dropped_with_a_row_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert added_one_by_one(1, 2, 3, 1) == [1, 2, 3, 1]
    # A program that stays while its row goes would read another's.
    drop = SlotTable.drop
    monkeypatch.setattr(SlotTable, "drop", lambda *by: isinstance(by[1], bytes) or drop(*by))
    assert added_one_by_one(1, 2, 3, 1) == [1, 2, 3, 3]


def test_a_request_that_comes_back_is_known_already() -> None:
    tables, steering = made()
    steering.add("a", adding(1, gate=latched()))
    steering.add("a", adding(2))
    assert len(steering._slots) == 1
    assert len(tables.rows) == 1
    for name in ("a", "a", "never seen"):
        steering.remove(name)
    assert len(steering._slots) == 0


@pytest.mark.parametrize(
    ("room", "plan", "what"),
    [
        ({"rows": 2}, adding(9), "all 2 rows of vectors are in use"),
        ({"programs": 2}, adding(9), "all 2 programs are in use"),
        ({"gate_slots": 2}, adding(1, gate=latched()), "all 2 gate slots are in use"),
    ],
)
def test_a_full_table_is_an_error_and_never_another_requests_slot(
    room: dict[str, int], plan: SteeringPlan, what: str
) -> None:
    steering = WorkerSteering(Sent(**room), SITE_OF)
    gate = latched() if "gate_slots" in room else None
    for number in (1, 2):
        steering.add(f"r{number}", adding(number, gate=gate))
    with pytest.raises(RuntimeError, match=what):
        steering.add("one more", plan)


def test_without_token_ids_a_plan_that_skips_special_tokens_is_an_error() -> None:
    skipping = PlanAction(
        "v", "", "add", adding(1).actions[0].rows, 1.0, ALWAYS, skips_special=True
    )
    tables, steering = made()
    steering.add("a", adding(1))
    with pytest.raises(RuntimeError, match="exposes no token ids"):
        steering.add("b", SteeringPlan((skipping,)))
    tables.use_token_ids(torch.zeros(MAX_TOKENS, dtype=torch.int32))
    steering.add("b", SteeringPlan((skipping,)))


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    _, steering = made(rows=4, programs=4)
    for number in range(1, 400):
        steering.add(f"r{number}", adding(number % 7 + 1, (0, number), gate=latched()))
        steering.place(batch(**{f"r{number}": (0, 1)}))
        steering.remove(f"r{number}")
    assert len(steering._schedules) == 2  # that of unsteered requests, and one
    assert len(steering._program_cache._digests_of) <= 4
    assert len(steering._program_cache._keys_of) <= 8


def test_more_requests_than_the_first_slots_have_slots_of_their_own() -> None:
    tables, steering = made(rows=200, programs=200)
    names = [f"r{number}" for number in range(1, 150)]
    for number, name in enumerate(names, start=1):
        steering.add(name, adding(number))
    steering.place(batch(**dict.fromkeys(reversed(names), (3, 1))))
    assert programs(tables, 149) == [*range(149, 0, -1)]


def calls_of(num_requests: int) -> int:
    """Python calls, built-in ones too, of a step in which the same requests decode on."""
    steering = WorkerSteering(Sent(rows=300, programs=300, gate_slots=300), SITE_OF)
    names = [f"r{number}" for number in range(1, num_requests + 1)]
    for number, name in enumerate(names, start=1):
        steering.add(name, adding(number, gate=latched()))
    calls: list[str] = []

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        calls.extend([event] * (event in ("call", "c_call")))

    gc.disable()  # what others left is not ours to count
    for start in range(3, 6):
        step = batch(**dict.fromkeys(names, (start, 1)))
        sys.setprofile(count if start == 5 else None)
        steering.place(step)
        sys.setprofile(None)
    gc.enable()
    return len(calls)


def test_an_unchanged_batch_costs_the_same_for_every_number_of_requests() -> None:
    assert 0 < calls_of(256) == calls_of(1) < 20
