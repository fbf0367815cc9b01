"""Stands in for `python -m vllm.entrypoints.openai.api_server`, with its arguments and log.

The server speaks vLLM's wire and writes a real ring (tests/http/fake.py). TOY_VLLM says how it
behaves: `deaf` ignores SIGTERM, `broken` cannot start, `slow` waits for the file TOY_GATE,
`parent` has a child in a session of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

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
    if "deaf" in behaviour:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while "slow" in behaviour and not Path(os.environ["TOY_GATE"]).exists():
        time.sleep(0.01)
    asyncio.run(_serve(sys.argv[sys.argv.index("--uds") + 1]))


async def _serve(path: str) -> None:
    from aiohttp import web

    from tests.http.fake import Ring, answering, bank_of
    from tests.http.fake_server import Upstream
    from tests.http.world import SHAPE
    from tests.support.ring_engine import running_engine

    config = json.loads(sys.argv[sys.argv.index("--additional-config") + 1])
    folder = Path(config["clairai"]["runtime_dir"])
    with running_engine(folder, shape=SHAPE, bank_of=bank_of) as engine:
        upstream = Upstream(answering([72, 105, 33]), epoch=engine.epoch, ring=Ring(engine.writer))
        runner = web.AppRunner(upstream.app(), access_log=None)
        await runner.setup()
        await web.UnixSite(runner, path).start()
        await asyncio.Event().wait()
