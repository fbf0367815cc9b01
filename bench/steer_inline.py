"""What a vector in a request costs before the engine sees it, stage by stage.

32 layers of width 4096 as base64 of float32: 700 kB in a request, 131,072 numbers. Each stage is
timed with the vector and without; the difference is shown. Times are the thread's own, so that a
busy machine does not count.
Run: python -m bench.steer_inline
"""

from __future__ import annotations

import base64
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from clairai.engine.steer.steering_plan import encode_plan
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.fields.catalog import Catalog
from clairai.fields.request_fields import parse_fields
from clairai.points import Point
from clairai.proxy.completions import completion_request
from clairai.proxy.proxy_settings import Limits as ProxyLimits
from clairai.server.core_cache import CoreView
from clairai.server.request_check import read_completion
from clairai.server.steering_preview import preview_steering
from scripts.numbers import stamp, table, write_section

NUM_LAYERS, WIDTH, NUM_TIMES = 32, 4096, 100
POINTS = tuple(Point("post_block", layer) for layer in range(NUM_LAYERS))
VIEW = CoreView(Catalog(frozenset(POINTS)), WIDTH)
PROXY_LIMITS = ProxyLimits()
PROMPT_LEN = 64
VLLMS = "beside them: vLLM reads the same request"
XARGS = TypeAdapter(dict[str, str | int | float | list[str | int | float]])


def main() -> None:
    began_s = time.monotonic()
    steered, plain = _body(_steer()), _body([])
    added = {
        name: _median_ms(stage, steered) - _median_ms(stage, plain)
        for name, stage in STAGES.items()
    }
    vllms_ms = _median_ms(_read_by_vllm, steered) - _median_ms(_read_by_vllm, plain)
    rows = [[name, f"{added_ms:.2f}"] for name, added_ms in added.items()]
    rows += [["all of these", f"{sum(added.values()):.2f}"], [VLLMS, f"{vllms_ms:.2f}"]]
    shown = table(["stage", "added, ms"], rows)
    print(shown)
    what = (
        f"One vector of {NUM_LAYERS} layers of width {WIDTH} in a request: {len(steered)} bytes of "
        f"JSON. What it adds to the CPU time of each stage, median of {NUM_TIMES}; how long the "
        f"bytes are on their way between processes is not in it. What the API server echoes is "
        f"hashed beside the request, while the engine is at work."
    )
    took = f"{time.monotonic() - began_s:.0f} s"
    command = stamp("python -m bench.steer_inline", took=took)
    write_section("A vector in a request", [command, what, shown])


def _steer() -> list[Any]:
    random = np.random.default_rng(0)
    packed = {
        str(point): base64.b64encode(random.standard_normal(WIDTH, np.float32).tobytes()).decode()
        for point in POINTS
    }
    return [{"vector": {"dtype": "f32", "points": packed}, "scale": 2.0}]


def _body(steer: list[Any]) -> bytes:
    """As a client sends it to the proxy."""
    messages = [{"role": "user", "content": "Hi"}]
    return json.dumps({"messages": messages, "clairai": {"steer": steer}}).encode()


def _proxied(body: bytes) -> bytes:
    request = completion_request.read_request(body, PROXY_LIMITS)
    assert request is not None
    return request.body(7)


def _judged(upstream: bytes) -> None:
    given = read_completion(upstream)
    assert given is not None
    preview_steering(given.fields, VIEW)


def _admitted(xargs: dict[str, Any]) -> None:
    """What the engine core does, on its input thread."""
    registry = SteeringRegistry(POINTS, WIDTH, SteeringLimits(rows=1024, programs=1024))
    plan = registry.resolve(parse_fields(xargs).steer, prompt_len=PROMPT_LEN)
    if plan is not None:
        registry.claim(plan)
        encode_plan(plan)


def _work(stage: Callable[[Any], object], given: Any) -> Callable[[], object]:
    return lambda: stage(given)


STAGES: dict[str, Callable[[bytes], Callable[[], object]]] = {
    "the proxy reads it and writes it on": lambda body: _work(_proxied, body),
    "the API server reads and judges it": lambda body: _work(_judged, _proxied(body)),
    "the engine core reads, resolves and seals it": lambda body: _work(
        _admitted, json.loads(_proxied(body))["vllm_xargs"]
    ),
}


def _read_by_vllm(body: bytes) -> Callable[[], object]:
    """Its JSON and its types (entrypoints/openai/chat_completion/protocol.py, 0.32:511)."""
    upstream = _proxied(body)
    return lambda: XARGS.validate_python(json.loads(upstream)["vllm_xargs"])


def _median_ms(stage: Callable[[bytes], Callable[[], object]], body: bytes) -> float:
    work = stage(body)
    spent = []
    for _ in range(NUM_TIMES):
        began_ns = time.thread_time_ns()
        work()
        spent.append(time.thread_time_ns() - began_ns)
    return statistics.median(spent) / 1e6


if __name__ == "__main__":
    main()
