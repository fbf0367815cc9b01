"""Random engine steps under random plans, and the rows that came out wrong.

T = tokens, D = model width. How each row must come out: toy_courses.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import ForwardInputs, JudgedDrafts, StepBatch
from tests.support.random_plans import (
    SITE_OF,
    SITES,
    WIDTH,
    Float,
    State,
    random_plan,
    rich_plan,
    steered,
)

MAX_TOKENS, MAX_POSITION, VOCABULARY, GUARD = 64, 128, 8, 5
SPECIAL = (0, 3)
IS_PAIR = {"a": False, "b": True, "c": True}


class Request:
    """Has the same token and rows at a position however often it is forwarded."""

    def __init__(self, plan: SteeringPlan | None, seed: int) -> None:
        self.plan = plan
        self.next_position = 0
        self.state: State = {}
        rng = np.random.default_rng(seed)
        self._tokens = rng.integers(VOCABULARY, size=MAX_POSITION)
        # Whole numbers, which every precision adds exactly.
        self._parts = rng.integers(-3, 4, (MAX_POSITION, len(SITES), 2, WIDTH)).astype(float)
        self._parts[:, [not IS_PAIR[site] for site in SITES], 1] = 0

    def token(self, position: int) -> int:
        return int(self._tokens[position])

    def parts(self, position: int, site: str) -> tuple[Float, Float]:
        """x and residual of a row."""
        x_D, residual_D = self._parts[position, SITES.index(site)]
        return x_D, residual_D


class Drafted(Request):
    """What a request would have become with drafts that were rejected."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.plan, seed=request.next_position + 1000)
        self._request = request
        self._own: State | None = None

    @property
    def state(self) -> State:
        if self._own is None:
            self._own = dict(self._request.state)
        return self._own

    @state.setter
    def state(self, state: State) -> None:
        """Not yet: the request's own tokens of the step come first."""


@dataclass(frozen=True)
class Seen:
    """One site in one step: its tensors before and after, and the expected rows."""

    site: str
    before: tuple[torch.Tensor, torch.Tensor | None]
    after: tuple[torch.Tensor, torch.Tensor | None]
    expected: list[Float | None]  # of the rows that are somebody's


class ToyFleet:
    """Drives WorkerSteering and the sites as a model runner does, padded rows included."""

    def __init__(self, tables: SteerTables, steering: WorkerSteering) -> None:
        self.tables, self.steering = tables, steering
        self.live: dict[str, Request] = {}
        self._token_ids_T = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=tables.device)
        self._positions_T = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=tables.device)
        tables.use_token_ids(self._token_ids_T)
        tables.use_positions(self._positions_T)
        tables.set_special(SPECIAL)

    def open(self, req_id: str, request: Request) -> None:
        self.live[req_id] = request
        if request.plan is not None:
            self.steering.add(req_id, request.plan)

    def close(self, req_id: str) -> None:
        del self.live[req_id]
        self.steering.remove(req_id)

    def preempt(self, req_id: str) -> None:
        """Make it return to the runner as a new request that starts again."""
        request = self.live[req_id]
        request.next_position = 0
        if request.plan is not None:
            self.steering.add(req_id, request.plan)

    def place(
        self,
        counts: dict[str, int],
        drafts_R: NDArray[np.int32] | None = None,
        ahead: np.random.Generator | None = None,
    ) -> list[tuple[Request, int]]:
        """Lay out a step, and return the request and position of each row.

        With `ahead` the host knows positions only within bounds, and the device knows them.
        """
        starts = [self.live[req_id].next_position for req_id in counts]
        counts_R, starts_R = np.array([*counts.values()], np.int32), np.array(starts, np.int32)
        places = [
            (self.live[req_id], start + offset)
            for (req_id, count), start in zip(counts.items(), starts, strict=True)
            for offset in range(count)
        ]
        self._positions_T[: len(places)] = torch.tensor([position for _, position in places])
        lowest_R = None
        if ahead is not None:
            is_begun_R = starts_R > 0
            lowest_R = starts_R - is_begun_R * np.minimum(ahead.integers(4), starts_R - 1)
            starts_R = starts_R + is_begun_R * ahead.integers(4, size=len(starts_R))
            lowest_R, starts_R = lowest_R.astype(np.int32), starts_R.astype(np.int32)
        self.steering.place(StepBatch([*counts], counts_R, starts_R, drafts_R, lowest_R))
        for req_id, count in counts.items():
            self.live[req_id].next_position += count
        return places

    def step(self, counts: dict[str, int], num_padded: int = 3) -> list[Seen]:
        return self._run(self.place(counts), num_padded)

    def step_with_drafts(
        self,
        counts: dict[str, int],
        rejected: dict[str, int],
        ahead: np.random.Generator | None = None,
    ) -> list[Seen]:
        """As `step`, but the last tokens of each request are drafts, and so many are rejected.

        Those are other tokens than the request will have there, and are steered as if they had
        been its own.
        """
        rejected_R = np.array([rejected[req_id] for req_id in counts], np.int32)
        drafts_R = np.maximum(np.array([*counts.values()], np.int32) - 1, 0)
        places = self.place(counts, drafts_R, ahead)
        at = 0
        for (req_id, count), num_rejected in zip(counts.items(), rejected_R.tolist(), strict=True):
            at += count
            request = self.live[req_id]
            request.next_position -= num_rejected
            wrong = Drafted(request)
            for row in range(at - num_rejected, at):
                places[row] = (wrong, places[row][1])
        seen = self._run(places, 3)
        judged = None
        if ahead is None:
            self.steering.reject(rejected_R)
        else:
            device = self.tables.device
            starts_R = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
            judged = JudgedDrafts(starts_R, torch.tensor(rejected_R, device=device))
        self.steering.end(lambda: ForwardInputs(self._positions_T, self._token_ids_T, judged))
        return seen

    def _run(self, places: list[tuple[Request, int]], num_padded: int) -> list[Seen]:
        for index, (request, position) in enumerate(places):
            self._token_ids_T[index] = request.token(position)
        rows = [{s: np.add(*r.parts(p, s)) for s in SITES} for r, p in places]
        expected = [_expected(r, p, rows[i]) for i, (r, p) in enumerate(places)]
        return [self._forward(site, places, expected, num_padded) for site in SITES]

    def _forward(
        self,
        site: str,
        places: list[tuple[Request, int]],
        expected: list[dict[str, Float | None]],
        num_padded: int,
    ) -> Seen:
        parts = [request.parts(position, site) for request, position in places]
        padding = [(np.full(WIDTH, 1.5), np.full(WIDTH, -0.25))] * num_padded
        x_TD, residual_TD = (self._tensor([*parts, *padding], which) for which in (0, 1))
        given = (x_TD, residual_TD if IS_PAIR[site] else None)
        before = (x_TD.clone(), None if given[1] is None else residual_TD.clone())
        with np.errstate(all="ignore"):  # numpy warns of what a GPU computes in silence
            self.tables.site(site).apply(*given)
        return Seen(site, before, given, [rows[site] for rows in expected])

    def _tensor(self, parts: list[tuple[Float, Float]], which: int) -> torch.Tensor:
        rows = np.array([part[which] for part in parts]).reshape(-1, WIDTH)
        guarded = np.full((len(rows) + 2 * GUARD, WIDTH), np.nan)  # memory that nothing may touch
        guarded[GUARD : GUARD + len(rows)] = rows
        tensor = torch.tensor(guarded, dtype=self.tables.dtype, device=self.tables.device)
        return tensor[GUARD : GUARD + len(rows)]


def _expected(request: Request, position: int, rows: dict[str, Float]) -> dict[str, Float | None]:
    if request.plan is None:
        return dict.fromkeys(SITES)
    if position == 0:
        request.state.clear()
    is_special = request.token(position) in SPECIAL
    return steered(request.plan, position, is_special, rows, request.state)


def fleet(dtype: torch.dtype = torch.float32, device: str = "cpu") -> ToyFleet:
    """With room for four requests only, so that rows and programs are evicted."""
    tables = SteerTables(
        SITES, width=WIDTH, max_tokens=MAX_TOKENS, gate_slots=4, rows=48, programs=64,
        vocabulary=VOCABULARY, device=device, dtype=dtype,
    )  # fmt: skip
    return ToyFleet(tables, WorkerSteering(tables, SITE_OF))


def random_history(
    held: ToyFleet, rng: np.random.Generator, *, num_steps: int = 8, tolerance: float = 1e-5
) -> list[str]:
    """Random arrivals, chunked prefills, decodes, preemptions and ends; returns wrong rows."""
    found: list[str] = []
    plans: list[SteeringPlan | None] = [None]
    for number in range(num_steps):
        if len(held.live) < 4 and rng.random() < 0.7:
            if rng.random() < 0.6:
                plans.append(random_plan(rng))
            plan = plans[rng.integers(len(plans))]
            held.open(f"r{number}", Request(plan, seed=int(rng.integers(1 << 30))))
        if held.live and rng.random() < 0.2:
            held.preempt(str(rng.choice([*held.live])))
        if held.live and rng.random() < 0.2:
            held.close(str(rng.choice([*held.live])))
        for seen in held.step(_random_counts(held, rng), num_padded=int(rng.integers(4))):
            found += [f"step {number}, {fault}" for fault in faults(seen, tolerance)]
    return found


def speculative_history(
    held: ToyFleet, rng: np.random.Generator, num_steps: int, *, is_ahead: bool = False
) -> list[str]:
    """Prefills, then steps of which each request loses some of its last tokens; wrong rows.

    With `is_ahead` only the device knows which, and where a request has come to.
    """
    held.tables.keep_states()
    for number in range(3):
        held.open(f"r{number}", Request(rich_plan(rng), seed=int(rng.integers(1 << 30))))
    found = wrong_in(held.step({req_id: int(rng.integers(1, 5)) for req_id in held.live}))
    for _ in range(num_steps):
        counts = {req_id: int(rng.integers(1, 5)) for req_id in held.live}
        rejected = {req_id: int(rng.integers(count)) for req_id, count in counts.items()}
        ahead = rng if is_ahead else None
        found += wrong_in(held.step_with_drafts(counts, rejected, ahead))
    return found


def fixed_history(held: ToyFleet, seed: int) -> Iterator[list[str]]:
    """A short fixed history with every kind of event; yields the wrong rows of each step."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(("a", "b", "plain")):
        held.open(name, Request(rich_plan(rng) if number < 2 else None, seed=number))
    yield wrong_in(held.step({"a": 4, "b": 3}))
    yield wrong_in(held.step({"plain": 1, "b": 2, "a": 3}))
    held.preempt("a")
    yield wrong_in(held.step({"a": 5, "b": 1, "plain": 1}))
    held.close("b")
    held.open("c", Request(rich_plan(rng), seed=9))
    for counts in ({"c": 4, "a": 1}, {"c": 1, "a": 1}):
        yield wrong_in(held.step(counts))


def wrong_in(step: list[Seen]) -> list[str]:
    return [fault for seen in step for fault in faults(seen)]


def _random_counts(held: ToyFleet, rng: np.random.Generator) -> dict[str, int]:
    if rng.random() < 0.5:
        return dict.fromkeys(held.live, 1)
    order = rng.permutation([*held.live]) if rng.random() < 0.5 else [*held.live]
    return {str(req_id): int(rng.choice([0, 1, 1, 5, 9])) for req_id in order}


def faults(seen: Seen, tolerance: float = 1e-5) -> list[str]:
    """The rows that differ from the expected ones; untouched rows are compared bit by bit."""
    found = []
    (x_TD, residual_TD), (old_x_TD, old_residual_TD) = seen.after, seen.before
    stream_TD = x_TD if residual_TD is None else residual_TD
    for index in range(len(x_TD)):
        expected = seen.expected[index] if index < len(seen.expected) else None
        if expected is None:
            is_right = torch.equal(x_TD[index], old_x_TD[index]) and (
                old_residual_TD is None or torch.equal(stream_TD[index], old_residual_TD[index])
            )
        else:
            error_D = np.abs(stream_TD[index].double().cpu().numpy() - expected)
            is_right = bool((error_D <= tolerance * (1 + np.abs(expected).max())).all())
            is_right &= residual_TD is None or not x_TD[index].any()
        if not is_right:
            found.append(f"{seen.site}[{index}]")
    for tensor in (x_TD, stream_TD):
        memory = tensor._base
        if not memory[:GUARD].isnan().all() or not memory[-GUARD:].isnan().all():
            found.append(f"{seen.site}: memory beside the rows")
    return found
