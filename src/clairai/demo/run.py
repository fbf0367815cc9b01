"""Takes a place to listen; serves the demo model with its probes and shows the scores."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clairai.demo.model import NAME, smollm2
from clairai.errors import EngineGoneError
from clairai.offline import config
from clairai.ring.folder import runtime_dir
from clairai.serve.ask import Scored, ask
from clairai.serve.calls import Server
from clairai.serve.engine import EngineProcess
from clairai.serve.launch import Bind, Launch, is_cpu_build
from clairai.serve.log import EngineLog
from clairai.sidecar.board import Cell
from clairai.sidecar.run import beside, watch
from clairai.sidecar.stopping import Stopping
from clairai.sidecar.table import marked
from clairai.sidecar.views import PlainView, TableView

FALLBACK_POINT: Final = "post_block.15"
MAX_ANSWER_TOKENS: Final = 64
_MAX_CORES: Final = 8  # more make a model of this size no faster


def demo(*, host: str, port: int, api_key: str | None, prompt: str | None) -> None:
    """The command `clairai demo`; whichever way it ends, vLLM ends with it."""
    console = Console(highlight=False)
    bind = Bind(host, port, api_key)
    folder = runtime_dir()
    launch = _launch(bind, folder, console)
    log = EngineLog(folder / f"vllm-{port}.log")
    with Stopping() as stop, EngineProcess(launch, log=log) as engine:
        with _progress(console, log) as tick:
            is_ready = engine.wait_ready(stop=stop, tick=tick)
        if is_ready and prompt is not None:
            server = Server(bind.url, api_key)
            _print_scored(console, ask(server, folder, prompt, max_tokens=MAX_ANSWER_TOKENS))
        elif is_ready:
            _show(console, engine, folder, stop)
        _say(console, "stopping vLLM")


def _launch(bind: Bind, folder: Path, console: Console) -> Launch:
    probes = sorted((Path(__file__).parent / "probes").glob("*.safetensors"))
    if not probes:
        _say(console, f"no demo probes in this build: tapping {FALLBACK_POINT} without scores")
    tapped = config(
        points=() if probes else (FALLBACK_POINT,), probes=probes, runtime_dir=str(folder)
    )
    is_cpu = is_cpu_build()
    kind = ("float32", "--enforce-eager") if is_cpu else ("bfloat16",)
    arguments = ("--served-model-name", NAME, "--max-model-len", "2048", "--dtype", *kind)
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | (_cpu() if is_cpu else {})
    return Launch(str(smollm2()), tapped, bind, arguments, variables)


def _cpu() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:_MAX_CORES]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Without it the worker leaves one core to the API server, which hardly uses it.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


@contextmanager
def _progress(console: Console, log: EngineLog) -> Iterator[Callable[[], None]]:
    """Show that something happens, and what, for the half minute that vLLM takes."""
    _say(console, f"starting vLLM for {NAME}; its log: {log.path}")
    if not console.is_terminal:
        yield lambda: None
        return
    began_s = time.monotonic()
    with console.status("") as status:

        def tick() -> None:
            line = f"{time.monotonic() - began_s:3.0f} s  {log.newest() or 'importing vLLM'}"
            status.update(Text(line[: console.width - 4]))

        yield tick


def _show(console: Console, engine: EngineProcess, folder: Path, stop: Callable[[], bool]) -> None:
    bind = engine.launch.bind
    banner = _banner(bind, Server(bind.url, bind.api_key).probes()["data"])
    for line in banner:
        _say(console, line)
    is_over = _any(stop, lambda: not engine.is_alive())
    if console.is_terminal:
        say, kept = beside(console), len(banner) + 2
        with TableView(console, folder=folder, say=say, num_lines_kept=kept) as live:
            watch(folder, live, start="oldest", stop=is_over)
    else:
        plain = PlainView(lambda line: _say(console, line), folder=folder, say_loss=beside(console))
        watch(folder, plain, start="oldest", stop=is_over)
    if not stop():
        raise EngineGoneError(engine.epitaph())


def _banner(bind: Bind, probes: list[dict[str, Any]]) -> list[str]:
    names = ", ".join(probe["name"] for probe in probes) or "no probes"
    message = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"messages": message, "max_tokens": 64})
    key = "" if bind.api_key is None else ' -H "Authorization: Bearer $CLAIRAI_API_KEY"'
    return [
        f"{NAME} is served on {bind.url} with {names}",
        "",
        f"  curl {bind.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\",
        f"    -d '{body}'",
        "",
        "in another terminal: clairai sidecar          (Ctrl-C here stops everything)",
        "",
    ]


def _print_scored(console: Console, scored: Scored) -> None:
    """The answer token by token; the last one was never an input, so it has no score."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("token", no_wrap=True)
    for name in scored.scores.names:
        table.add_column(name, justify="right")
    thresholds = {probe["name"]: probe["threshold"] for probe in scored.probes}
    for text, row in zip(scored.texts, scored.scores.generated, strict=True):
        scores = zip(scored.scores.names, row.tolist(), strict=True)
        cells = [marked(_cell(score, thresholds.get(name))) for name, score in scores]
        table.add_row(Text(repr(text)), *cells)
    _say(console, "".join(scored.texts))
    console.print(table)


def _cell(score: float, threshold: float | None) -> Cell:
    is_above = threshold is not None and score >= threshold
    return Cell(score, is_above, is_above)


def _any(*questions: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: any(question() for question in questions)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)
