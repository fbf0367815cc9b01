"""Takes an address; serves the demo model with its probes there, or asks it one question."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clairai.demo.model import NAME, cache_folder, smollm2
from clairai.demo.scored_answer import ScoredAnswer, ask_with_scores
from clairai.launch.engine_command import EngineCommand, PrivateSocket, is_cpu_build
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from clairai.launch.proxy_thread import ProxyOptions
from clairai.launch.serve import QUIET, banner, run_service
from clairai.launch.supervisor import DeathPolicy
from clairai.launch.user_output import UserOutput, show_start_progress
from clairai.library.engine_control import config
from clairai.library.http_client import ServerClient
from clairai.local.private_socket import runtime_dir
from clairai.local.stop_signal import StopSignal
from clairai.sidecar.live_state import Cell
from clairai.sidecar.live_table import format_cell

MAX_ANSWER_TOKENS: Final = 64
EXAMPLES: Final = Path(__file__).parent / "examples.json"
TRY: Final = 'try: ask it "Write a loop in C.", choose the probe `code`, and watch the tokens turn'
STAGING_MIB: Final = 32  # a model of this size fills no more
_MAX_CORES: Final = 8  # more make a model of this size no faster


def demo(outside: ProxyOptions, voice: UserOutput, *, on_death: DeathPolicy) -> None:
    """The command `clairai demo`; whichever way it ends, vLLM ends with it."""
    folder = runtime_dir()
    captures = cache_folder() / f"captures-{outside.bind.port}"
    launch = _launch(folder, {"folder": str(captures), "staging_mib": STAGING_MIB})
    run_service(
        launch,
        replace(outside, examples=EXAMPLES).settings(launch.bind.url, folder),
        outside,
        voice,
        log=EngineLog(folder / f"vllm-{outside.bind.port}.log"),
        on_death=on_death,
        banner=lambda: [
            *banner(_described(launch), outside.bind),
            f"rows of requests that ask for it are kept in {captures}",
            TRY,
        ],
    )


def answer_once(prompt: str, voice: UserOutput) -> None:
    """`clairai demo --prompt`: one answer, token by token with its scores; needs no port."""
    folder = runtime_dir()
    launch = _launch(folder)
    log = EngineLog(folder / "vllm-demo.log")
    voice.say(f"starting vLLM for {NAME}; its log: {log.path}")
    with StopSignal() as stop, EngineProcess(launch, log=log) as engine:
        with show_start_progress(voice.console, log, voice.say) as tick:
            is_ready = engine.wait_ready(stop=stop, tick=tick)
        if is_ready:
            scored = ask_with_scores(
                ServerClient(launch.bind.url), folder, prompt, max_tokens=MAX_ANSWER_TOKENS
            )
            print_scored(voice.console or Console(highlight=False), scored)


def print_scored(console: Console, scored: ScoredAnswer) -> None:
    """The answer token by token; the last one was never an input, so it has no score."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("token", no_wrap=True)
    for name in scored.scores.names:
        table.add_column(name, justify="right")
    thresholds = {probe["name"]: probe["threshold"] for probe in scored.probes}
    for text, row in zip(scored.texts, scored.scores.generated, strict=True):
        scores = zip(scored.scores.names, row.tolist(), strict=True)
        cells = [format_cell(_cell(score, thresholds.get(name))) for name, score in scores]
        table.add_row(Text(repr(text)), *cells)
    console.print("".join(scored.texts), markup=False, soft_wrap=True)
    console.print(table)


def _launch(folder: Path, capture: dict[str, Any] | None = None) -> EngineCommand:
    probes = sorted((Path(__file__).parent / "probes").glob("*.safetensors"))
    is_cpu = is_cpu_build()
    kind = ("float32", "--enforce-eager") if is_cpu else ("bfloat16",)
    arguments = ("--served-model-name", NAME, "--max-model-len", "2048", QUIET, "--dtype", *kind)
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | (_cpu() if is_cpu else {})
    vectors = sorted((Path(__file__).parent / "vectors").glob("*.safetensors"))
    tapped = config(probes=probes, vectors=vectors, capture=capture, runtime_dir=str(folder))
    return EngineCommand(str(smollm2()), tapped, PrivateSocket.within(folder), arguments, variables)


def _cpu() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:_MAX_CORES]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Without it the worker leaves one core to the API server, which hardly uses it.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


def _described(launch: EngineCommand) -> str:
    names = ", ".join(probe["name"] for probe in ServerClient(launch.bind.url).probes()["data"])
    return f"{NAME} with {names}"


def _cell(score: float, threshold: float | None) -> Cell:
    is_above = threshold is not None and score >= threshold
    return Cell(score, is_above, is_above)
