"""What a running engine captures of requests in one batch; runs in the engine's process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from clairai.errors import ClairaiError
from clairai.library.engine_control import ask_engine as ask_engine
from clairai.wire import capture_messages
from tests.engine import preempting
from tests.engine.steering import adapters

DEADLINE_S: Final = 300.0  # for rows to be safe on a busy machine


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, what is captured of it, what else is asked of it."""

    prompt: tuple[int, ...]
    capture: Any = True
    steer: tuple[dict[str, Any], ...] = ()
    num_new: int = 12
    n: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    adapter: Path | None = None  # of LoRA: its folder


@dataclass(frozen=True)
class Found:
    """One answer, and what was captured of it."""

    token_ids: tuple[int, ...]
    num_cached: int
    state: str = ""
    reason: str = ""
    lost: int = 0
    told: int = 0  # rows, as the engine tells
    discarded: int = 0
    positions: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    rows: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)  # tags and steering


def capture(llm: Any, asks: list[Ask]) -> list[list[Found]]:
    """All in one call: they share steps. One for each answer of each."""
    outputs = generate(llm, asks)
    every = clairai.captures(llm, outputs, timeout_s=DEADLINE_S)
    return [_found(output, found) for output, found in zip(outputs, every, strict=True)]


def capture_beside_blocked(llm: Any, free: Ask, blocked: Ask) -> list[list[Found]]:
    """Two that share steps: `free` when its rows are safe, `blocked` when it says why not."""
    outputs = generate(llm, [free, blocked])
    (kept,) = clairai.captures(llm, outputs[:1], timeout_s=DEADLINE_S)
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        (stopped,) = clairai.captures(llm, outputs[1:], timeout_s=0.1)
        if any(one.reason for one in stopped) or time.monotonic() > deadline_s:
            return [_found(outputs[0], kept), _found(outputs[1], stopped)]


def generate(llm: Any, asks: list[Ask]) -> list[Any]:
    prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
    given = adapters([ask.adapter for ask in asks])
    return list(llm.generate(prompts, list(map(params, asks)), use_tqdm=False, **given))


def params(ask: Ask) -> Any:
    from vllm import SamplingParams

    is_one = ask.n == 1
    return SamplingParams(
        n=ask.n,
        max_tokens=ask.num_new,
        temperature=0.0 if is_one else 1.0,
        seed=None if is_one else 3,
        ignore_eos=True,
        detokenize=False,
        extra_args=clairai.request(capture=ask.capture, steer=list(ask.steer), **ask.fields),
    )


def _found(output: Any, captures: list[clairai.Capture]) -> list[Found]:
    by_choice = {one.report.choice: one for one in captures}
    return [_read(output, answer, by_choice.get(answer.index)) for answer in output.outputs]


def _read(output: Any, answer: Any, capture: clairai.Capture | None) -> Found:
    found = Found(tuple(answer.token_ids), output.num_cached_tokens or 0)
    if capture is None:
        return found
    report = capture.report
    found = replace(
        found,
        state=capture.state,
        reason=capture.reason,
        lost=capture.lost,
        told=report.rows,
        discarded=report.discarded,
    )
    if capture.state != "kept":
        return found
    store = clairai.open(next(iter(capture.where.values())))
    request = store.request(report.stream)
    return replace(
        found,
        positions=tuple(capture.positions.tolist()),
        tokens=tuple(capture.tokens.tolist()),
        rows={point: np.asarray(capture.rows(point)) for point in capture.points},
        stored={"tags": request.tags, "steering": request.steering},
    )


def refused(llm: Any, ask: Ask) -> tuple[str, str]:
    """Code and reason of a request that must not be admitted."""
    from tests.engine.asks import drop_unfinished

    try:
        generate(llm, [ask])
    except ClairaiError as error:
        return error.code, error.reason
    finally:
        drop_unfinished(llm)
    return "", "accepted"


def preempted(llm: Any, asks: list[Ask]) -> tuple[int, list[list[Found]]]:
    """The same, and how often the scheduler preempted a request."""
    with preempting.counted(llm) as seen:
        found = capture(llm, asks)
    return len(seen), found


def state(llm: Any) -> capture_messages.CaptureState:
    return ask_engine(llm, capture_messages.DescribeCapture(), capture_messages.CaptureState)


def states(llm: Any, stream: int) -> list[str]:
    """What has become of a stream's answers, when that is known."""
    asked = capture_messages.FindCaptures(streams=(stream,), is_ended=True)
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        ((*found,),) = ask_engine(llm, asked, capture_messages.Captures).found
        if all(one.state not in ("open", "writing") for one in found):
            return [one.state for one in found]
        assert time.monotonic() < deadline_s, found
