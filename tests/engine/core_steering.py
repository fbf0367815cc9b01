"""Steered requests to a server of several engine cores, over HTTP, and what each is to become."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray

from clairai.probe.model import Probe
from tests.engine import attribution
from tests.engine import server as parts
from tests.engine.hooked import ALWAYS, noise, positions
from tests.engine.steering import NUM_LOGPROBS, Answer, Ask
from tests.fidelity.steered import Change, Floats, Gated

EARLY: Final = "pre_attn.0"  # its rows are embeddings; what is added there changes all KV
LATE: Final = "post_block.3"
NAME: Final = "push"
ROWS: Final[dict[str, Floats]] = {EARLY: noise(11, 3.0), LATE: noise(12, 40.0)}
OTHER_ROWS: Final[dict[str, Floats]] = {EARLY: noise(13, 3.0), LATE: noise(14, 40.0)}
STEER: Final[dict[str, Any]] = {"vector": NAME}
NUM_NEW: Final = 12
# Of a logprob. Prompts of random tokens make large ones, and ranks sum in an order of their own: up
# to 1.4e-4 was seen; of an answer that is steered wrongly, 0.8 and more.
TOLERANCE: Final = 3e-4


@dataclass(frozen=True)
class Kind:
    """A way to steer a request, and the changes that Hugging Face's model gets for it.

    Of several lists of changes one must be right: drafts decide from where on a rule steers.
    """

    steer: tuple[dict[str, Any], ...]
    changes: Callable[[int], list[list[Change]]]  # by the length of the prompt
    stop: tuple[dict[str, Any], ...] = ()


def make_kinds(vocabulary_VD: NDArray[np.float32], deep: Probe, num_drafts: int) -> dict[str, Kind]:
    """By name: by positions, by gates with and without a memory, by a rule on scores."""
    direction_D = attribution.projections(vocabulary_VD)[:, 0].astype(np.float64)
    often, seldom = np.quantile(vocabulary_VD @ direction_D, [0.5, 0.85]).tolist()
    hard = Gated(EARLY, direction_D, often)
    latch = Gated(EARLY, direction_D, seldom, latch=True)
    release = Gated(EARLY, direction_D, seldom, release=often)
    soft = Gated(LATE, deep.direction_D.astype(np.float64), 10.0, sharpness=0.01)
    late = {LATE: ROWS[LATE]}
    rule = {"probe": deep.name, "threshold": -1e9, "action": "steer", "steer": [STEER]}

    def always(gate: Gated | None = None, rows: dict[str, Floats] = ROWS) -> Any:
        return lambda _: [[Change("add", rows, ALWAYS, gate=gate)]]

    def after_rule(length: int) -> list[list[Change]]:
        starts = range(length + 2, length + 3 + num_drafts)
        return [[Change("add", ROWS, positions(start))] for start in starts]

    return {
        "named": Kind((STEER,), always()),
        "generation": Kind(
            (STEER | {"when": "generation", "scale": -2.0},),
            lambda length: [[Change("add", ROWS, positions(length), -2.0)]],
        ),
        "positions": Kind(
            (STEER | {"when": {"phase": "prompt", "positions": [[-8, -2]]}},),
            lambda length: [[Change("add", ROWS, positions(length - 8, length - 2))]],
        ),
        "gated": Kind((STEER | {"gate": _gate_fields("embedding:0", hard)},), always(hard)),
        "latched": Kind((STEER | {"gate": _gate_fields("embedding:0", latch)},), always(latch)),
        "released": Kind(
            (STEER | {"gate": _gate_fields("embedding:0", release)},), always(release)
        ),
        "softly": Kind(
            (STEER | {"gate": _gate_fields(deep.name, soft), "points": [LATE]},),
            always(soft, late),
        ),
        "by rule": Kind((), after_rule, (rule,)),
    }


def _gate_fields(probe: str, gate: Gated) -> dict[str, Any]:
    fields: dict[str, Any] = {"probe": probe, "threshold": gate.threshold}
    fields |= {"latch": True} if gate.latch else {}
    fields |= {"release": gate.release} if gate.release is not None else {}
    return fields | ({"sharpness": gate.sharpness} if gate.sharpness is not None else {})


def name_core(core: int | None) -> dict[str, str]:
    """Headers: vLLM chooses the core of a request without them."""
    return {} if core is None else {"X-data-parallel-rank": str(core)}


async def answer(
    engine: httpx.AsyncClient, ask: Ask, stream: int, core: int | None = None
) -> Answer:
    body, headers = make_body(ask, stream), name_core(core)
    response = await engine.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return _join([choice])


async def answer_parts(
    engine: httpx.AsyncClient, body: dict[str, Any], core: int | None = None
) -> AsyncIterator[list[dict[str, Any]]]:
    """The choices of each chunk of a streamed answer, as it comes."""
    headers = name_core(core)
    asking = engine.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers)
    async with asking as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"]


def join_parts(parts: list[dict[str, Any]]) -> dict[int, Answer]:
    """By the number of the choice."""
    numbers = sorted({one["index"] for one in parts})
    return {number: _join([one for one in parts if one["index"] == number]) for number in numbers}


def make_body(ask: Ask, stream: int) -> dict[str, Any]:
    fields = {"stream": stream, "steer": list(ask.steer), "stop": list(ask.stop)}
    return {
        "model": parts.MODEL,
        "prompt": list(ask.prompt),
        "max_tokens": ask.num_new,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": NUM_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": {"clairai": json.dumps(fields)},
    }


def _join(choices: list[dict[str, Any]]) -> Answer:
    token_ids = [token for one in choices for token in one["token_ids"] or ()]
    logprobs = [step for one in choices if one["logprobs"] for step in _read_logprobs(one)]
    assert len(token_ids) == len(logprobs) > 0
    return Answer(tuple(token_ids), tuple(logprobs), 0)


def _read_logprobs(choice: Mapping[str, Any]) -> list[dict[int, float]]:
    return [
        {int(token.removeprefix("token_id:")): value for token, value in step.items()}
        for step in choice["logprobs"]["top_logprobs"]
    ]
