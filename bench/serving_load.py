"""What serving with scores costs over vLLM alone, as clients see it: speed, first token, CPU.

Starts vLLM alone and `clairai serve` with 16 probes side by side, the same model and options, and
loads them by turns with the client processes of bench.load_clients. On a GPU the model is a shape
of bench/shapes with dummy weights; on a CPU it is the demo's. Further numbers of completion
processes are tried with a `clairai proxy` each before the engine with one API server; otherwise
there are as many as API servers. Writes JSON and Markdown.
Run: python -m bench.serving_load [--streams 1 16 64 256] [--tokens 256] [--requests 3] [--turns 3]
     [--api-servers 1 4] [--completion-processes 1 4] [--shape llama-3.1-8b] [--unscored]
     [--out build/serving] [--vllm MORE OPTIONS OF VLLM]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.load_clients import Seen, run_load
from bench.soak_footprint import find_role, find_tree
from bench.weights_shape import SHAPES, write_tokenizer
from clairai.launch.engine_command import is_cpu_build
from clairai.points import Point
from clairai.probe.files import save
from clairai.probe.model import Probe

NAME: Final = "served"
START_DEADLINE_S: Final = 600.0
STOP_DEADLINE_S: Final = 90.0
SETTLE_S: Final = 1.0  # between turns
PROMPT_TOKENS: Final = 16
MIN_REQUESTS: Final = 12  # of all streams in a turn: fewer first tokens say little
ALONE, SCORED, UNSCORED = "vLLM alone", "clairai", "clairai, no scores"
_TIMES: Final = ("first_p50_ms", "first_p99_ms", "token_p50_ms", "token_p99_ms")
_LISTED: Final = ("engine core", "API server", "proxy", "completion process")
_LOGGED: Final = re.compile(r"\((APIServer|EngineCore|Worker)(?:_\w+)? pid=(\d+)\)", re.IGNORECASE)
_LOGGED_ROLES: Final = {"apiserver": "API server", "enginecore": "engine core", "worker": "worker"}
_CLAIRAI: Final = (sys.executable, "-m", "clairai.cli")
_COMMON: Final = ("--served-model-name", NAME, "--no-enable-prefix-caching")
_GPU: Final = (
    *("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "4096"),
    *("--max-num-seqs", "256", "--max-num-batched-tokens", "8192"),
    # Several engines beside each other: a bound on the cache, and not a part of the memory.
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(8 << 30)),
)
_CPU: Final = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
_CPU_ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}


@dataclass(frozen=True)
class Service:
    """A server that runs, and the process whose descendants do its work."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline_s:
            with (
                suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as answer,  # noqa: S310
            ):
                if answer.status == 200:
                    return
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
                raise RuntimeError(f"it ended by itself:\n{self.log.read_text()[-4000:]}")
        raise RuntimeError(f"not ready in {START_DEADLINE_S} s:\n{self.log.read_text()[-4000:]}")


def model_folder(shape: str | None, target: Path) -> Path:
    """A shape with a tokenizer and no weights; None: the demo's model."""
    if shape is None:
        from clairai.demo.model import smollm2

        return smollm2()
    target.mkdir()
    shutil.copy(SHAPES / shape / "config.json", target)
    write_tokenizer(target)
    return target


def write_probes(model: Path, folder: Path, count: int) -> None:
    """`count` probes in the middle of the model; a sum of random numbers is as dear as any."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    width, point = config["hidden_size"], Point("post_block", config["num_hidden_layers"] // 2)
    rng = np.random.default_rng(0)
    for at in range(count):
        direction_D = rng.standard_normal(width, dtype=np.float32) / width**0.5
        probe = Probe(f"probe-{at}", point, direction_D, activation="sigmoid", threshold=0.5)
        save(folder / f"{at}.safetensors", probe)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int, log: Path, **variables: str) -> Iterator[Service]:
    """The command, which is starting; it is ended by Ctrl-C."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield Service(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def serving(options: argparse.Namespace, api_servers: int, work: Path) -> Iterator[dict[str, Any]]:
    """vLLM alone and clairai with the same model and options: by way, the service and the body."""
    model = work / "model" if options.shape else model_folder(None, work)
    given = [*_COMMON, *(_CPU if is_cpu_build() else _GPU)]
    given += ["--api-server-count", str(api_servers)] if api_servers > 1 else []
    given += options.vllm or []
    variables = _CPU_ENVIRONMENT if is_cpu_build() else {}
    ports = _free_port(), _free_port()
    alone = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    alone += [*given, "--host", "127.0.0.1", "--port", str(ports[0])]
    alone += ["--disable-uvicorn-access-log"]
    ours = [*_CLAIRAI, "serve", str(model), "--port", str(ports[1])]
    ours += ["--completion-processes", str(max(options.completion_processes[0], api_servers))]
    ours += ["--probes", str(work / "probes"), "--vllm-log", "-", "--", *given]
    runtime = work / f"run-{api_servers}"
    runtime.mkdir(mode=0o700)
    variables_of_ours = {**variables, "CLAIRAI_RUNTIME_DIR": str(runtime)}
    logs = [options.out / f"{name}-{api_servers}.log" for name in ("alone", "clairai")]
    with ExitStack() as opened:
        first = opened.enter_context(
            running(alone, ports[0], logs[0], **{**variables, "VLLM_PLUGINS": ""})
        )
        second = opened.enter_context(running(ours, ports[1], logs[1], **variables_of_ours))
        first.wait_ready()
        second.wait_ready()
        body = make_body(options.tokens, is_shape=options.shape is not None)
        scored = {**body, "clairai": {}}
        ways: dict[str, Any] = {ALONE: (first, body), SCORED: (second, scored)}
        for count in options.completion_processes[1:] if api_servers == 1 else ():
            log = options.out / f"proxy-{api_servers}-{count}.log"
            proxy = opened.enter_context(another_proxy(runtime, count, log))
            proxy.wait_ready()
            ways[f"{SCORED}, {count} completion processes"] = (proxy, scored)
        yield {**ways, UNSCORED: (second, body)} if options.unscored else ways


@contextmanager
def another_proxy(runtime: Path, completion_processes: int, log: Path) -> Iterator[Service]:
    """One more proxy before the engine that `clairai serve` has started."""
    (upstream,) = runtime.glob("*/api.sock")
    port = _free_port()
    command = [*_CLAIRAI, "proxy", "--upstream", f"unix:{upstream}", "--port", str(port)]
    command += ["--runtime-dir", str(runtime)]
    command += ["--completion-processes", str(completion_processes)]
    with running(command, port, log) as service:
        yield service


def make_body(tokens: int, *, is_shape: bool) -> dict[str, Any]:
    words = (f"t{100 + at}" for at in range(PROMPT_TOKENS))
    content = " ".join(words) if is_shape else "Tell me a long story about a lighthouse."
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def roles_in_log(log: str) -> dict[int, str]:
    """What each process is by the name under which vLLM lets it log."""
    found = _LOGGED.findall(log)
    return {int(pid): _LOGGED_ROLES[name.lower()] for name, pid in found}


def cpu_by_role(service: Service) -> Counter[str]:
    """Seconds that the processes of a service have used so far."""
    used: Counter[str] = Counter()
    logged = roles_in_log(service.log.read_text(errors="replace"))
    roles: dict[int, str] = {}
    for pid, parent in find_tree(service.process.pid).items():
        with suppress(OSError):
            folder = Path(f"/proc/{pid}")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            roles[pid] = logged.get(pid) or find_role(command, roles.get(parent, ""))
            used[roles[pid]] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # type: ignore[assignment]
    return used


def one_turn(
    way: str, service: Service, body: dict[str, Any], streams: int, options: argparse.Namespace
) -> dict[str, Any]:
    before = cpu_by_role(service)
    seen = run_load(
        service.url,
        body,
        streams=streams,
        requests=max(options.requests, math.ceil(MIN_REQUESTS / streams)),
        tokens=options.tokens,
        processes=options.processes,
    )
    after = cpu_by_role(service)
    found = {"way": way, "streams": streams, **summary(seen, after, before)}
    if way.startswith(SCORED) and way != UNSCORED and seen.scores < seen.expected:
        found["faults"].append(f"{seen.scores} of {seen.expected} rows of scores have come")
    print(json.dumps(found), flush=True)
    with (options.out / "turns.jsonl").open("a") as lines:  # a run that is cut short counts too
        lines.write(json.dumps(found) + "\n")
    return found


def summary(seen: Seen, after: Counter[str], before: Counter[str]) -> dict[str, Any]:
    """One turn in numbers."""
    first, token = (np.array(one or [np.nan]) for one in (seen.first_ms, seen.token_ms))
    seconds = max(1e-9, (seen.ended_ns - seen.begun_ns) / 1e9)
    used = {role: after[role] - before[role] for role in after}
    return {
        "tokens_per_s": round(seen.tokens / seconds, 1),
        "first_p50_ms": round(float(np.percentile(first, 50)), 2),
        "first_p99_ms": round(float(np.percentile(first, 99)), 2),
        "token_p50_ms": round(float(np.percentile(token, 50)), 3),
        "token_p99_ms": round(float(np.percentile(token, 99)), 3),
        "tokens": seen.tokens,
        "seconds": round(seconds, 3),
        "scores": seen.scores,
        "scores_expected": seen.expected,
        "cpu_s": {role: round(value, 2) for role, value in used.items()},
        "cpu_us": {role: round(1e6 * v / max(1, seen.tokens), 1) for role, v in used.items()},
        "clients_cpu_s": round(seen.cpu_s, 2),
        "faults": seen.faults,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        work = Path(name)
        folder = model_folder(options.shape, work / "model")
        write_probes(folder, work / "probes", options.probes)
        with ExitStack() as opened:
            for api_servers, ways in start_all(options, work, opened).items():
                found += [{"api_servers": api_servers, **turn} for turn in _turns(ways, options)]
    return found


def start_all(
    options: argparse.Namespace, work: Path, opened: ExitStack
) -> dict[int, dict[str, Any]]:
    """Services by their number of API servers, started at the same time: a start takes minutes."""
    with ThreadPoolExecutor(len(options.api_servers)) as pool:
        starting = {count: serving(options, count, work) for count in options.api_servers}
        entering = {
            count: pool.submit(opened.enter_context, one) for count, one in starting.items()
        }
        return {count: each.result() for count, each in entering.items()}


def _turns(ways: dict[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every way in turn, and in the opposite order the next time; the first ones only warm up."""
    warm = argparse.Namespace(**{**vars(options), "requests": 1})
    for streams in options.streams:
        for way, (service, body) in ways.items():
            one_turn(f"warm-up of {way}", service, body, streams, warm)
        for at in range(options.turns):
            for way in list(ways)[:: 1 if at % 2 == 0 else -1]:
                service, body = ways[way]
                yield {"turn": at, **one_turn(way, service, body, streams, options)}
                time.sleep(SETTLE_S)


def medians(turns: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each number over the turns of one way and one number of streams."""
    keys = ("tokens_per_s", *_TIMES)
    found = {key: float(np.median([turn[key] for turn in turns])) for key in keys}
    for role in _LISTED:
        found[role] = float(np.median([turn["cpu_us"].get(role, 0.0) for turn in turns]))
    return found


def as_markdown(found: Sequence[dict[str, Any]]) -> str:
    """A table: medians over the turns, and in brackets what they are of vLLM alone."""
    lines = [
        "| API servers | streams | way | tokens/s | first token p50, ms | p99 | ms a token, p50 "
        "| p99 | CPU us a token: core | API servers | proxy | completion processes |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    keys = dict.fromkeys((one["api_servers"], one["streams"], one["way"]) for one in found)
    alone: dict[str, float] = {}
    for servers, streams, way in keys:
        same = [
            one
            for one in found
            if (one["api_servers"], one["streams"], one["way"]) == (servers, streams, way)
        ]
        here = medians(same)
        alone = here if way == ALONE else alone
        speed = here["tokens_per_s"]
        cells = [f"{speed:,.0f} ({speed / alone['tokens_per_s']:.3f})"]
        cells += [f"{here[key]:.2f} ({here[key] / alone[key]:.2f})" for key in _TIMES]
        cells += [f"{here[role]:.0f}" for role in _LISTED]
        lines.append(f"| {servers} | {streams} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = _parse(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    found = measure(options)
    about = {
        "command": " ".join(sys.argv[1:]),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "turns": found,
    }
    (options.out / "serving.json").write_text(json.dumps(about, indent=1) + "\n")
    (options.out / "serving.md").write_text(as_markdown(found))
    print(as_markdown(found))
    faults = [fault for one in found for fault in one["faults"]]
    for fault in faults[:20]:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.serving_load", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--requests", type=int, default=3, help="of each stream in a turn, at least"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--api-servers", type=int, nargs="+", default=[1])
    parser.add_argument("--completion-processes", type=int, nargs="+", default=[1])
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 4))
    parser.add_argument("--shape", default=None if is_cpu_build() else "llama-3.1-8b")
    parser.add_argument("--unscored", action="store_true", help="also through it without scores")
    parser.add_argument("--vllm", nargs=argparse.REMAINDER, help="last: more options of vLLM")
    parser.add_argument("--out", type=Path, default=Path("build/serving"))
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
