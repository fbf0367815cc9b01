"""An API server with clairai's routes and middleware, and an engine core in the same process.

Real: routes, caches, core control, steering registry and admission. A toy stands in for what vLLM
0.32 does between them, with its answers to refused requests.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient

from clairai.compat.admission import Admission
from clairai.compat.extra_args import read_steering_plan
from clairai.engine.core_control import CoreControl
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.engine.worker_control import answer_control
from clairai.errors import ClairaiError
from clairai.fields.steer import SteerEntry
from clairai.server import install_routes
from clairai.vector.model import Vector
from clairai.vector.safetensors_format import dumps
from clairai.wire import control_messages
from tests.support import toy_publisher as toy

PATHS = ("/v1/chat/completions", "/v1/completions")
RESPONSES = "/v1/responses"
ERROR = {"message": "Internal server error", "type": "InternalServerError", "param": None}
PROMPT = [1, 2, 3, 4, 5]


def vector(name: str = "calm", *, width: int = toy.WIDTH, value: float = 1.0) -> Vector:
    rows = {point: np.full(width, value, np.float32) for point in toy.POINTS}
    return Vector(name, rows)


RUNNING = 2**64 - 1  # the stream of a running request, which has reached POSITION
POSITION = 12


def _amend(stream: int, _: Sequence[SteerEntry]) -> list[int]:
    return [POSITION] if stream == RUNNING else []


@dataclass
class ToyServer:
    """`plans` are the steering plans of admitted requests, `bodies` what vLLM got of it."""

    core_control: CoreControl
    step_publisher: Any
    api_servers: int = 1
    asked: list[control_messages.Control] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    plans: list[SteeringPlan | None] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # requests that have not ended
    backend: Any = None  # of weights

    def __post_init__(self) -> None:
        self.admission = Admission(self.core_control)
        app = FastAPI()
        for path in (*PATHS, RESPONSES):
            app.add_api_route(path, self._complete, methods=["POST"])
        self.add_routes(app)
        install_routes.attach(app)
        parallel = SimpleNamespace(_api_process_count=self.api_servers)
        config = SimpleNamespace(parallel_config=parallel, weight_transfer_config=self.backend)
        self.engine_client = SimpleNamespace(
            collective_rpc=self._collective_rpc,
            pause_generation=self._nothing,
            resume_generation=self._nothing,
            vllm_config=config,
        )
        install_routes.connect(self.engine_client, app.state)
        self.client = TestClient(app)

    def add_routes(self, app: FastAPI) -> None:
        """Others of vLLM's own."""

    def control(self, message: control_messages.Control) -> bytes:
        """Asked by somebody else than this server."""
        raw = msgspec.msgpack.encode(message)
        return self.core_control.control(
            raw, lambda sent: [answer_control(self.step_publisher, sent)]
        )[0]

    def ask(self, path: str = PATHS[0], *, stream: bool = False, **clairai: Any) -> Any:
        body = {"messages": [], "stream": stream, "vllm_xargs": {"clairai": json.dumps(clairai)}}
        return self.client.post(path, json=body)

    async def _collective_rpc(self, _: str, args: tuple[bytes]) -> list[bytes]:
        self.asked.append(msgspec.msgpack.decode(args[0], type=control_messages.Control))
        return self.core_control.control(
            args[0], lambda sent: [answer_control(self.step_publisher, sent)]
        )

    async def _nothing(self, **_: Any) -> None:
        """Nothing runs here that could be paused."""

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        num_choices, is_chat = body.get("n", 1), "chat" in request.url.path
        given = body.get("prompt", "")
        prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        admitted = [
            self._admit(body, at, f"r{len(self.bodies)}-{prompt}")
            for prompt in range(len(prompts))
            for at in range(num_choices)
        ]
        if body.get("stream") and request.url.path == RESPONSES:
            return StreamingResponse(_events(admitted[0]), media_type="text/event-stream")
        if body.get("stream"):
            frames = _frames(admitted, is_chat=is_chat)
            return StreamingResponse(frames, media_type="text/event-stream")
        if not all(admitted):
            return JSONResponse({"error": {**ERROR, "code": 500}}, 500)
        return JSONResponse({"id": "1", "choices": [{"index": 0}]})

    def _admit(self, body: dict[str, Any], choice: int, name: str) -> bool:
        params = SimpleNamespace(extra_args=body.get("vllm_xargs"), skip_reading_prefix_cache=False)
        request = SimpleNamespace(
            sampling_params=params,
            request_id=f"{choice}_{name}-0123abcd",
            external_req_id=name,
            prompt_token_ids=PROMPT,
        )
        try:
            given = self.admission.prepare(request)
        except ClairaiError:
            return False  # EngineCoreProc._handle_request_preproc_error
        running = Running()
        self.admission.accept(given, running)
        self.held.append(running)
        self.plans.append(read_steering_plan(request.sampling_params))
        return True


class Running:
    """A request in the scheduler."""

    def is_finished(self) -> bool:
        return False


async def _frames(admitted: list[bool], *, is_chat: bool) -> AsyncIterator[str]:
    """The order of chat_completion_stream_generator: roles of all choices, then what each says."""
    for index in range(len(admitted) if is_chat else 0):
        delta = {"role": "assistant", "content": ""}
        yield _frame({"id": "1", "choices": [{"index": index, "delta": delta}]})
    for index, is_in in enumerate(admitted):
        if not is_in:
            error = {"error": {**ERROR, "code": 500}}
            yield f"data: {json.dumps(error)}\n\n"
            break
        said: dict[str, Any] = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
        yield _frame({"id": "1", "choices": [{"index": index, **said}]})
    yield "data: [DONE]\n\n"


async def _events(is_in: bool) -> AsyncIterator[str]:
    """The order of responses_stream_generator; its event of an error fails its own types."""
    for name in ("response.created", "response.in_progress"):
        yield f'event: {name}\ndata: {{"type":"{name}"}}\n\n'
    if not is_in:
        raise ValueError("103 validation errors")
    yield 'event: response.completed\ndata: {"type":"response.completed"}\n\n'


def _frame(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


@contextmanager
def toy_server(
    runtime: Path, *, is_steering: bool = True, limits: SteeringLimits | None = None, **more: Any
) -> Iterator[ToyServer]:
    room = limits or SteeringLimits(rows=8, programs=8)
    registry = SteeringRegistry(toy.POINTS, toy.WIDTH, room) if is_steering else None
    with toy.running_publisher(runtime) as step_publisher:
        change = _amend if is_steering else None
        yield ToyServer(CoreControl(registry, (), change), step_publisher, **more)


@contextmanager
def steering_server(runtime: Path, **more: Any) -> Iterator[ToyServer]:
    """With a vector and two probes; nothing of that counts as asked."""
    with toy_server(runtime, **more) as made:
        made.client.put("/v1/steering/vectors/calm", content=dumps(vector()))
        made.client.put("/v1/probes/late", content=toy.file_of("late", threshold=0.5))
        made.client.put("/v1/probes/early", content=toy.file_of("early", toy.FIRST))
        made.asked.clear()
        yield made
