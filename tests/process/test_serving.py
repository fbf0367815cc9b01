"""Every way in which `clairai serve` can end, with a toy in the place of vLLM.

Nothing may be left: no process, no socket, no folder.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from clairai.launch import process_guard, proxy_thread
from tests.process.served import KEY, NUM_FILES, Serve, Served, until
from tests.process.served import serve as serve

pytestmark = pytest.mark.timeout(240)

QUICK_S = 30.0  # it takes one or two; an engine that does not obey has more than this
CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": "toy"}
EXPECTED = [[72.0, 4.0], [105.0, 5.0], [None, None]]  # tests/http/fake.py: token id, position


def _check_scores(served: Served) -> None:
    """Scores come with an answer through the whole chain.

    On a machine that is too busy to read a row in time its scores are lost: never wrong.
    """

    def is_whole() -> bool:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = CHAT | {"clairai": {"probes": "all"}}
        url = f"{served.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        found = answer.json()["choices"][0]["probe_scores"]
        for scores, expected in zip(found["scores"], EXPECTED, strict=True):
            assert scores in (expected, [None, None])
        return bool(found["scores"] == EXPECTED)

    until(is_whole)


def test_the_proxy_answers_while_the_engine_starts_and_everything_ends(
    serve: Serve,
) -> None:
    served = serve(behaviour="slow", CLAIRAI_API_KEY=KEY)
    starting = served.await_status("starting")
    assert starting["reason"].startswith("the engine is ")
    assert served.get("/health").status_code == 503
    served.gate.touch()
    served.await_ready()
    assert f"toy is served on {served.url}" in served.said()
    _check_scores(served)
    assert served.get("/v1/models", key="wrong").status_code == 401
    assert 'clairai_generated_score_count{probe="token"}' in served.get("/metrics").text
    folders = [entry for entry in served.runtime.iterdir() if entry.is_dir()]
    assert [folder.stat().st_mode & 0o777 for folder in (served.runtime, *folders)] == [0o700] * 2
    _check_key_is_hidden(served)
    asked = Path(f"/proc/{served.server_pid()}/cmdline").read_text().split("\0")
    assert asked[asked.index("--served-model-name") + 1] == "toy"  # and not its path
    soft, hard = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, proxy_thread.NUM_FILES) > NUM_FILES
    assert served.end() < QUICK_S
    assert served.process.returncode == 0
    served.check_nothing_left()
    assert KEY not in served.said()
    assert "cannot be attached" not in served.said()  # a ring that goes as it should is no news


def _check_key_is_hidden(served: Served) -> None:
    """The key is in no command line, and in no environment but the command's own."""
    for pid in (served.process.pid, *served.engine_pids()):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in served.engine_pids():
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_signal_during_the_start_ends_everything(serve: Serve) -> None:
    served = serve(behaviour="slow,deaf")
    served.await_status("starting")
    until(served.engine_pids)
    assert served.end(signal.SIGTERM) < QUICK_S
    assert served.process.returncode == 0
    served.check_nothing_left()


def test_a_second_ctrl_c_kills_what_has_not_ended(serve: Serve) -> None:
    served = serve(behaviour="deaf")
    served.await_ready()
    server = served.server_pid()
    served.process.send_signal(signal.SIGINT)
    until(lambda: "Ctrl-C once more" in served.said())
    stopping_s = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        served.process.wait(0.8)  # signals at the same moment count as one
    served.process.send_signal(signal.SIGINT)
    until(lambda: not Path(f"/proc/{server}").exists())
    # It ignores SIGTERM: without the second signal it would have so long.
    assert time.monotonic() - stopping_s < process_guard.TERM_S
    served.process.wait(60)
    assert served.process.returncode == 0
    served.check_nothing_left()


def test_nothing_is_left_when_the_command_is_killed(serve: Serve) -> None:
    served = serve(behaviour="parent")
    served.await_ready()
    assert len(served.engine_pids()) == 3
    served.process.kill()
    served.process.wait()
    served.check_nothing_left()


def test_an_engine_that_dies_ends_everything_with_a_reason_and_its_exit_code(
    serve: Serve,
) -> None:
    served = serve()
    served.await_ready()
    os.kill(served.server_pid(), signal.SIGKILL)
    served.process.wait(60)
    assert served.process.returncode == 3
    assert "error: vLLM was killed by SIGKILL" in served.said()
    served.check_nothing_left()


def test_an_engine_that_dies_is_started_again_and_scores_come_from_the_new_one(
    serve: Serve,
) -> None:
    served = serve("--on-death", "restart", "--log-format", "json")
    served.await_ready()
    first = served.get("/v1/clairai").json()["epoch"]
    _check_scores(served)
    os.kill(served.server_pid(), signal.SIGKILL)
    gone = served.await_status("starting")
    assert "/" not in gone["reason"]
    until(lambda: served.said().count("is served on") == 2)
    served.await_status("ready")
    assert served.get("/v1/clairai").json()["epoch"] != first
    _check_scores(served)
    served.end(signal.SIGHUP)
    assert served.process.returncode == 0
    served.check_nothing_left()
    lines = [json.loads(line) for line in served.said().splitlines()]
    ended = [line for line in lines if line["message"] == "completion"]
    assert len(ended) >= 2
    assert {(line["status"], line["outcome"], line["tokens"]) for line in ended} == {
        (200, "done", 3)
    }


def test_an_engine_that_cannot_start_is_not_tried_again(serve: Serve) -> None:
    served = serve("--on-death", "restart", behaviour="broken")
    served.process.wait(60)
    assert served.process.returncode == 3
    assert "cause: ValueError: planted" in served.said()
    assert served.said().count("starting vLLM") == 1
    served.check_nothing_left()


def test_a_proxy_attaches_to_an_engine_started_in_another_way(serve: Serve) -> None:
    served = serve()
    served.await_ready()
    (engine,) = served.runtime.glob("s-*/api.sock")
    shown = serve(command=("proxy", "--upstream", f"unix:{engine}"))
    assert shown.await_status("ready")["model"] == "toy"
    _check_scores(shown)
    assert shown.end() < QUICK_S
    assert shown.process.returncode == 0
    assert f"unix:{engine} is shown on {shown.url}" in shown.said()
    assert served.health()["status"] == "ready"  # it is not the proxy's to end


def test_a_port_in_use_is_reported_and_nothing_is_started(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        served = serve(port=taken.getsockname()[1])
        served.process.wait(60)
    assert served.process.returncode == 1
    assert "choose another with --port" in served.said()
    assert "starting vLLM" not in served.said()
    served.check_nothing_left()
