"""Runs `clairai serve` as a user does, with a toy in the place of vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.launch import process_guard
from tests.process import toy_vllm
from tests.support.ring_engine import until as until_within

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-that-must-not-be-seen"


def until(condition: Callable[[], object]) -> None:
    """Patient: these are whole programs, and the machine may be busy."""
    until_within(condition, 60.0)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Served:
    """One `clairai serve`, its output in a file."""

    process: subprocess.Popen[bytes]
    url: str
    runtime: Path
    output: Path
    gate: Path

    def said(self) -> str:
        return self.output.read_text()

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=20, trust_env=False)

    def health(self) -> dict[str, Any]:
        """None of it while nobody listens."""
        try:
            return dict(self.get("/health", key="").json())
        except httpx.TransportError:
            return {"status": "silent"}

    def await_status(self, status: str) -> dict[str, Any]:
        until(lambda: self.health()["status"] == status or self._is_over())
        return self.health()

    def await_ready(self) -> None:
        until(lambda: "is served on" in self.said() or self._is_over())
        assert self.health()["status"] == "ready", self.said()

    def _is_over(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"it ended ({self.process.returncode}): {self.said()}")
        return False

    def engine_pids(self) -> list[int]:
        """Every process of the engine, the guard first."""
        mark = f"TOY_GATE={self.gate}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return sorted(set(found) - {self.process.pid})

    def server_pid(self) -> int:
        """The toy server itself, the guard's child."""
        parent_of = process_guard._parent_pids()
        (guard,) = [pid for pid in self.engine_pids() if parent_of[pid] == self.process.pid]
        (server,) = [pid for pid in self.engine_pids() if parent_of[pid] == guard]
        return server

    def end(self, number: signal.Signals = signal.SIGINT) -> float:
        """Ask it to stop; how long that took."""
        began_s = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - began_s

    def check_nothing_left(self) -> None:
        """No process and no file but the log."""
        until(lambda: not self.engine_pids())
        left = [entry.name for entry in self.runtime.iterdir()]
        assert [name for name in left if not name.startswith("vllm-")] == []


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts them; whatever a test did, they are ended after it."""
    packages = toy_vllm.install(tmp_path / "packages")
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 4, "hidden_size": 8}')
    runtime = tmp_path / "r"
    started: list[Served] = []

    def start(
        *options: str,
        behaviour: str = "",
        port: int | None = None,
        command: Sequence[str] = ("serve", str(model), "--points", "post_block.1"),
        **variables: str,
    ) -> Served:
        port = port or free_port()
        gate, output = tmp_path / "gate", tmp_path / f"output-{len(started)}"
        environ = {
            **os.environ,
            "PYTHONPATH": f"{packages}:{ROOT}:{ROOT / 'src'}",
            "CLAIRAI_RUNTIME_DIR": str(runtime),
            "TOY_VLLM": behaviour,
            "TOY_GATE": str(gate),
            **variables,
        }
        program = [sys.executable, "-m", "clairai.cli", *command, "--port", str(port)]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*program, *options],
                env=environ,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        made = Served(process, f"http://127.0.0.1:{port}", runtime, output, gate)
        started.append(made)
        return made

    yield start
    for made in started:
        if made.process.poll() is None:
            made.end(signal.SIGKILL)
        until(lambda made=made: not made.engine_pids())  # type: ignore[misc]
