"""Loads a running engine, and checks every row it stored against what was sent.

At pre_attn.0 the residual stream is the token's embedding: a row names the token it was computed
for, to the bit, whatever is stored beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest import mock

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

import clairai
from clairai.engine.capture import row_selection, staging_layout
from clairai.library.engine_control import ask_engine
from clairai.wire import capture_messages
from tests.engine.attribution import embeddings
from tests.engine.capturing import DEADLINE_S

POINT: Final = "pre_attn.0"
FIRST_STREAM: Final = 1 << 40


@dataclass(frozen=True)
class Plan:
    num_requests: int
    num_at_once: int
    seed: int
    max_prompt: int = 100
    max_new: int = 24


@dataclass
class Sent:
    """One request as the test knows it."""

    stream: int
    prompt: list[int]
    positions: Any  # None: it is not captured
    n: int
    outputs: dict[int, list[int]] = field(default_factory=dict)
    num_cached: int = 0
    is_aborted: bool = False


@dataclass(frozen=True)
class Verdict:
    rows: int
    wrong: list[str]
    missing: int
    cached: int
    preempted: int
    aborted: int
    told: int  # rows, as the engine tells
    unmeasured: int  # shards that do not say what their encoder lost


def run(llm: Any, plan: Plan, mutant: Callable[[], Any] | None = None) -> Verdict:
    preempted: list[int] = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(1)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = counted
    try:
        if mutant is None:
            sent = _drive(llm, plan)
        else:
            with mutant():
                sent = _drive(llm, plan)
    finally:
        del scheduler._preempt_request
    return _judge(llm, sent, len(preempted))


def _drive(llm: Any, plan: Plan) -> dict[str, Sent]:
    rng = np.random.default_rng(plan.seed)
    shared = rng.integers(5, 30000, plan.max_prompt).tolist()
    sent: dict[str, Sent] = {}
    live: set[str] = set()
    engine = llm.llm_engine
    while len(sent) < plan.num_requests or live:
        while len(sent) < plan.num_requests and len(live) < plan.num_at_once:
            request = _next(rng, plan, shared, FIRST_STREAM * plan.seed + len(sent))
            name = str(request.stream)
            sent[name] = request
            live.add(name)
            prompt = {"prompt_token_ids": request.prompt}
            engine.add_request(name, prompt, _params(rng, plan, request))
        if live and rng.random() < 0.05:
            victim = sorted(live)[int(rng.integers(len(live)))]
            engine.abort_request([victim])
            live.discard(victim)
            sent[victim].is_aborted = True
        for output in engine.step():
            request = sent[output.request_id]
            request.num_cached = output.num_cached_tokens or 0
            for answer in output.outputs:
                request.outputs[answer.index] = list(answer.token_ids)
            if output.finished:
                live.discard(output.request_id)
    return sent


def _next(rng: np.random.Generator, plan: Plan, shared: list[int], stream: int) -> Sent:
    length = int(rng.integers(1, plan.max_prompt + 1))
    prompt = rng.integers(5, 30000, length).tolist()
    if rng.random() < 0.5:
        keep = int(rng.integers(0, length + 1))
        prompt = shared[:keep] + prompt[keep:]
    chosen = (None, "all", "prompt", "generated", "last_prompt", {"from": length // 2})
    positions = chosen[int(rng.integers(len(chosen)))]
    return Sent(stream, prompt, positions, 2 if rng.random() < 0.1 else 1)


def _params(rng: np.random.Generator, plan: Plan, request: Sent) -> Any:
    from vllm import SamplingParams

    capture = None if request.positions is None else {"positions": request.positions}
    return SamplingParams(
        n=request.n,
        max_tokens=int(rng.integers(1, plan.max_new + 1)),
        temperature=1.0,
        ignore_eos=True,
        detokenize=False,
        extra_args=clairai.request(stream=request.stream, capture=capture),
    )


def _judge(llm: Any, sent: dict[str, Sent], preempted: int) -> Verdict:
    streams = tuple(request.stream for request in sent.values())
    reports = _settled(llm, streams)
    told = [one for answers in reports for one in answers]
    (folder,) = {place.where for one in told for place in one.places}
    store, vocabulary_VD = clairai.open(folder), embeddings(llm)
    wrong, rows, missing = list[str](), 0, 0
    for request, answers in zip(sent.values(), reports, strict=True):
        if (request.positions is None) != (not answers) and not request.is_aborted:
            wrong.append(f"{request.stream}: captured {len(answers)} answers")
        for answer in answers:
            found = store.rows(request.stream, point=POINT, choice=answer.choice)
            rows += len(found)
            wrong += _wrongs(request, answer.choice, found, vocabulary_VD)
            missing += _missing(request, answer.choice, found.position)
    return Verdict(
        rows=rows,
        wrong=wrong,
        missing=missing,
        cached=sum(r.num_cached for r in sent.values() if r.positions is not None),
        preempted=preempted,
        aborted=sum(request.is_aborted for request in sent.values()),
        told=sum(one.rows for one in told),
        unmeasured=sum(not store.shard(entry).head.fidelity for entry in store.shards),
    )


def _settled(
    llm: Any, streams: tuple[int, ...]
) -> tuple[tuple[capture_messages.Captured, ...], ...]:
    asked = capture_messages.FindCaptures(streams=streams, is_ended=True)
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        found = ask_engine(llm, asked, capture_messages.Captures).found
        if all(one.state not in ("open", "writing") for answers in found for one in answers):
            return found
        assert time.monotonic() < deadline_s, "captures did not become safe"


def _wrongs(
    request: Sent, choice: int, found: Any, vocabulary_VD: NDArray[np.float32]
) -> list[str]:
    tokens = request.prompt + request.outputs.get(choice, [])
    wrong = []
    for row, position, token in zip(found[:], found.position, found.token_id, strict=True):
        name = f"{request.stream}/{choice}@{position}"
        if position < len(tokens) and tokens[position] != token:
            wrong.append(f"{name} says token {token}, is {tokens[position]}")
        if position > len(tokens) and not request.is_aborted:
            wrong.append(f"{name} is past the end")
        if not np.array_equal(row, vocabulary_VD[token]):
            wrong.append(f"{name} was not computed for token {token}")
    is_prompt = found.position < len(request.prompt)
    if (found.phase[is_prompt] != 0).any() or (found.phase[~is_prompt] != 1).any():
        wrong.append(f"{request.stream}/{choice}: a wrong phase")
    return wrong


def _missing(request: Sent, choice: int, positions: NDArray[np.uint32]) -> int:
    """Rows that are not there; of an aborted request nobody knows how far it came."""
    if request.is_aborted:
        return 0
    length, end = len(request.prompt), len(request.prompt) + len(request.outputs[choice]) - 1
    first, last = {
        "all": (0, end),
        "prompt": (0, length),
        "generated": (length, end),
        "last_prompt": (length - 1, length),
    }.get(str(request.positions), (length // 2, end))
    return len({*range(first, last)} - {*positions.tolist()})


@contextmanager
def _steps(change: Callable[[row_selection.RowSelector, Any, Any], Any]) -> Iterator[None]:
    original = row_selection.RowSelector.step

    def step(self: row_selection.RowSelector, batch: Any) -> Any:
        return change(self, batch, lambda given: original(self, given))

    with mock.patch.object(row_selection.RowSelector, "step", step):
        yield


def neighbours_rows() -> Any:
    """Each request gets its neighbour's rows."""

    def change(_self: Any, batch: Any, go_on: Any) -> Any:
        ids = list(batch.req_ids)
        return go_on(structs.replace(batch, req_ids=[*ids[1:], *ids[:1]]))

    return _steps(change)


def rows_off_by_one() -> Any:
    """Rows are taken one place too early in the forward."""

    def change(_self: Any, batch: Any, go_on: Any) -> Any:
        selection = go_on(batch)
        return selection and replace(selection, row_N=np.maximum(selection.row_N - 1, 0))

    return _steps(change)


@contextmanager
def served_from_the_cache() -> Iterator[None]:
    """A wanted row that the prefix cache can serve is not forwarded."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    plain = KVCacheManager.get_computed_blocks.__wrapped__
    with mock.patch.object(KVCacheManager, "get_computed_blocks", plain):
        yield


@contextmanager
def phase_by_request() -> Iterator[None]:
    """A row is said to be of the prompt whatever its position."""
    original = row_selection.RowSelector._select_batch

    def read(self: row_selection.RowSelector, req_ids: Any) -> Any:
        batch = original(self, req_ids)
        return replace(batch, prompt_E=np.full_like(batch.prompt_E, 1 << 30))

    with mock.patch.object(row_selection.RowSelector, "_select_batch", read):
        yield


def wrong_plan() -> Any:
    """A step is told as rows of the requests of the last."""
    original = staging_layout.StagingPlan.is_plan_for

    def is_plan_for(self: staging_layout.StagingPlan, selection: Any) -> bool:
        mine = self.selection
        is_alike = (len(mine), len(mine.seen_E)) == (len(selection), len(selection.seen_E))
        return original(self, selection) or is_alike

    return mock.patch.object(staging_layout.StagingPlan, "is_plan_for", is_plan_for)


MUTANTS: Final = (
    neighbours_rows,
    rows_off_by_one,
    served_from_the_cache,
    phase_by_request,
    wrong_plan,
)
