"""Real vLLM with its worker in a process of its own: a worker that dies is replaced.

Streams that run end with an error within seconds, health says what and since when, and the engine
that `--on-death restart` brings back answers. A core that is killed: test_serve_demo.py and
tests/process/test_fault_engine.py. Suspended ones: tests/process/test_liveness.py with a toy, and
`make faults` with real vLLM.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator

import httpx
import pytest

from clairai.demo.model import smollm2
from tests.engine import server as parts
from tests.process.served import OpenStream, Served, run_serve
from tests.support.ring_engine import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

READY_S = 240.0
NOTICED_S = 10.0
VLLM = (
    *("--distributed-executor-backend", "mp", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "1024", "--served-model-name", "toy"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("live")
    with tempfile.TemporaryDirectory(prefix="clairai-") as runtime:  # short enough for a socket
        command = ("serve", str(smollm2()), "--points", "post_block.1", "--steering")
        options = ("--on-death", "restart", "--", *VLLM)
        variables = {
            "CLAIRAI_RUNTIME_DIR": runtime,
            "TOY_GATE": str(folder / "gate"),  # marks its processes
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        made = run_serve(
            command, options, variables, port=parts.free_port(), output=folder / "output"
        )
        try:
            until(lambda: made.said().count("is served on") == 1, READY_S)
            yield made
        finally:
            made.process.kill()
            made.process.wait()
            until(lambda: not made.engine_pids(), parts.DEADLINE_S)


def open_streams(served: Served) -> list[OpenStream]:
    fields = {"max_tokens": 900, "ignore_eos": True}
    return [
        OpenStream(served, **fields),
        OpenStream(served, **fields),
        OpenStream(served, **fields, clairai={"probes": "all"}),
    ]


@pytest.mark.attack(440)
def test_streams_end_with_an_error_and_the_engine_comes_back(served: Served) -> None:
    times = served.said().count("is served on")
    streams = open_streams(served)
    pids, began_s = served.engine_pids(), time.monotonic()
    os.kill(served.beat_of("worker").pid, signal.SIGKILL)
    for stream in streams:
        assert stream.wait_for_error()
        assert stream.ended_s is not None
        assert stream.ended_s - began_s < NOTICED_S
    health = served.health()
    assert health["status"] in ("starting", "failed")
    assert "/" not in health["reason"]
    assert health["since"] is not None
    steered = httpx.post(
        f"{served.url}/v1/chat/completions",
        json={"messages": [], "model": "toy", "clairai": {"steer": [{"vector": "calm"}]}},
        timeout=30,
        trust_env=False,
    )
    assert steered.status_code == 503
    until(lambda: served.said().count("is served on") == times + 1, READY_S)
    assert served.health()["status"] == "ready"
    assert not set(pids) & set(served.engine_pids())
    (stream, *_) = open_streams(served)
    assert b'"content"' in stream.raw


def test_an_engine_that_works_hard_beats_all_the_time(served: Served) -> None:
    """A prompt of the greatest length, several at once: nothing is taken for a hang."""
    times, before = served.said().count("is served on"), served.beat_of("engine-core")
    body = {"model": "toy", "prompt": "word " * 900, "max_tokens": 8, "n": 4}
    answer = httpx.post(
        f"{served.url}/v1/completions", json=body, timeout=parts.DEADLINE_S, trust_env=False
    )
    assert answer.status_code == 200
    until(lambda: served.beat_of("engine-core").beats > before.beats)
    assert served.health()["status"] == "ready"
    assert served.said().count("is served on") == times
