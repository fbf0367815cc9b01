"""A real vLLM server with taps, and a real sidecar that was started first."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import httpx
import numpy as np
from openai import OpenAI

from clairai.launch.engine_command import EngineCommand, ListenAddress
from clairai.library.config import config
from clairai.points import Point
from clairai.probe.files import save
from clairai.probe.model import Probe
from tests.support.ring_engine import until

MODEL: Final = "SmolLM2-135M-Instruct"
NAMED: Final = ("--served-model-name", MODEL)
KEY: Final = "a-key-for-tests"
WIDTH: Final = 576
MAX_LEN: Final = 8192
ENDLESS: Final = 8000  # tokens of an answer that goes on until its client hangs up
DEADLINE_S: Final = 300.0

CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def probe(name: str, *, layer: int = 3, seed: int = 0) -> Probe:
    direction_D = np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
    return Probe(name, Point("post_block", layer), direction_D, activation="sigmoid", threshold=0.5)


def free_port() -> int:
    """Not one that the kernel gives to whoever asks for any: a server needs long to take it."""
    while True:
        port = secrets.choice(range(20_000, 32_768))
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def launch(model: Path, runtime: Path, probes: Path) -> EngineCommand:
    """Two probes and room for three, so that a test can fill the bank; captures lie beside them."""
    save(probes / "first.safetensors", probe("first", seed=1))
    save(probes / "second.safetensors", probe("second", seed=2))
    return EngineCommand(
        str(model),
        config(
            probes=probes,
            capacity=3,
            capture={"folder": str(probes.parent / "captures")},
            runtime_dir=str(runtime),
        ),
        ListenAddress(port=free_port(), api_key=KEY),
        (*NAMED, "--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LEN)),
        CPU,
    )


def client(url: str, key: str = KEY) -> OpenAI:
    """Without retries: a request that fails has failed."""
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)


CHAT: Final[list[Any]] = [
    {"role": "user", "content": "Name three rivers."},
    {"role": "assistant", "content": "Rhine, Danube and Elbe."},
    {"role": "user", "content": "And one more?"},
]


def captured(sdk: OpenAI, positions: Any, **more: Any) -> Any:
    """An answer to the chat, some of whose rows are kept."""
    wish = {"positions": positions, "encoder": "full8", "tags": {"chat": 1}}
    xargs = {"clairai": json.dumps({"capture": wish})}
    body = {"return_token_ids": True, "vllm_xargs": xargs, "ignore_eos": True}
    return sdk.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=5, extra_body=body, **more
    )


def rows_of(url: str, handle: dict[str, Any], **headers: str) -> httpx.Response:
    return _get(f"{url}/v1/captures/{handle['id']}", **headers)


def settled(url: str, handle: dict[str, Any]) -> dict[str, Any]:
    """What became of a capture; on a busy machine its rows are safe only after the response."""
    assert handle["state"] in ("open", "writing", "kept"), handle
    found: dict[str, Any] = {}

    def is_settled() -> bool:
        listed = _get(f"{url}/v1/captures").json()["data"]
        (one,) = [one for one in listed if one["id"] == handle["id"]]
        found.update(one)
        return one["state"] not in ("open", "writing")

    until(is_settled, DEADLINE_S)
    return found


def _get(url: str, **headers: str) -> httpx.Response:
    sent = {"Authorization": f"Bearer {KEY}", **headers}
    return httpx.get(url, headers=sent, timeout=DEADLINE_S, trust_env=False)


class Sidecar:
    """`clairai sidecar --json --events` as a user runs it, its lines kept in a file."""

    def __init__(self, runtime: Path, folder: Path) -> None:
        self._out, self._err = folder / "sidecar.out", folder / "sidecar.err"
        command = [sys.executable, "-m", "clairai.cli", "sidecar", "--json", "--events"]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--runtime-dir", str(runtime)], stdout=out, stderr=err
            )

    def lines(self) -> list[dict[str, Any]]:
        whole, _, _ = self._out.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def rows(self, stream: int) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("stream") == stream and "scores" in line]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("event") == kind]

    def said(self) -> str:
        return self._err.read_text()

    def await_end(self, stream: int) -> list[dict[str, Any]]:
        """The stream's rows, once the engine has said that there are no more."""
        self.until(lambda: any(end["stream"] == stream for end in self.events("finished")))
        return self.rows(stream)

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, DEADLINE_S)

    def __enter__(self) -> Self:
        self.until(lambda: "waiting for an engine" in self.said())
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
