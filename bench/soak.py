"""Runs the demo under mixed load for a while, and shows that nothing grows, is lost or mixed up.

Starts `clairai demo` as a user does, with the real CPU engine, and lets several clients chat,
steer, capture, change the banks, vanish, read slowly and send nonsense. Every score is compared
with the captured row of its token. Memory, descriptors and threads of every process are sampled;
after a warm-up they must stay flat. What is seen is written as JSON, CSV, SVG and Markdown.
Run: python -m bench.soak [--minutes 30] [--clients 6] [--out build/soak]
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from bench.soak_clients import SoakClient, Tally
from bench.soak_footprint import Sample, judge_memory, judge_rest, take_samples, write_csv
from bench.soak_graph import draw
from clairai import demo
from clairai.demo.model import NAME, cache_folder
from clairai.probe.files import load_many
from tests.web.server import interrupt

START_DEADLINE_S: Final = 300.0
STOP_DEADLINE_S: Final = 90.0
SAMPLE_S: Final = 5.0
SETTLE_S: Final = 15.0  # until idle connections are closed
WARM_PART: Final = 0.4  # of the time
LONG_PROMPT: Final = 1984  # tokens, a little below the demo's longest
FIRST_TOKEN: Final = 100
TIMEOUT: Final = httpx.Timeout(180.0)
COUNTED: Final = (
    *("clairai_ring_records_lost_total", "clairai_rows_mismatched_total"),
    *("clairai_rows_lost_total", "clairai_capture_rows_lost_total"),
    "clairai_upstream_errors_total",
)


@dataclass
class Course:
    """What was sampled while it ran."""

    begun_s: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    warm_s: float = 0.0
    idle_before: list[Sample] = field(default_factory=list)
    idle_after: list[Sample] = field(default_factory=list)


@contextmanager
def running_demo(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`clairai demo` on a free port; ends it with Ctrl-C, and removes what it captured."""
    port = _free_port()
    output = folder / "demo.log"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "clairai.cli", "demo", "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CLAIRAI_RUNTIME_DIR": str(folder), "HF_HUB_OFFLINE": "1"},
        )
    try:
        _wait_ready(f"http://127.0.0.1:{port}", process, output)
        yield f"http://127.0.0.1:{port}", process
    finally:
        interrupt(process, STOP_DEADLINE_S)
        shutil.rmtree(cache_folder() / f"captures-{port}", ignore_errors=True)


def _free_port() -> int:
    """One whose captures nobody has kept."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        if not (cache_folder() / f"captures-{port}").exists():
            return port


def _wait_ready(url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
            raise RuntimeError(f"the demo ended by itself:\n{output.read_text()[-4000:]}")
    raise RuntimeError(f"the demo was not ready after {START_DEADLINE_S} s")


async def soak(url: str, pid: int, options: argparse.Namespace, tally: Tally) -> Course:
    """A warm-up, a pause, the rest, and a pause; the pauses are what the ends are compared by."""
    probes = load_many(Path(demo.__file__).parent / "probes")
    course = Course()
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False) as http:
        clients = [SoakClient(http, at, NAME, probes, tally) for at in range(options.clients)]
        sampling = asyncio.create_task(_sample(pid, course))
        total_s = 60 * options.minutes
        await _touch_cache(http)
        await _run_clients(clients, WARM_PART * total_s)
        course.idle_before = await _settle(pid, course)
        course.warm_s = time.monotonic() - course.begun_s
        await _run_clients(clients, (1 - WARM_PART) * total_s)
        course.idle_after = await _settle(pid, course)
        sampling.cancel()
        await _check_counters(http, tally)
    return course


async def _touch_cache(http: httpx.AsyncClient) -> None:
    """Use every block of the KV cache once: until then the worker's memory grows."""
    text = (await http.get("/metrics")).text
    num_tokens = 1
    for name in ("num_gpu_blocks", "block_size"):  # of vLLM's own series cache_config_info
        (found,) = set(
            re.findall(rf'^vllm:cache_config_info{{.*\b{name}="(\d+)"', text, re.MULTILINE)
        )
        num_tokens *= int(found)
    for number in range(num_tokens // LONG_PROMPT + 2):
        prompt = [FIRST_TOKEN + number, *[FIRST_TOKEN] * (LONG_PROMPT - 1)]  # none is cached
        body = {"model": NAME, "prompt": prompt, "max_tokens": 1}
        (await http.post("/v1/completions", json=body)).raise_for_status()


async def _run_clients(clients: list[SoakClient], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    running = (client.run_until(lambda: time.monotonic() >= until_s) for client in clients)
    await asyncio.gather(*running)


async def _sample(pid: int, course: Course) -> None:
    while True:
        course.samples += await asyncio.to_thread(take_samples, pid, course.begun_s)
        await asyncio.sleep(SAMPLE_S)


async def _settle(pid: int, course: Course) -> list[Sample]:
    await asyncio.sleep(SETTLE_S)
    return take_samples(pid, course.begun_s)


async def _check_counters(http: httpx.AsyncClient, tally: Tally) -> None:
    """What the service itself counts as lost or mixed up is 0."""
    text = (await http.get("/metrics")).text
    for name in COUNTED:
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        total = sum(map(float, found))
        if not found or total:
            tally.blame(f"{name} is {total if found else 'missing'}")


def make_report(options: argparse.Namespace, tally: Tally, course: Course) -> dict[str, Any]:
    """Everything that was seen; `faults` is empty if all was well."""
    after = [one for one in course.samples if one.at_s >= course.warm_s]
    slopes, memory_faults = judge_memory(after)
    faults = [*tally.faults, *memory_faults, *judge_rest(course.idle_before, course.idle_after)]
    return {
        "minutes": options.minutes,
        "clients": options.clients,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "done": dict(sorted(tally.done.items())),
        "requests": sum(tally.done.values()),
        "tokens": tally.tokens,
        "scores": tally.scores,
        "scores_lost": tally.scores_lost,
        "scores_verified": tally.rows_verified,
        "largest_difference": tally.largest_difference,
        "slopes_mib_per_min": slopes,  # empty: too short to be judged
        "idle_before": [vars(one) for one in course.idle_before],
        "idle_after": [vars(one) for one in course.idle_after],
        "faults": faults,
        "num_faults": tally.num_faults + len(faults) - len(tally.faults),
    }


def as_markdown(report: dict[str, Any]) -> str:
    """A section for docs/numbers.md."""
    before = {one["pid"]: one for one in report["idle_before"]}
    lines = [
        f"`make soak MINUTES={report['minutes']:g}`: {report['clients']} clients at once, "
        f"{report['requests']} things done, {report['tokens']} scored tokens; "
        f"{report['scores_verified']} scores compared with the captured row of their token, "
        f"largest difference {report['largest_difference']:.1e}; {report['scores_lost']} lost, "
        f"{report['num_faults']} faults.",
        "",
        "| process | own memory, idle, MiB | slope, MiB a minute | descriptors | threads |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in report["idle_after"]:
        first = before.get(one["pid"], one)
        slope = report["slopes_mib_per_min"].get(f"{one['role']} ({one['pid']})", "")
        lines.append(
            f"| {one['role']} | {first['anon_kib'] >> 10} to {one['anon_kib'] >> 10} | {slope} "
            f"| {first['descriptors']} to {one['descriptors']} "
            f"| {first['threads']} to {one['threads']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    options = _parse(sys.argv[1:])
    # A shell ignores it for what runs in the background, and the demo would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))  # short enough for a socket
    try:
        with running_demo(folder) as (url, process):
            course = asyncio.run(soak(url, process.pid, options, tally))
        if process.returncode != 0:
            tally.blame(f"the demo ended with {process.returncode}")
    finally:
        for log in folder.rglob("*.log"):  # the demo's own, and vLLM's
            shutil.copy(log, options.out)
        shutil.rmtree(folder, ignore_errors=True)
    report = make_report(options, tally, course)
    (options.out / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "soak.md").write_text(as_markdown(report))
    (options.out / "soak.svg").write_text(draw(course.samples, course.warm_s))
    write_csv(options.out / "soak.csv", course.samples)
    print(as_markdown(report))
    for fault in report["faults"]:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if report["num_faults"] else 0


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
