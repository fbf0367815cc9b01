"""The command `clairai demo`: serves the demo model with its probes, or asks it one question."""

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
from clairai.launch.engine_command import (
    PRIVATE_IDLE_S,
    EngineCommand,
    PrivateSocket,
    is_cpu_build,
)
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from clairai.launch.proxy_thread import ProxyOptions
from clairai.launch.serve import NO_ACCESS_LOG, choose_limits, make_banner, run_service
from clairai.launch.supervisor import DeathPolicy
from clairai.launch.user_output import UserOutput, show_start_progress
from clairai.library.config import config
from clairai.library.http_client import ServerClient
from clairai.local.private_socket import runtime_dir
from clairai.local.stop_signal import StopSignal
from clairai.sidecar.live_state import Cell
from clairai.sidecar.live_table import format_cell

MAX_ANSWER_TOKENS: Final = 64
EXAMPLES: Final = Path(__file__).parent / "examples.json"
HINT: Final = 'try: ask it "Write a loop in C.", choose the probe `code`, and watch the tokens turn'
STAGING_MIB: Final = 32  # a model of this size fills no more
_MAX_CORES: Final = 8  # more do not make a model of this size faster


def demo(options: ProxyOptions, output: UserOutput, *, on_death: DeathPolicy) -> None:
    """The command `clairai demo`; however it ends, vLLM ends with it."""
    folder, address = runtime_dir(), options.address
    captures = cache_folder() / f"captures-{address.port}"
    command = _engine_command(folder, {"folder": str(captures), "staging_mib": STAGING_MIB})
    run_service(
        command,
        replace(options, examples=EXAMPLES).settings(
            command.address.url, folder, upstream_idle_s=PRIVATE_IDLE_S
        ),
        address,
        output,
        log=EngineLog(folder / f"vllm-{address.port}.log"),
        on_death=on_death,
        limits=choose_limits(None),
        banner=lambda: [
            *make_banner(_describe_engine(command), address),
            f"rows of requests that ask for it are kept in {captures}",
            HINT,
        ],
    )


def answer_once(prompt: str, output: UserOutput) -> None:
    """`clairai demo --prompt`: one answer, token by token with its scores; needs no port."""
    folder = runtime_dir()
    command = _engine_command(folder)
    log = EngineLog(folder / "vllm-demo.log")
    output.say(f"starting vLLM for {NAME}; its log: {log.path}")
    with StopSignal() as stop, EngineProcess(command, log=log) as engine:
        with show_start_progress(output.console, log, output.say) as tick:
            is_ready = engine.wait_ready(stop=stop, tick=tick)
        if is_ready:
            client = ServerClient(command.address.url)
            answer = ask_with_scores(client, folder, prompt, max_tokens=MAX_ANSWER_TOKENS)
            print_answer(output.console or Console(highlight=False), answer)


def print_answer(console: Console, answer: ScoredAnswer) -> None:
    """The answer token by token; the last token was never an input, so it has no score."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("token", no_wrap=True)
    for name in answer.scores.names:
        table.add_column(name, justify="right")
    thresholds = {probe["name"]: probe["threshold"] for probe in answer.probes}
    for text, row in zip(answer.texts, answer.scores.generated, strict=True):
        scores = zip(answer.scores.names, row.tolist(), strict=True)
        cells = [format_cell(_make_cell(score, thresholds.get(name))) for name, score in scores]
        table.add_row(Text(repr(text)), *cells)
    console.print("".join(answer.texts), markup=False, soft_wrap=True)
    console.print(table)


def _engine_command(folder: Path, capture: dict[str, Any] | None = None) -> EngineCommand:
    probes = sorted((Path(__file__).parent / "probes").glob("*.safetensors"))
    vectors = sorted((Path(__file__).parent / "vectors").glob("*.safetensors"))
    is_cpu = is_cpu_build()
    dtype = ("float32", "--enforce-eager") if is_cpu else ("bfloat16",)
    arguments = (
        *("--served-model-name", NAME, "--max-model-len", "2048", NO_ACCESS_LOG, "--dtype"),
        *dtype,
    )
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables |= _cpu_variables() if is_cpu else {}
    settings = config(probes=probes, vectors=vectors, capture=capture, runtime_dir=str(folder))
    private = PrivateSocket.within(folder)
    return EngineCommand(str(smollm2()), settings, private, arguments, variables)


def _cpu_variables() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:_MAX_CORES]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Otherwise the worker leaves one core to the API server, which hardly uses it.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


def _describe_engine(command: EngineCommand) -> str:
    probes = ServerClient(command.address.url).probes()["data"]
    return f"{NAME} with {', '.join(probe['name'] for probe in probes)}"


def _make_cell(score: float, threshold: float | None) -> Cell:
    is_above = threshold is not None and score >= threshold
    return Cell(score, is_above, is_above)
