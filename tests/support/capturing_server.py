"""An API server whose requests are captured through a real collector into a real folder.

Real: routes, reception, resolver, collector, consumer, store. Toy: the model, whose rows say whose
they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.collector import Collector
from clairai.capture.consumers import EngineInfo, GuardedConsumer, open_consumers
from clairai.capture.staging_reader import EncodedRows, StagedBatch
from clairai.compat.admission import Admission
from clairai.compat.extra_args import read_capture_plan
from clairai.engine.capture.capture_plan import AnswerId
from clairai.engine.capture.capture_resolver import CaptureResolver, EngineShape
from clairai.engine.capture.worker_capture import WorkerCapture
from clairai.engine.core_control import CoreControl
from clairai.engine.used_streams import UsedStreams
from clairai.engine.worker_control import answer_control
from clairai.errors import ClairaiError
from clairai.store.codecs.registry import named
from clairai.store.stored_streams import StoredStreams
from clairai.wire import capture_messages, control_messages
from clairai.wire.ring_messages import ROW
from tests.support import toy_publisher as toy
from tests.support.api_server import PROMPT, ToyServer

POINTS = tuple(map(str, toy.POINTS))
NUM_ROWS = len(PROMPT) + 2  # the prompt's and those of two generated tokens
ABOUT = EngineInfo("toy", "v1", "float32", toy.WIDTH, POINTS)


def values(stream: int, positions_N: NDArray[np.int64], point: str) -> NDArray[np.float32]:
    base_N1 = (stream % 997 * 100 + positions_N + POINTS.index(point) * 0.5)[:, None]
    return (base_N1 + np.arange(toy.WIDTH) / 16).astype(np.float32)


class ReadyRows(StagedBatch):
    """Rows that need no arena."""

    def __init__(self, rows: EncodedRows) -> None:
        self._rows, self.nbytes, self.wait = rows, 0, lambda: None

    def rows(self) -> Sequence[EncodedRows]:
        return (self._rows,)

    def counts(self) -> Mapping[AnswerId, int]:
        return self._rows.counts()

    def free(self) -> None: ...


class ToyCapture:
    """Answers as WorkerCapture does, over a real collector."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.is_held = False  # requests do not end by themselves
        self.running: list[AnswerId] = []

    def forward(self, answer: AnswerId, params: Any) -> None:
        plan = read_capture_plan(params)
        if plan is None:
            return
        self.collector.begin(answer, plan)
        positions_N = np.concatenate(
            [np.arange(first, min(end, NUM_ROWS)) for first, end in plan.ranges]
        )
        rows_N = np.zeros(len(positions_N), ROW)
        rows_N["stream"], rows_N["choice"], rows_N["position"] = *answer, positions_N
        encoder = named(plan.encoder, dict(plan.parameters))
        encoded = [encoder.encode(values(answer[0], positions_N, point)) for point in plan.points]
        arrays = {name: np.stack([one[name] for one in encoded]) for name in encoded[0]}
        self.collector.put(ReadyRows(EncodedRows(encoder, plan.points, plan.to, rows_N, arrays)))
        self.running.append(answer)
        if not self.is_held:
            self.end()

    def end(self) -> None:
        while self.running:
            self.collector.finish(self.running.pop())

    def answer(self, control: capture_messages.CaptureControl) -> capture_messages.CaptureReply:
        results = self.collector.results
        if isinstance(control, capture_messages.FindCaptures):
            if control.is_ended:
                self.collector.commit()
            return capture_messages.Captures(tuple(map(results.of_stream, control.streams)))
        if isinstance(control, capture_messages.ListCaptures):
            return capture_messages.Captures(results.newest(control.limit, control.owner))
        return results.state(staging_nbytes=0, pending_nbytes=0)


class ToyRequest:
    """A request in the scheduler, until its rows have ended."""

    def __init__(self, capture: ToyCapture | None, answer: AnswerId) -> None:
        self._capture, self._answer = capture, answer

    def is_finished(self) -> bool:
        return self._capture is None or self._answer not in self._capture.running


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass
class CapturingServer(ToyServer):
    """`capture` is None in an engine that does not capture."""

    resolver: CaptureResolver | None = None
    capture: ToyCapture | None = None
    used: UsedStreams | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.admission = Admission(self.core_control, self.resolver, self.used)

    def add_routes(self, app: Any) -> None:
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])

    async def _tokenize(self, request: Request) -> Response:
        """A template that puts "<" and ">" around each message, and "!" where an answer begins."""
        body = await request.json()
        listening = asyncio.ensure_future(_until_gone(request))  # as entrypoints/utils.py does
        await asyncio.sleep(0)
        assert not listening.done()
        listening.cancel()
        if body.get("tools") == ["refused"]:
            return JSONResponse({"error": {"message": "no tools here", "code": 400}}, 400)
        said = "".join(f"<{one['content']}>" for one in body["messages"])
        if body.get("chat_template") == "reversing":
            said = said[::-1]
        tail = "!" if body.get("add_generation_prompt", True) else ""
        return JSONResponse({"tokens": [ord(letter) for letter in said + tail]})

    async def _collective_rpc(self, _: str, args: tuple[bytes]) -> list[bytes]:
        self.asked.append(msgspec.msgpack.decode(args[0], type=control_messages.Control))
        capture = cast(WorkerCapture | None, self.capture)
        return self.core_control.control(
            args[0], lambda sent: [answer_control(self.step_publisher, sent, capture)]
        )

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
            return False
        answer = (given.mark.stream, given.mark.choice)
        if self.capture is not None:
            self.capture.forward(answer, request.sampling_params)
        admitted = ToyRequest(self.capture, answer)
        self.admission.accept(given, admitted)
        self.held.append(admitted)
        return True


@contextmanager
def capturing_server(runtime: Path, setting: dict[str, Any] | None) -> Iterator[CapturingServer]:
    parsed = None if setting is None else CaptureSettings.parse(setting)
    engine = EngineShape(toy.POINTS, 2, toy.WIDTH, "float32", {})
    opened = {} if parsed is None else open_consumers(parsed.consumers, ABOUT)
    consumers = {name: GuardedConsumer(consumer) for name, consumer in opened.items()}
    collector = Collector(consumers, ABOUT, batch_nbytes=1 << 20, pending_nbytes=1 << 20)
    try:
        with toy.running_publisher(runtime) as step_publisher:
            yield CapturingServer(
                CoreControl(None, (), None),
                step_publisher,
                resolver=CaptureResolver(parsed, engine),
                capture=None if parsed is None else ToyCapture(collector),
                used=UsedStreams(None if parsed is None else StoredStreams(parsed.folders)),
            )
    finally:
        collector.close()
