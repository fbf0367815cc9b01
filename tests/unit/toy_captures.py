"""Takes admitted requests; gives rows of each through the real collector into a real folder.

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

from clairai import wire, wire_capture
from clairai.capture.collector import Collector
from clairai.capture.consumers import About, open_consumers
from clairai.capture.resolve import Engine, Resolver
from clairai.capture.setting import Setting
from clairai.capture.taken import Load, Sample, Seat, Verdict
from clairai.compat.captures import read_order
from clairai.compat.requests import Reception
from clairai.errors import ClairaiError
from clairai.steer.desk import Desk
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named
from clairai.store.rows import Origin
from clairai.tap.capture import Capture
from clairai.tap.control import answer
from clairai.wire import ROW
from tests.unit import toy_station as toy
from tests.unit.toy_server import PROMPT, ToyServer

POINTS = tuple(map(str, toy.POINTS))
NUM_ROWS = len(PROMPT) + 2  # the prompt's and those of two generated tokens
ABOUT = About("toy", "v1", "float32", toy.WIDTH, POINTS)


def values(stream: int, positions_N: NDArray[np.int64], point: str) -> NDArray[np.float32]:
    base_N1 = (stream % 997 * 100 + positions_N + POINTS.index(point) * 0.5)[:, None]
    return (base_N1 + np.arange(toy.WIDTH) / 16).astype(np.float32)


@dataclass(frozen=True)
class ToyTaken:
    """Rows that are there at once."""

    load: Load
    nbytes: int = 0

    def wait(self) -> None: ...

    def verdicts(self) -> Sequence[Verdict]:
        return ()

    def loads(self) -> Sequence[Load]:
        return (self.load,)

    def samples(self) -> Sequence[tuple[Encoder, Sample]]:
        return ()

    def counts(self) -> Mapping[Seat, int]:
        rows_N = self.load.rows_N
        seat = int(rows_N["stream"][0]), int(rows_N["choice"][0])
        return {seat: len(rows_N) * len(self.load.points)}

    def free(self) -> None: ...


def origin_of(encoder: Encoder) -> Origin:
    return Origin.of(
        model="toy",
        weights="v1",
        dtype="float32",
        width=toy.WIDTH,
        encoder=encoder.name,
        parameters=encoder.parameters,
    )


class ToyCapture:
    """As tap.capture.Capture answers, over a real collector."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.is_held = False  # requests do not end by themselves
        self.running: list[Seat] = []

    def forward(self, seat: Seat, params: Any) -> None:
        order = read_order(params)
        if order is None:
            return
        self.collector.begin(seat, order)
        positions_N = np.concatenate(
            [np.arange(first, min(end, NUM_ROWS)) for first, end in order.ranges]
        )
        rows_N = np.zeros(len(positions_N), ROW)
        rows_N["stream"], rows_N["choice"], rows_N["position"] = *seat, positions_N
        encoder = named(order.encoder, dict(order.parameters))
        encoded = [encoder.encode(values(seat[0], positions_N, point)) for point in order.points]
        arrays = {name: np.stack([one[name] for one in encoded]) for name in encoded[0]}
        self.collector.put(ToyTaken(Load(encoder, order.points, order.to, rows_N, arrays)))
        self.running.append(seat)
        if not self.is_held:
            self.end()

    def end(self) -> None:
        while self.running:
            self.collector.finish(self.running.pop())

    def answer(self, control: wire_capture.Control) -> wire_capture.Reply:
        results = self.collector.results
        if isinstance(control, wire_capture.FindCaptures):
            if control.is_ended:
                self.collector.commit()
            return wire_capture.Captures(tuple(map(results.of_stream, control.streams)))
        if isinstance(control, wire_capture.ListCaptures):
            return wire_capture.Captures(results.newest(control.limit))
        return results.state(staging_nbytes=0, pending_nbytes=0)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass
class CapturingServer(ToyServer):
    """`capture` is None in an engine that does not capture."""

    resolver: Resolver | None = None
    capture: ToyCapture | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reception = Reception(self.desk, self.resolver)

    def add_routes(self, app: Any) -> None:
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"])

    async def _tokenize(self, request: Request) -> Response:
        """A template that says "<" and ">" around each message, and "!" where an answer begins."""
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
        self.asked.append(msgspec.msgpack.decode(args[0], type=wire.Control))
        capture = cast(Capture | None, self.capture)
        return self.desk.control(args[0], lambda sent: [answer(self.station, sent, capture)])

    def _admit(self, body: dict[str, Any], choice: int, name: str) -> bool:
        params = SimpleNamespace(extra_args=body.get("vllm_xargs"), skip_reading_prefix_cache=False)
        request = SimpleNamespace(
            sampling_params=params,
            request_id=f"{choice}_{name}-0123abcd",
            external_req_id=name,
            prompt_token_ids=PROMPT,
        )
        try:
            given = self.reception.mark(request)
        except ClairaiError:
            return False
        if self.capture is not None:
            self.capture.forward(given.seat, request.sampling_params)
        return True


@contextmanager
def capturing_server(runtime: Path, setting: dict[str, Any] | None) -> Iterator[CapturingServer]:
    parsed = None if setting is None else Setting.parse(setting)
    engine = Engine(toy.POINTS, 2, toy.WIDTH, "float32", {})
    consumers = {} if parsed is None else open_consumers(parsed.consumers, ABOUT)
    collector = Collector(consumers, origin_of, batch_nbytes=1 << 20, pending_nbytes=1 << 20)
    try:
        with toy.running_station(runtime) as station:
            yield CapturingServer(
                Desk(None, (), None),
                station,
                resolver=Resolver(parsed, engine),
                capture=None if parsed is None else ToyCapture(collector),
            )
    finally:
        collector.close()
