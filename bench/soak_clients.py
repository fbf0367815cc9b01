"""The clients of a soak: each does one thing after the other, and checks every answer.

A chat with scores is captured too: the captured row of each token, times the probe's direction,
must give the score that was streamed for that token, so a row of another request shows.
D = model width.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from clairai.points import Point
from clairai.probe.files import dumps as dump_probe
from clairai.probe.model import Probe
from clairai.vector.files import dumps as dump_vector
from clairai.vector.model import Vector

TOLERANCE: Final = 2e-3  # of a sigmoid: the engine sums in float32, and in another order
CHAT: Final = "/v1/chat/completions"
KEPT_DEADLINE_S: Final = 60.0
PAUSE_S: Final = 0.3  # of a slow reader, for each chunk
MAX_FAULTS: Final = 50
PROMPTS: Final = (
    "Write a loop in C.",
    "Raconte une histoire courte.",
    "What is 12 times 13?",
    "Why is the sky blue?",
    "I had a terrible day.",
    "List three colours.",
)
STEERED_AT: Final = ("post_block.12", "post_block.14")
# A request, and the status that it must get.
HOSTILE: Final[tuple[tuple[str, str, bytes, int], ...]] = (
    ("POST", CHAT, b'{"clairai": {', HTTPStatus.BAD_REQUEST),
    ("POST", CHAT, b'{"messages": [], "clairai": {"no": 1}}', HTTPStatus.BAD_REQUEST),
    ("POST", CHAT, b'{"messages": [], "clairai": {}, "n": 1000}', HTTPStatus.BAD_REQUEST),
    ("POST", CHAT, b'{"messages": [], "clairai": {}, "n": 1e999}', HTTPStatus.BAD_REQUEST),
    ("POST", CHAT, '{"clairai": {}}'.encode("utf-16"), HTTPStatus.BAD_REQUEST),
    ("POST", CHAT, b'{"clairai": ' + b"[" * 5000 + b"]" * 5000 + b"}", HTTPStatus.BAD_REQUEST),
    (
        *("POST", CHAT),
        b'{"messages": [{"role": "user", "content": "a"}], "clairai": '
        b'{"steer": [{"vector": "nobody", "scale": 1e-40}]}}',
        HTTPStatus.BAD_REQUEST,
    ),
    ("PUT", "/v1/probes/hostile", b"\xff" * 4096, HTTPStatus.BAD_REQUEST),
    ("PUT", "/v1/steering/vectors/hostile", b"GGUF" + b"\xff" * 64, HTTPStatus.BAD_REQUEST),
    ("GET", "/v1/captures/ffffffffffffffff", b"", HTTPStatus.NOT_FOUND),
    ("DELETE", "/v1/runs/nobody", b"", HTTPStatus.NOT_FOUND),
)


@dataclass
class Tally:
    """What all clients have seen."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0
    tokens: int = 0
    scores: int = 0
    scores_lost: int = 0
    rows_verified: int = 0
    largest_difference: float = 0.0

    def blame(self, reason: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(reason[:400])


@dataclass
class Answer:
    """A streamed answer, put together."""

    token_ids: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    rows: list[dict[str, float | None]] = field(default_factory=list)  # scores by probe, per token
    lost: int = 0
    capture: dict[str, Any] = field(default_factory=dict)
    steering: list[Any] | None = None
    is_whole: bool = False

    def read(self, chunk: Mapping[str, Any]) -> None:
        ours = chunk.get("clairai") or {}
        self.capture |= ours.get("capture") or {}
        self.steering = ours.get("steering", self.steering)
        self.prompt = chunk.get("prompt_token_ids") or self.prompt
        for choice in chunk["choices"]:
            self.token_ids += choice.get("token_ids") or []
            scores = choice.get("probe_scores")
            if scores is not None:
                assert scores["start"] == len(self.rows), "scores out of order"
                self.lost += scores.get("lost", 0)
                self.rows += [dict(zip(scores["names"], r, strict=True)) for r in scores["scores"]]


class SoakClient:
    """One of several at once; `number` makes its names and its choices its own."""

    def __init__(
        self, http: httpx.AsyncClient, number: int, model: str, probes: list[Probe], tally: Tally
    ) -> None:
        self._http, self._number, self._model = http, number, model
        self._probes = {probe.name: probe for probe in probes}
        self._random = random.Random(number)  # noqa: S311  # a load, not a secret
        self._tally = tally
        self._kinds: tuple[tuple[int, Callable[[], Awaitable[None]]], ...] = (
            (6, self.chat_with_scores),
            (5, self.steered_chat),
            (2, self.chat_of_a_new_probe),
            (2, self.chat_of_a_new_vector),
            (2, self.plain_chat),
            (2, self.named_run),
            (3, self.leave_early),
            (2, self.read_slowly),
            (3, self.send_something_hostile),
            (3, self.poll),
        )

    async def run_until(self, is_over: Callable[[], bool]) -> None:
        weights = [weight for weight, _ in self._kinds]
        while not is_over():
            ((_, kind),) = self._random.choices(self._kinds, weights)
            try:
                await kind()
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self._tally.blame(f"{kind.__name__}: {type(error).__name__} {error}")
            else:
                self._tally.done[kind.__name__] += 1

    # What it does

    async def chat_with_scores(self) -> None:
        await self._verified_chat({})

    async def steered_chat(self) -> None:
        """By name, gated, and with a vector that travels in the request."""
        gate = {"probe": "refusal", "threshold": 0.2}
        entry: dict[str, Any] = self._random.choice(
            (
                {"vector": "positive_sentiment", "scale": 0.4},
                {"vector": "formal", "scale": 0.3, "points": ["post_block.16"], "gate": gate},
                {"vector": self._inline(), "scale": 0.5, "points": [STEERED_AT[0]]},
            )
        )
        answer = await self._verified_chat({"steer": [entry]})
        assert answer.steering, "the engine did not confirm the steering"

    async def chat_of_a_new_probe(self) -> None:
        """Put a probe, ask for its scores, replace it, remove it."""
        name = f"soak-{self._number}"
        for _ in range(2):
            probe = Probe(name, Point("post_block", 19), self._direction(), activation="sigmoid")
            path = f"/v1/probes/{name}"
            await self._expect("PUT", path, (200, 201), content=dump_probe(probe))
            await self._verified_chat({"probes": [name, "code"]}, probe)
        await self._expect("DELETE", f"/v1/probes/{name}", (200,))

    async def chat_of_a_new_vector(self) -> None:
        name = f"soak-{self._number}"
        rows = {Point.parse(point): self._direction() for point in STEERED_AT}
        path = f"/v1/steering/vectors/{name}"
        await self._expect("PUT", path, (200, 201), content=dump_vector(Vector(name, rows)))
        await self._verified_chat({"steer": [{"vector": name, "scale": 0.5}]})
        await self._expect("DELETE", path, (200, 204))

    async def plain_chat(self) -> None:
        """Without the key, not streamed: passed on as it is."""
        answer = await self._expect("POST", CHAT, (200,), json=self._body(stream=False))
        assert answer.json()["choices"][0]["message"]["content"] is not None
        assert "probe_scores" not in answer.text

    async def named_run(self) -> None:
        body = self._body(clairai={"events": "named", "probes": "all"})
        async with self._http.stream("POST", CHAT, json=body) as response:
            assert response.status_code == HTTPStatus.OK, f"status {response.status_code}"
            events = [line async for line in response.aiter_lines() if line.startswith("event:")]
        assert events[-1:] == ["event: done"], f"a run ended with {events[-1:]}"

    async def leave_early(self) -> None:
        chunks = self._stream(self._body(max_tokens=200, clairai={"capture": True}))
        leaves_after = self._random.randrange(1, 12)
        async for _ in chunks:
            leaves_after -= 1
            if not leaves_after:
                break
        await chunks.aclose()  # type: ignore[attr-defined]

    async def read_slowly(self) -> None:
        answer = Answer()
        async for chunk in self._stream(self._body(clairai={"probes": "all"})):
            answer.read(chunk)
            await asyncio.sleep(PAUSE_S)
        self._check_scores(answer, self._probes)

    async def send_something_hostile(self) -> None:
        method, path, body, status = self._random.choice(HOSTILE)
        answer = await self._expect(method, path, (status,), content=body)
        assert "error" in answer.json()

    async def poll(self) -> None:
        health = (await self._expect("GET", "/health", (200,))).json()
        assert health["status"] == "ready", f"health is {health}"
        for path in ("/metrics", "/v1/captures?limit=5", "/v1/probes", "/v1/clairai"):
            await self._expect("GET", path, (200,))

    # Asking and checking

    def _body(self, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._random.choice(PROMPTS)}]
        return {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "max_tokens": self._random.randrange(4, 33),
            "temperature": 0.8,
            "seed": self._random.randrange(1 << 30),
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    async def _verified_chat(self, asked: dict[str, Any], *more: Probe) -> Answer:
        """A stream with scores, whose rows are then fetched and compared with the scores."""
        probes = self._probes | {probe.name: probe for probe in more}
        points = sorted({str(probe.point) for probe in probes.values()})
        capture = {"points": points, "positions": "generated", "encoder": "raw"}
        answer = Answer()
        async for chunk in self._stream(self._body(clairai={"capture": capture, **asked})):
            answer.read(chunk)
        self._check_scores(answer, probes if more else self._probes)
        await self._check_rows(answer, probes)
        return answer

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", CHAT, json=body) as response:
            if response.status_code != HTTPStatus.OK:
                raise AssertionError(f"status {response.status_code}: {await response.aread()!r}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if line.startswith("data: "):
                    chunk: dict[str, Any] = json.loads(data)
                    assert "error" not in chunk, f"the stream ended with {chunk['error']}"
                    yield chunk
        raise AssertionError("a stream without an end")

    def _check_scores(self, answer: Answer, probes: Mapping[str, Probe]) -> None:
        """Every token has its scores, but the last, which was never an input."""
        assert len(answer.rows) == len(answer.token_ids) > 0, "a token without scores"
        self._tally.tokens += len(answer.token_ids)
        self._tally.scores_lost += answer.lost
        asked = answer.rows[0].keys() & probes.keys()
        assert asked, "no probe was scored"
        missing = sum(any(row.get(name) is None for name in asked) for row in answer.rows[:-1])
        assert missing == answer.lost, f"{missing} scores are missing, {answer.lost} reported lost"
        self._tally.scores += (len(answer.rows) - 1 - missing) * len(asked)

    async def _check_rows(self, answer: Answer, probes: Mapping[str, Probe]) -> None:
        identity = answer.capture["id"]
        await self._wait_kept(identity, answer.capture)
        response = await self._expect("GET", f"/v1/captures/{identity}", (200,))
        assert response.headers.get("X-Clairai-Lost", "0") == "0", "captured rows are lost"
        rows = read_capture(response.content)
        first = len(answer.prompt)
        for index, (token, scores) in enumerate(
            zip(answer.token_ids[:-1], answer.rows[:-1], strict=True)
        ):
            self._check_row(rows, first + index, token, scores, probes)

    def _check_row(
        self,
        rows: Mapping[tuple[str, int], tuple[int, NDArray[np.float32]]],
        position: int,
        token: int,
        scores: Mapping[str, float | None],
        probes: Mapping[str, Probe],
    ) -> None:
        for name in scores.keys() & probes.keys():
            probe, score = probes[name], scores[name]
            captured_token, row_D = rows[str(probe.point), position]
            assert captured_token == token, f"a row of token {captured_token}, and not {token}"
            expected = float(probe.apply(row_D[None, :])[0])
            if score is None:
                continue  # lost, and counted
            difference = abs(expected - score)
            self._tally.largest_difference = max(self._tally.largest_difference, difference)
            assert difference <= TOLERANCE, (
                f"{name} at {position} scored {score}, its row gives {expected}"
            )
            self._tally.rows_verified += 1

    async def _wait_kept(self, identity: str, told: dict[str, Any]) -> None:
        """Until the rows are safe: the end of the stream waits for two seconds only."""
        async with asyncio.timeout(KEPT_DEADLINE_S):
            while told.get("state") in ("open", "writing"):
                await asyncio.sleep(0.2)
                listed = (await self._expect("GET", "/v1/captures?limit=1000", (200,))).json()
                told = next((one for one in listed["data"] if one["id"] == identity), told)
        assert told.get("state") == "kept", f"a capture is {told}"
        assert told["lost"] == 0, f"a capture is {told}"

    async def _expect(
        self, method: str, path: str, statuses: tuple[int, ...], **sent: Any
    ) -> httpx.Response:
        answer = await self._http.request(method, path, **sent)
        assert answer.status_code in statuses, (
            f"{method} {path} got {answer.status_code}: {answer.text[:200]}"
        )
        return answer

    def _direction(self) -> NDArray[np.float32]:
        width = next(iter(self._probes.values())).width
        source = np.random.default_rng(self._random.randrange(1 << 30))
        return (0.05 * source.normal(size=width)).astype(np.float32)

    def _inline(self) -> dict[str, Any]:
        packed = base64.b64encode(self._direction().tobytes()).decode()
        return {"dtype": "f32", "points": dict.fromkeys(STEERED_AT, packed)}


def read_capture(data: bytes) -> dict[tuple[str, int], tuple[int, NDArray[np.float32]]]:
    """The token and the row at each point and position, of a capture with the encoder raw."""
    head_nbytes = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + head_nbytes])["__metadata__"]
    points = json.loads(metadata["clairai"])["points"]
    found = load(data)
    columns = zip(found["point"], found["position"], found["token_id"], strict=True)
    rows_ND = found["rows.values"]
    return {
        (points[point], int(position)): (int(token), rows_ND[index])
        for index, (point, position, token) in enumerate(columns)
    }
