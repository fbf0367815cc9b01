"""The `clairai` command itself: serve, proxy, demo, sidecar, doctor, and the groups of others.

Nothing heavy is imported at the top: a command imports what it needs, so that `--help` is instant.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from clairai import __version__
from clairai.cli.capture_commands import capture
from clairai.cli.key_commands import keys
from clairai.cli.probe_commands import probes
from clairai.cli.vector_commands import vectors
from clairai.cli.weights_commands import weights
from clairai.errors import ClairaiError, ConfigError, EngineGoneError

if TYPE_CHECKING:
    from clairai.launch.proxy_thread import ProxyOptions

app = typer.Typer(
    name="clairai",
    help="See inside a language model while stock vLLM serves it at full speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(capture, name="capture")
app.add_typer(keys, name="keys")
app.add_typer(probes, name="probes")
app.add_typer(vectors, name="vectors")
app.add_typer(weights, name="weights")

PROXY_NEEDS: Final = ("fastapi", "uvicorn", "aiohttp", "httptools", "prometheus_client")
# Exit codes. 0: done as asked, also by Ctrl-C; 2: a wrong command line, by typer.
REFUSED, ENGINE_GONE = 1, 3
MAX_PROCESSES: Final = 32  # that answer completions; as in proxy_settings.py


class Begin(StrEnum):
    """Where to begin in the ring of an engine that already runs."""

    OLDEST = "oldest"
    NEWEST = "newest"


class OnDeath(StrEnum):
    """What to do when the engine ends by itself."""

    END = "end"
    RESTART = "restart"


class LogFormat(StrEnum):
    """How lines for the log are written."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True)
class ScoreOptions:
    """What --score-all and --keep-scores say."""

    score_all: bool
    keep_s: float


Host = Annotated[str, typer.Option(help="Address to bind; any but loopback needs a key.")]
Port = Annotated[int, typer.Option(help="Port to bind.", min=1, max=65535)]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="Holds the keys that requests may carry; else CLAIRAI_API_KEY holds one.",
    ),
]
Captures = Annotated[
    str | None, typer.Option(metavar="FOLDER|JSON", help="Rows can be kept, in a folder.")
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", metavar="ORIGIN", help="Site whose pages may call the API."),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Other name that we may be called by."),
]
Death = Annotated[
    OnDeath, typer.Option("--on-death", help="When the engine ends by itself: end, or restart it.")
]
Stall = Annotated[
    float | None,
    typer.Option(
        "--stall-limit",
        metavar="SECONDS",
        min=5.0,
        help="End an engine that makes no progress for so long: 120, or 600 on a CPU.",
    ),
]
Probes = Annotated[
    list[str] | None, typer.Option(metavar="PATH", help="Probe file, folder or glob.")
]
Points = Annotated[
    list[str] | None, typer.Option(metavar="POINT", help="Tap point, such as post_block.15.")
]
Vectors = Annotated[
    list[str] | None, typer.Option(metavar="PATH", help="Steering vector, folder or glob.")
]
VllmLog = Annotated[
    str | None, typer.Option(metavar="FILE", help="Where vLLM's own log goes; - is beside ours.")
]
ScoreAll = Annotated[
    bool,
    typer.Option("--score-all", help="Score every completion; fetch scores by the answer's id."),
]
KeepScores = Annotated[
    float,
    typer.Option(
        "--keep-scores",
        metavar="SECONDS",
        min=1.0,
        help="How long scores can be fetched after an answer's end.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--completion-processes",
        metavar="N",
        min=1,
        max=MAX_PROCESSES,
        help="Processes that answer completions: 1, or as many as vLLM is to have API servers.",
    ),
]
Replica = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of this server among several behind a router."),
]
Logs = Annotated[LogFormat, typer.Option("--log-format", help="Lines of text, or of JSON.")]


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def sidecar(
    runtime_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where engines and readers meet.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per scored row.")
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="With --json: also what happens beside the rows.")
    ] = False,
    start: Annotated[
        Begin,
        typer.Option("--from", help="Of an engine that runs already: its oldest or next row."),
    ] = Begin.OLDEST,
) -> None:
    """Show scores live, as a table or as JSON lines; start it before or after vLLM."""
    if events and not as_json:
        raise typer.BadParameter("--events adds lines to --json; give both")
    from clairai.sidecar.run_sidecar import sidecar as run

    run(runtime_dir, as_json=as_json, with_events=events, start=start.value)


@app.command()
def demo(
    host: Host = "127.0.0.1",
    port: Port = 6969,
    api_key_file: KeyFile = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask this, print its scores, and exit.")
    ] = None,
    on_death: Death = OnDeath.END,
    log_format: Logs = LogFormat.TEXT,
) -> None:
    """Serve SmolLM2 with its probes and vectors, and a dashboard to watch and steer it.

    Needs no GPU and downloads nothing.
    """
    _require_proxy_packages()
    from clairai.demo.run import answer_once
    from clairai.demo.run import demo as run
    from clairai.launch.user_output import UserOutput

    options = _proxy_options(host, port, api_key_file)
    output = UserOutput.of(log_format.value)
    if prompt is not None:
        answer_once(prompt, output)
    else:
        run(options, output, on_death=on_death.value)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What `vllm serve` would take.")],
    vllm_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_ARGUMENT", help="Handed to vLLM.")
    ] = None,
    probes: Probes = None,
    points: Points = None,
    vectors: Vectors = None,
    steering: Annotated[
        bool, typer.Option("--steering", help="Rows can be steered; --vectors implies it.")
    ] = False,
    capture: Captures = None,
    host: Host = "127.0.0.1",
    port: Port = 6969,
    api_key_file: KeyFile = None,
    allow_origin: Origins = None,
    allow_host: Hosts = None,
    on_death: Death = OnDeath.END,
    stall_limit: Stall = None,
    log_format: Logs = LogFormat.TEXT,
    vllm_log: VllmLog = None,
    score_all: ScoreAll = False,
    keep_scores: KeepScores = 600.0,
    completion_processes: Processes = None,
    replica: Replica = None,
) -> None:
    """Serve MODEL: vLLM with clairai's taps, proxy and dashboard on one port."""
    _require_proxy_packages()
    from clairai.launch.serve import serve as run
    from clairai.launch.user_output import UserOutput

    run(
        model,
        _proxy_options(
            *(host, port, api_key_file, allow_origin, allow_host, replica),
            ScoreOptions(score_all, keep_scores),
            _choose_processes(completion_processes, vllm_arguments),
        ),
        UserOutput.of(log_format.value),
        points=points or [],
        probes=probes or [],
        vectors=vectors or [],
        steering=steering,
        capture=capture,
        arguments=vllm_arguments or [],
        on_death=on_death.value,
        stall_limit_s=stall_limit,
        vllm_log=vllm_log,
    )


@app.command()
def proxy(
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="A vLLM with clairai: http://... or unix:/path.")
    ],
    runtime_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where engines and readers meet.")
    ] = None,
    upstream_api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Holds that vLLM's key; else CLAIRAI_UPSTREAM_API_KEY does."
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 6969,
    api_key_file: KeyFile = None,
    allow_origin: Origins = None,
    allow_host: Hosts = None,
    log_format: Logs = LogFormat.TEXT,
    score_all: ScoreAll = False,
    keep_scores: KeepScores = 600.0,
    completion_processes: Processes = None,
    replica: Replica = None,
) -> None:
    """Show a vLLM that runs elsewhere on this host: proxy and dashboard on one port."""
    _require_proxy_packages()
    from clairai.launch.api_key import UPSTREAM, api_key
    from clairai.launch.proxy_thread import serve_proxy as run
    from clairai.launch.user_output import UserOutput

    run(
        upstream,
        _proxy_options(
            *(host, port, api_key_file, allow_origin, allow_host, replica),
            ScoreOptions(score_all, keep_scores),
            _choose_processes(completion_processes, None),
        ),
        UserOutput.of(log_format.value),
        runtime=runtime_dir,
        upstream_api_key=api_key(upstream_api_key_file, UPSTREAM),
    )


def _proxy_options(
    host: str,
    port: int,
    key_file: Path | None,
    origins: list[str] | None = None,
    names: list[str] | None = None,
    replica: str | None = None,
    scores: ScoreOptions | None = None,
    completion_processes: int = 1,
) -> ProxyOptions:
    from clairai.launch.api_key import access_keys
    from clairai.launch.engine_command import ListenAddress
    from clairai.launch.proxy_thread import ProxyOptions

    made = ProxyOptions(
        ListenAddress(host, port, keys=access_keys(key_file)),
        tuple(origins or ()),
        tuple(names or ()),
        completion_processes=completion_processes,
        replica=replica,
    )
    return (
        made
        if scores is None
        else replace(made, score_all=scores.score_all, scores_kept_s=scores.keep_s)
    )


def _choose_processes(given: int | None, vllm_arguments: list[str] | None) -> int:
    """As many as API servers, unless somebody says: one process cannot keep up with several."""
    from clairai.launch.engine_command import count_api_servers

    return given or min(count_api_servers(vllm_arguments or ()), MAX_PROCESSES)


def _require_proxy_packages() -> None:
    """Say in plain words, instead of an ImportError, that the proxy needs vLLM's packages."""
    missing = [name for name in PROXY_NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the proxy needs {', '.join(missing)}, which vLLM brings along; "
            f"install clairai where vLLM is"
        )


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What `vllm serve` would take.")],
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM_ARGUMENT", help="Such as --trust-remote-code."),
    ] = None,
) -> None:
    """Say which tap points of MODEL can be served."""
    from rich.console import Console
    from rich.table import Table

    from clairai.compat.doctor import diagnose

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported
    report = diagnose(model, vllm_arguments or [])
    table = Table("point", "verdict", "reason", box=None)
    for row in report.lines():
        table.add_row(*row)
    typer.echo(report.title)
    Console(highlight=False).print(table)
    typer.echo(report.summary)
    if report.evidence:
        typer.echo(report.evidence)
    for problem in report.problems:
        typer.echo(problem, err=True)
    if report.problems:
        raise typer.Exit(1)


def main() -> None:
    try:
        app()
    except ClairaiError as error:
        sys.stderr.write(f"error: {error}\n")
        code = ENGINE_GONE if isinstance(error, EngineGoneError) else REFUSED
        raise SystemExit(code) from None
