"""Checks every row that a running engine publishes against what was really sent.

The probes are random projections at pre_attn.0, where the residual stream *is* the token's
embedding: the scores of a row name the token it was computed for, whatever the row says of itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from clairai.fields.request_fields import new_stream_id
from clairai.library.engine_control import ask_engine
from clairai.ring.attach import RingReader
from clairai.wire import control_messages, ring_messages

NUM_PROBES: Final = 8
POINT: Final = "pre_attn.0"


@dataclass(frozen=True)
class Plan:
    """How to load the engine."""

    num_requests: int
    num_at_once: int
    max_prompt: int
    max_new: int
    seed: int
    abort_share: float = 0.15
    shared_share: float = 0.5
    prompt_scores_share: float = 0.1
    temperature: float = 1.0
    vocabulary: int = 30000
    num_behind: int = 0  # so many tokens behind the end of an answer may have been accepted
    # An engine core in a process of its own does not wait for us: chance decides what happens to
    # whom. Then more requests are sent until every kind of event was seen, so many times as many.
    max_rounds: int = 1


@dataclass
class Sent:
    """One request as the test knows it."""

    stream: int
    prompt: list[int]
    wants_prompt_scores: bool
    output: list[int] = field(default_factory=list)
    is_aborted: bool = False


class Events:
    """Which kinds of events a load has had so far."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self._is_cached = self._is_recomputed = self.is_aborted = False

    def add(self, records: list[Any]) -> None:
        self.records += records
        for record in records:
            rows = record.rows
            self._is_cached |= bool((rows["phase"] == ring_messages.CACHED).any())
            self._is_recomputed |= bool((rows["flags"] & ring_messages.RECOMPUTED).any())

    @property
    def are_all_seen(self) -> bool:
        return self._is_cached and self._is_recomputed and self.is_aborted


@dataclass(frozen=True)
class Verdict:
    """What the rows said, against what was sent."""

    rows: int
    wrong: list[str]
    decode_rows: int
    cached_tokens: int
    recomputed_rows: int
    aborted: int
    finished_marks: int
    lost: int
    unaccounted: int


def projections(vocabulary_VD: NDArray[np.float32]) -> NDArray[np.float32]:
    rng = np.random.default_rng(7)
    return rng.standard_normal((vocabulary_VD.shape[1], NUM_PROBES)).astype(np.float32)


def probes(directions_DP: NDArray[np.float32]) -> list[clairai.Probe]:
    point = clairai.Point.parse(POINT)
    return [
        clairai.Probe(f"embedding:{i}", point, np.ascontiguousarray(directions_DP[:, i]))
        for i in range(NUM_PROBES)
    ]


def embeddings(llm: Any) -> NDArray[np.float32]:
    return np.concatenate(llm.collective_rpc(_embeddings)[:1])


def _embeddings(worker: Any) -> NDArray[np.float32]:
    weight = next(
        parameter
        for name, parameter in worker.model_runner.get_model().named_parameters()
        if name.endswith(("embed_tokens.weight", "embed_tokens.base_layer.weight", "wte.weight"))
    )
    from vllm.distributed import get_tp_group  # each rank has a part of the vocabulary

    whole_VD = get_tp_group().all_gather(weight.detach().float(), dim=0)
    return np.asarray(whole_VD.cpu().numpy())


def run(llm: Any, plan: Plan, known_VD: NDArray[np.float32] | None = None) -> Verdict:
    """Load the engine as planned, read the ring alongside, judge every row.

    `known_VD` are the embeddings, of an engine whose ranks have them in parts.
    """
    vocabulary_VD = embeddings(llm) if known_VD is None else known_VD
    directions_DP = projections(vocabulary_VD)
    bank = clairai.ProbeBank(llm)
    bank.add(*probes(directions_DP))
    socket = Path(ask_engine(llm, control_messages.Describe(), control_messages.Description).socket)
    with RingReader.attach(socket, start="newest") as reader:
        rows, scores_RP, sent = _drive(llm, plan, reader)
        statistics = reader.statistics()
    bank.remove(*(info.name for info in bank.list()))
    expected_VP = vocabulary_VD @ directions_DP
    return judge(rows, scores_RP, sent, expected_VP, statistics.lost, plan.num_behind)


def _drive(
    llm: Any, plan: Plan, reader: RingReader
) -> tuple[NDArray[np.void], NDArray[np.float32], dict[int, Sent]]:
    rng = np.random.default_rng(plan.seed)
    first = new_stream_id() // 2  # no stream is used twice in an engine's life
    last = first + plan.num_requests * plan.max_rounds
    engine = llm.llm_engine
    shared = rng.integers(5, plan.vocabulary, plan.max_prompt).tolist()
    sent: dict[int, Sent] = {}
    live: dict[str, Sent] = {}
    events = Events()

    def is_more_wanted() -> bool:
        if len(sent) < plan.num_requests:
            return True
        return first + len(sent) < last and not events.are_all_seen

    while is_more_wanted() or live:
        while is_more_wanted() and len(live) < plan.num_at_once:
            request = _next(rng, plan, shared, first + len(sent))
            sent[request.stream] = request
            live[str(request.stream)] = request
            prompt = {"prompt_token_ids": request.prompt}
            engine.add_request(str(request.stream), prompt, _params(rng, plan, request))
        if live and rng.random() < plan.abort_share * plan.num_at_once / 64:
            victim = list(live)[int(rng.integers(len(live)))]
            engine.abort_request([victim])
            live.pop(victim).is_aborted = events.is_aborted = True
        if not live:  # an engine core in a process of its own would have nothing to answer
            continue
        for output in engine.step():
            live[output.request_id].output = list(output.outputs[0].token_ids)
            if output.finished:
                live.pop(output.request_id)
        events.add(reader.poll())
    finish(llm, last)
    while more := reader.poll():
        events.add(more)
    rows = np.concatenate([record.rows for record in events.records])
    scores_RP = np.concatenate([record.scores_RC for record in events.records])
    ours = rows["stream"] != last
    return rows[ours], scores_RP[ours], sent


def _params(rng: np.random.Generator, plan: Plan, request: Sent) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=int(rng.integers(1, plan.max_new + 1)),
        temperature=plan.temperature,
        ignore_eos=True,
        detokenize=False,
        extra_args=clairai.request(
            stream=request.stream, prompt_scores=request.wants_prompt_scores
        ),
    )


def finish(llm: Any, last: int) -> None:
    """One more request, so that the engine takes a step that reports the ones before finished."""
    from vllm import SamplingParams

    llm.generate(
        [{"prompt_token_ids": [1, 2]}],
        SamplingParams(max_tokens=1, detokenize=False, extra_args=clairai.request(stream=last)),
        use_tqdm=False,
    )
    ask_engine(
        llm, control_messages.Describe(), control_messages.Description
    )  # returns when all is published


def _next(rng: np.random.Generator, plan: Plan, shared: list[int], stream: int) -> Sent:
    length = int(rng.integers(1, plan.max_prompt + 1))
    prompt = rng.integers(5, plan.vocabulary, length).tolist()
    if rng.random() < plan.shared_share:
        keep = int(rng.integers(0, length + 1))
        prompt = shared[:keep] + prompt[keep:]
    return Sent(stream, prompt, bool(rng.random() < plan.prompt_scores_share))


def judge(
    rows: NDArray[np.void],
    scores_RP: NDArray[np.float32],
    sent: dict[int, Sent],
    expected_VP: NDArray[np.float32],
    lost: int,
    num_behind: int = 0,
) -> Verdict:
    """Every row belongs to the request it names, at the position it names; none is missing."""
    # End marks of earlier requests may still come in; no other row of a stranger may.
    strangers = set(rows["stream"][rows["phase"] != ring_messages.FINISHED].tolist()) - set(sent)
    wrong = [f"stream {stream} is nobody's" for stream in strangers]
    is_token = rows["phase"] <= ring_messages.DECODE
    covered: dict[int, Counter[int]] = {stream: Counter() for stream in sent}
    for row, scores_P in zip(rows[is_token], scores_RP[is_token], strict=True):
        stream, position = int(row["stream"]), int(row["position"])
        if stream in sent:
            covered[stream][position] += 0 if row["flags"] & ring_messages.RECOMPUTED else 1
            wrong += _wrongs(row, scores_P, sent[stream], expected_VP, num_behind)
    cached = rows[rows["phase"] == ring_messages.CACHED]
    for row in cached[np.isin(cached["stream"], list(sent))]:
        stream = int(row["stream"])
        if sent[stream].wants_prompt_scores and not row["position"] >= len(sent[stream].prompt):
            wrong.append(f"stream {stream} asked for prompt scores and got cached tokens")
        for position in range(row["position"], row["position"] + row["span"]):
            covered[stream][position] += 1
    return Verdict(
        rows=int(is_token.sum()),
        wrong=wrong,
        decode_rows=int((rows["phase"] == ring_messages.DECODE).sum()),
        cached_tokens=int(cached["span"].sum()),
        recomputed_rows=int(((rows["flags"] & ring_messages.RECOMPUTED) != 0).sum()),
        aborted=sum(request.is_aborted for request in sent.values()),
        finished_marks=int((rows["phase"] == ring_messages.FINISHED).sum()),
        lost=lost,
        unaccounted=sum(_unaccounted(sent[stream], seen) for stream, seen in covered.items()),
    )


def _wrongs(
    row: np.void,
    scores_P: NDArray[np.float32],
    request: Sent,
    expected_VP: NDArray[np.float32],
    num_behind: int,
) -> list[str]:
    stream, position = int(row["stream"]), int(row["position"])
    tokens = request.prompt + request.output
    if position >= len(tokens):
        # One forward past the stop token, or past what an aborted request had told us of.
        is_near = request.is_aborted or position <= len(tokens) + num_behind
        return [] if is_near else [f"{stream}@{position} past {len(tokens)}"]
    token = tokens[position]
    # Tokens that were never trained share one embedding: compare with this token's own.
    expected_P = expected_VP[token]
    tolerance = 1e-4 * max(1.0, float(np.abs(expected_P).max()))
    is_own = np.allclose(scores_P, expected_P, rtol=1e-4, atol=tolerance)
    phase = ring_messages.DECODE if position >= len(request.prompt) else ring_messages.PREFILL
    wrong = []
    if int(row["token_id"]) != token:
        wrong.append(f"{stream}@{position} says token {row['token_id']}, is {token}")
    if not is_own:
        nearest = int(np.abs(expected_VP - scores_P).max(axis=1).argmin())
        wrong.append(f"{stream}@{position} was computed for {nearest}, is {token}")
    if int(row["phase"]) != phase:
        wrong.append(f"{stream}@{position} says phase {row['phase']}")
    return wrong


def _unaccounted(request: Sent, seen: Counter[int]) -> int:
    """Positions that were forwarded but have no row, or have two that are not recomputations."""
    twice = sum(count != 1 for count in seen.values())
    if request.is_aborted:
        return twice + (max(seen, default=-1) + 1 - len(seen))
    expected = len(request.prompt) + len(request.output) - 1
    return twice + sum(position not in seen for position in range(expected))
