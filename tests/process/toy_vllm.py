"""Stands in for `python -m vllm.entrypoints.openai.api_server`, with its arguments and log.

The server speaks vLLM's wire and writes a real ring (tests/http/fake.py). TOY_VLLM says how it
behaves: `deaf` ignores SIGTERM, `broken` cannot start, `slow` waits for the file TOY_GATE,
`parent` has a child in a session of its own. `processes` has an engine core and a worker, which
beat as the real ones do; the core's loop hangs while the file TOY_GATE.hang is there. Between API
server and core are ZeroMQ's sockets, as vLLM has them. `endless` streams tokens until its client
leaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.http.fake import Exchange

MODULE: Final = "vllm/entrypoints/openai/api_server.py"


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH in which `vllm` is this toy."""
    module = folder / MODULE
    module.parent.mkdir(parents=True)
    for package in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
        (folder / package / "__init__.py").touch()
    module.write_text("from tests.process.toy_vllm import main\nmain()\n")
    return folder


def main() -> None:
    behaviour = os.environ.get("TOY_VLLM", "").split(",")
    print(
        "(APIServer pid=1) INFO 01-01 00:00:00 [core.py:1] Initializing a V1 LLM engine", flush=True
    )
    if "broken" in behaviour:
        head = "(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:2]"
        print(f"{head} EngineCore failed to start.\n{head} ValueError: planted", flush=True)
        raise SystemExit(1)
    if "parent" in behaviour and os.fork() == 0:
        os.setsid()
        time.sleep(600)
    if "processes" in behaviour:
        _fork(_run_core)
        _fork(_run_worker)
    if "deaf" in behaviour:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while "slow" in behaviour and not Path(os.environ["TOY_GATE"]).exists():
        time.sleep(0.01)
    asyncio.run(_serve(sys.argv[sys.argv.index("--uds") + 1], behaviour))


def _fork(work: Callable[[], None]) -> None:
    if os.fork() == 0:
        work()
        os._exit(1)


def _run_core() -> None:
    """A busy loop as vLLM's: it empties its input queue in every round."""
    from clairai.compat.loop_heartbeat import LoopHeartbeat
    from clairai.local.heartbeat import Heartbeat

    heartbeat = Heartbeat.open("engine-core")
    assert heartbeat is not None
    inputs: queue.Queue[tuple[str, None]] = queue.Queue()
    loop = LoopHeartbeat(heartbeat, inputs, ("wake up", None))
    threading.Thread(target=loop.run, daemon=True).start()
    sockets = _connect_to_server(os.getppid())
    while sockets:
        inputs.get()
        while Path(f"{os.environ['TOY_GATE']}.hang").exists():
            time.sleep(0.05)


def _link_names(server: int) -> tuple[str, str]:
    """Of the requests and of the outputs; in Linux's abstract namespace: nothing is left."""
    return f"ipc://@toy-{server}-in", f"ipc://@toy-{server}-out"


def _connect_to_server(server: int) -> list[Any]:
    import zmq

    context = zmq.Context()
    made = [context.socket(kind) for kind in (zmq.DEALER, zmq.PUSH)]
    for socket, name in zip(made, _link_names(server), strict=True):
        socket.connect(name)
        socket.send(b"ready")
    return made


async def _await_core() -> SimpleNamespace:
    """What vLLM's client shows of its sockets, when the core is connected to them."""
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    router, pull = (context.socket(kind) for kind in (zmq.ROUTER, zmq.PULL))
    for socket, name in zip((router, pull), _link_names(os.getpid()), strict=True):
        socket.bind(name)
        await socket.recv_multipart()
    return SimpleNamespace(
        engine_core=SimpleNamespace(
            input_socket=router, resources=SimpleNamespace(output_socket=pull)
        ),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=False)),
    )


def _run_worker() -> None:
    from clairai.local.heartbeat import Heartbeat

    assert Heartbeat.open("worker") is not None
    while True:
        time.sleep(600)


async def _stream_endlessly(exchange: Exchange) -> None:
    await exchange.begin()
    position = 4
    while True:
        exchange.rows(position, [72])
        await exchange.tokens([72])
        position += 1
        await asyncio.sleep(0.05)


async def _serve(path: str, behaviour: list[str]) -> None:
    from aiohttp import web

    from clairai.server.install_routes import start_beating, start_link_watch
    from tests.http.fake import Ring, answering, bank_of
    from tests.http.fake_server import Upstream
    from tests.http.world import SHAPE
    from tests.support.ring_engine import running_engine

    config = json.loads(sys.argv[sys.argv.index("--additional-config") + 1])
    folder = Path(config["clairai"]["runtime_dir"])
    with running_engine(folder, shape=SHAPE, bank_of=bank_of) as engine:
        script = _stream_endlessly if "endless" in behaviour else answering([72, 105, 33])
        upstream = Upstream(script, epoch=engine.epoch, ring=Ring(engine.writer))
        heartbeat = start_beating(upstream)
        if "processes" in behaviour and heartbeat is not None:
            start_link_watch(await _await_core(), upstream, heartbeat)
        runner = web.AppRunner(upstream.app(), access_log=None)
        await runner.setup()
        await web.UnixSite(runner, path).start()
        await asyncio.Event().wait()
