"""`clairai demo` as a user runs it: it starts, dies, starts again and ends with Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from clairai.demo.model import NAME
from clairai.launch import process_guard
from tests.engine import server as parts
from tests.support.ring_engine import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

READY_S = 600.0
END_S = 120.0  # it ends by itself, and is not killed
NUM_TOKENS = 12
STEERED_TOKENS = 24
STOPPED_TOKENS = 6  # five that cross, and the one sampled with the last score
PROBES = {"code", "french", "maths", "negative_sentiment", "question", "refusal"}


class Demo(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str
    runtime: Path
    output: Path

    def said(self) -> str:
        return self.output.read_text()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=parts.DEADLINE_S, trust_env=False)

    def await_served(self, times: int) -> None:
        def is_served() -> bool:
            assert self.process.poll() is None, self.said()
            return self.said().count(f"is served on {self.url}") == times

        until(is_served, READY_S)
        health = self.get("/health").json()
        assert (health["status"], health["reason"], health["model"]) == ("ready", None, NAME)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    output = tmp_path_factory.mktemp("demo") / "output"
    port = parts.free_port()
    options = ["--port", str(port), "--on-death", "restart", "--log-format", "json"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "clairai.cli", "demo", *options],
            env=os.environ | {"CLAIRAI_RUNTIME_DIR": str(runtime)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    yield Demo(process, f"http://127.0.0.1:{port}", runtime, output)
    process.kill()
    process.wait()
    until(lambda: not _processes_of(runtime), END_S)
    shutil.rmtree(runtime)


def _ask(demo: Demo) -> tuple[str, list[dict[str, Any]]]:
    """A streamed answer by the official SDK, and its scores."""
    texts, scores = [], []
    with parts.client(demo.url) as sdk:
        stream = sdk.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Write a loop in Python."}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"clairai": {"probes": "all"}, "ignore_eos": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                texts.append(choice.delta.content or "")
                scores.append(getattr(choice, "probe_scores", None) or {})
    return "".join(texts), [score for score in scores if score]


def _check_scores(demo: Demo) -> None:
    """Every generated token once, in order; the last has no scores.

    A machine too busy to read a row in time reports it as lost; then it is asked again.
    """

    def is_whole() -> bool:
        text, scores = _ask(demo)
        assert text
        assert {name for score in scores for name in score["names"]} == PROBES
        rows = [row for score in scores for row in score["scores"]]
        starts = [score["start"] for score in scores]
        assert starts == [sum(len(s["scores"]) for s in scores[:i]) for i in range(len(scores))]
        assert len(rows) == NUM_TOKENS
        assert rows[-1] == [None] * len(PROBES)
        missing = [row for row in rows[:-1] if row == [None] * len(PROBES)]
        assert len(missing) == sum(score.get("lost", 0) for score in scores)
        found = [row for row in rows[:-1] if row not in missing]
        assert all(math.isfinite(value) for row in found for value in row)
        return not missing

    until(is_whole, parts.DEADLINE_S)


def test_the_demo_streams_scores_with_openais_chunks(demo: Demo) -> None:
    until(lambda: _status(demo) == "starting", READY_S)
    demo.await_served(1)
    _check_scores(demo)
    assert {info["name"] for info in demo.get("/v1/probes").json()["data"]} == PROBES


def test_a_vector_of_the_demo_moves_its_probe_and_its_text_with_its_scale(demo: Demo) -> None:
    listed = demo.get("/v1/steering/vectors").json()["data"]
    (vector,) = [one for one in listed if one["name"] == "positive_sentiment"]
    found = [_steered(demo, factor * vector["scale"]) for factor in (-1, 0, 1)]
    scores = [score for score, _ in found]
    assert scores == sorted(scores, reverse=True)  # of negative_sentiment
    assert scores[0] - scores[-1] > 0.3
    assert len({text for _, text in found}) == len(found)


def _steered(demo: Demo, scale: float) -> tuple[float, str]:
    """The mean score of an answer, and its text."""
    entry = {"vector": "positive_sentiment", "scale": scale}
    with parts.client(demo.url) as sdk:
        answer = sdk.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Tell me about your day at the beach."}],
            max_tokens=STEERED_TOKENS,
            temperature=0,
            extra_body={
                "clairai": {"probes": ["negative_sentiment"], "steer": [entry]},
                "ignore_eos": True,
            },
        )
    (choice,) = answer.choices
    assert choice.model_extra is not None
    assert answer.model_extra is not None
    assert [one["scale"] for one in answer.model_extra["clairai"]["steering"]] == (
        [scale] if scale else []
    )
    rows = [row for row in choice.model_extra["probe_scores"]["scores"] if row != [None]]
    return float(sum(score for (score,) in rows) / len(rows)), choice.message.content or ""


def test_an_answer_of_the_demo_is_stopped_by_a_probe(demo: Demo) -> None:
    rule = {"probe": "code", "threshold": 0.0, "tokens": 5}
    with parts.client(demo.url) as sdk:
        stream = sdk.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Write a loop in Python."}],
            max_tokens=40,
            temperature=0,
            stream=True,
            extra_body={"clairai": {"probes": "all", "stop": [rule]}, "ignore_eos": True},
        )
        choices = [choice for chunk in stream for choice in chunk.choices]
    last = choices[-1]
    assert last.finish_reason == "stop"
    assert last.model_extra is not None
    assert last.model_extra["stop_reason"] == "clairai: probe code >= 0 for 5 tokens"
    scored = [(choice.model_extra or {}).get("probe_scores") for choice in choices]
    assert sum(len(scores["scores"]) for scores in scored if scores) == STOPPED_TOKENS


def _status(demo: Demo) -> str:
    try:
        return str(demo.get("/health").json()["status"])
    except httpx.TransportError:
        return "silent"


def test_the_engines_server_listens_only_in_a_private_folder(demo: Demo) -> None:
    """Only its workers listen, for each other: the ports of torch.distributed."""
    assert _tcp_ports(_server(demo)) == set()
    assert _tcp_ports(demo.process.pid) == {int(demo.url.rpartition(":")[2])}
    (folder,) = [entry for entry in demo.runtime.iterdir() if entry.is_dir()]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "api.sock").is_socket()


def _tcp_ports(pid: int) -> set[int]:
    """Where this process listens."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except OSError:
            continue
    table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    table += Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    listening = [line.split() for line in table if line.split()[3] == "0A"]
    mine = [words for words in listening if f"socket:[{words[9]}]" in sockets]
    return {int(words[1].rpartition(":")[2], 16) for words in mine}


def test_the_metrics_count_what_was_generated(demo: Demo) -> None:
    lines = demo.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['clairai_generated_score_count{probe="code"}']) >= NUM_TOKENS - 1
    assert float(values["clairai_score_lag_seconds_count"]) > 0
    assert float(values["clairai_ring_attached"]) == 1
    assert float(values["clairai_rows_mismatched_total"]) == 0


def test_an_engine_that_is_killed_comes_back_and_is_read_again(demo: Demo) -> None:
    first = demo.get("/v1/clairai").json()["epoch"]
    os.kill(_core(demo), signal.SIGKILL)
    until(lambda: _status(demo) == "starting", parts.DEADLINE_S)
    with parts.client(demo.url) as sdk, pytest.raises(openai.APIStatusError) as caught:
        sdk.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.status_code == 503
    demo.await_served(2)
    assert demo.get("/v1/clairai").json()["epoch"] != first
    _check_scores(demo)


def _server(demo: Demo) -> int:
    """vLLM's API server: the guard's child."""
    parent_of = process_guard._parent_pids()
    (guard,) = [pid for pid in _processes_of(demo.runtime) if parent_of[pid] == demo.process.pid]
    children = [pid for pid in _processes_of(demo.runtime) if parent_of[pid] == guard]
    (server,) = [pid for pid in children if not process_guard.is_capture_writer(pid)]
    return server


def _core(demo: Demo) -> int:
    """The engine core: the server's child that is not the resource tracker."""
    children = [
        pid for pid, parent in process_guard._parent_pids().items() if parent == _server(demo)
    ]
    (core,) = [pid for pid in children if not process_guard.is_tracker(pid)]
    return core


def test_ctrl_c_ends_all_of_it_and_leaves_nothing(demo: Demo) -> None:
    before = len(demo.said())
    demo.process.send_signal(signal.SIGINT)
    demo.process.wait(END_S)
    assert "warning" not in demo.said()[before:].lower()
    assert demo.process.returncode == 0
    assert _processes_of(demo.runtime) == []
    assert [entry.name for entry in demo.runtime.iterdir() if "vllm-" not in entry.name] == []
    lines = [json.loads(line) for line in demo.said().splitlines()]
    ended = [line for line in lines if line["message"] == "completion"]
    tokens = [line["tokens"] for line in ended if line["outcome"] == "done"]
    assert {*tokens} == {NUM_TOKENS, STEERED_TOKENS, STOPPED_TOKENS}
    stopped = [line["stopped"] for line in ended if line["tokens"] == STOPPED_TOKENS]
    assert stopped == ["code"]


def _processes_of(runtime: Path) -> list[int]:
    """Processes that run for this test's folder, without the command itself."""
    mark = "VLLM_PLUGINS="  # set for the engine alone
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_text(errors="replace")
        except OSError:
            continue
        if str(runtime) in environ and mark in environ:
            found.append(int(folder.name))
    return sorted(found)
