"""Claims on the device tables: equal content counts once, and every claim is released."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from weakref import finalize

import pytest

from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry, TableClaims
from clairai.errors import VectorCapacityError
from tests.support.steering_plans import entries, registry, vector


def course_of(known: SteeringRegistry, *scales: float) -> SteeringPlan:
    plan = known.resolve(
        entries(*({"vector": "joy", "points": ["pre_attn.1"], "scale": s} for s in scales)),
        prompt_len=3,
    )
    assert plan is not None
    return plan


def test_equal_content_is_counted_once_for_all_requests() -> None:
    known = registry(limits=SteeringLimits(rows=1, programs=1))
    inline = {"vector": vector(values=(1, 2, -2)), "points": ["pre_attn.1"]}
    same = known.resolve(entries(inline), prompt_len=9)
    assert same is not None
    claims = [known.claim(course_of(known, 1.0)), known.claim(same)]
    assert known.in_use() == (1, 1)
    claims[0].release()
    assert known.in_use() == (1, 1)
    claims[1].release()
    assert known.in_use() == (0, 0)


def test_a_claim_that_does_not_fit_is_refused_and_counts_nothing() -> None:
    known = registry(limits=SteeringLimits(rows=9, programs=2))
    held = [known.claim(course_of(known, scale)) for scale in (1.0, 2.0)]
    with pytest.raises(VectorCapacityError, match="1 more steering programs; 2 of 2 are in use"):
        known.claim(course_of(known, 3.0))
    assert known.in_use() == (1, 2)
    held[0].release()
    known.claim(course_of(known, 3.0))
    assert known.in_use() == (1, 2)


def test_rows_of_gates_are_counted_too() -> None:
    known = registry(limits=SteeringLimits(rows=1, programs=9))
    gated = known.resolve(
        entries({"vector": "joy", "points": ["pre_attn.1"], "gate": {"probe": "sad"}}), prompt_len=3
    )
    assert gated is not None
    with pytest.raises(VectorCapacityError, match="2 more steering rows; 0 of 1 are in use"):
        known.claim(gated)
    assert known.in_use() == (0, 0)


def test_a_request_with_a_stateful_gate_has_a_gate_slot_of_its_own() -> None:
    known = registry(limits=SteeringLimits(rows=9, programs=9, gate_slots=1))
    gate = {"probe": "sad", "latch": True}
    gated = known.resolve(entries({"vector": "joy", "gate": gate}), prompt_len=3)
    assert gated is not None
    held = known.claim(gated)
    known.claim(course_of(known, 1.0))  # needs none
    with pytest.raises(VectorCapacityError, match="1 unfinished requests have gates"):
        known.claim(gated)
    held.release()
    known.claim(gated)


def test_a_claim_can_be_released_several_times_and_counts_once() -> None:
    known = registry()
    kept, gone = known.claim(course_of(known, 1.0)), known.claim(course_of(known, 1.0))
    for _ in range(3):
        gone.release()
    assert known.in_use() == (1, 1)
    kept.release()
    assert known.in_use() == (0, 0)


class Request:
    """What holds a claim; goes round in a circle, so that only the collector takes it away."""

    def __init__(self) -> None:
        self.me = self


def test_a_claim_can_be_released_by_the_garbage_collector_during_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finalizer that waited for a lock held by the code it interrupts would wait for ever."""
    known = registry()
    finalize(Request(), known.claim(course_of(known, 1.0)).release)
    check = TableClaims._check

    def collect_and_check(self: TableClaims, kind: str, limit: int, count: int) -> None:
        gc.collect()
        check(self, kind, limit, count)

    monkeypatch.setattr(TableClaims, "_check", collect_and_check)
    asking = threading.Thread(target=known.claim, args=(course_of(known, 2.0),), daemon=True)
    asking.start()
    asking.join(timeout=20)
    assert not asking.is_alive()
    assert known.in_use() == (1, 1)  # the first is gone, the second is there


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns after a few steps of the interpreter: a change in two parts is seen."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("switching_often")
def test_a_request_sees_one_snapshot_while_another_thread_changes_names_and_tiers() -> None:
    """The vector and the tier are changed together; no request may see one without the other."""
    known = registry(vector("a", values=(1, 1, 1)), vector("b", values=(2, 2, 2)))
    is_over = threading.Event()

    def change() -> None:
        try:
            for name in ("a", "b") * 1000:
                known.set_tiers(base=entries({"vector": name}), decode=entries({"vector": name}))
        finally:
            is_over.set()

    def ask(_: int) -> set[str]:
        seen: set[str] = set()
        is_last = False
        while not is_last:
            is_last = is_over.is_set()  # so that one plan is behind all changes
            plan = known.resolve((), prompt_len=2)
            claim = known.claim(plan) if plan is not None else None
            seen |= {"+".join(action.vector for action in plan.actions)} if plan else set()
            if claim is not None:
                claim.release()
        return seen

    with ThreadPoolExecutor(3) as pool:
        asking = pool.map(ask, range(2))
        changing = pool.submit(change)
        seen = set().union(*asking)
        changing.result()
    assert seen
    assert seen <= {"a+a", "b+b"}
    assert known.in_use() == (0, 0)
