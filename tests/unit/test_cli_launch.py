"""Takes a Launch; gives vLLM's command line, and a process group that never outlives us."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from clairai.errors import ConfigError, EngineGoneError
from clairai.serve.engine import EngineProcess
from clairai.serve.launch import Bind, Launch, is_loopback
from clairai.serve.log import EngineLog
from tests.process.parts import until

# Stands in for vLLM: a server with a child of its own that does not mind SIGTERM.
SERVER = """
import http.server, os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@dataclass(frozen=True)
class OtherLaunch(Launch):
    program: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        return [sys.executable, "-c", *self.program]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _launch(*program: str, port: int | None = None) -> OtherLaunch:
    return OtherLaunch("m", {}, Bind(port=port or _free_port()), program=program)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_our_settings_and_key_reach_vllm_and_the_key_is_not_on_the_command_line() -> None:
    bind = Bind("0.0.0.0", 7000, "secret")  # noqa: S104
    launch = Launch("m", {"clairai": {"points": ["all"]}}, bind, ("--max-model-len", "9"))
    argv, environ = launch.argv(), launch.environ({"PATH": "p"})
    assert argv[argv.index("--host") + 1] == "0.0.0.0"  # noqa: S104
    config = json.loads(argv[argv.index("--additional-config") + 1])
    assert config == {"clairai": {"points": ["all"]}}
    assert "secret" not in " ".join(argv)
    assert (environ["VLLM_API_KEY"], environ["PATH"]) == ("secret", "p")


def test_naming_our_plugin_leaves_the_others_on() -> None:
    launch = Launch("m", {}, Bind())
    usual = launch.environ({})["VLLM_PLUGINS"].split(",")
    assert {"clairai", "lora_filesystem_resolver", "lora_hf_hub_resolver"} <= {*usual}
    assert launch.environ({"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "clairai,mine"
    assert launch.environ({"VLLM_PLUGINS": ""})["VLLM_PLUGINS"] == "clairai"


@pytest.mark.parametrize(
    "argument",
    ["--host", "--hos=1.2.3.4", "--port=1", "--api_key", "--additional-config.clairai.points=x"],
)
def test_vllm_options_that_are_ours_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="which clairai sets itself"):
        Launch("m", {}, Bind(), (argument,))


@pytest.mark.parametrize("argument", ["--max-model-len", "-tp", "2", "--model-impl=auto", "--"])
def test_other_vllm_options_pass(argument: str) -> None:
    assert argument in Launch("m", {}, Bind(), (argument,)).argv()


def test_loopback_is_known_by_address_and_not_by_how_it_looks() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "127.0.0.1.example.org", "10.0.0.1", "")))  # noqa: S104


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="empty"):
        Bind(api_key="")


def test_a_server_and_its_children_are_gone_after_the_block(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    port = _free_port()
    with EngineProcess(_launch(SERVER, str(child_file), str(port), port=port)) as engine:
        assert engine.wait_ready()
        until(lambda: child_file.exists() and child_file.read_text())
        child = int(child_file.read_text())
        assert _is_running(child)
    assert not engine.is_alive()
    until(lambda: not _is_running(child))


def test_a_server_ends_when_we_are_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import sys; from tests.unit.test_cli_serve import EngineProcess, _launch\n"
        "engine = EngineProcess(_launch('import time; time.sleep(600)'))\n"
        "open(sys.argv[1], 'w').write(str(engine.pid)); engine._process.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(pid_file)])
    until(lambda: pid_file.exists() and pid_file.read_text())
    server = int(pid_file.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not _is_running(server))


def test_a_server_that_dies_tells_its_last_lines_and_its_first_error(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "log")
    program = "print('(EngineCore pid=1) ERROR 01-01 ConfigError: the cause'); raise SystemExit(3)"
    with (
        EngineProcess(_launch(program), log=log) as engine,
        pytest.raises(EngineGoneError) as caught,
    ):
        engine.wait_ready()
    assert "exit code 3" in caught.value.reason
    assert "first error: ConfigError: the cause" in caught.value.reason


def test_waiting_ends_when_told_to() -> None:
    with EngineProcess(_launch("import time; time.sleep(600)")) as engine:
        assert not engine.wait_ready(stop=lambda: True)


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another with --port"):
            EngineProcess(_launch("pass", port=taken.getsockname()[1]))


def test_the_log_says_what_vllm_is_doing_without_its_prefix(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "log")
    assert log.newest() == ""
    log.path.write_text("(EngineCore pid=5) INFO 11-15 03:55:40 [core.py:20] Loading weights\n\n")
    assert log.newest() == "Loading weights"
