"""`clairai serve` in a process of its own, with probes that name the token of a row."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from clairai.local.private_socket import socket_path
from clairai.probe.files import save
from clairai.probe.model import Probe
from clairai.ring.attach import RingReader
from tests.engine import attribution
from tests.engine import server as parts
from tests.support.ring_engine import until

READY_S: Final = 600.0


class Served(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str  # the proxy's
    runtime: Path
    output: Path
    model: Path
    vocabulary_VD: NDArray[np.float32]

    def said(self) -> str:
        return self.output.read_text()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=parts.DEADLINE_S, trust_env=False)

    def engine(self) -> httpx.AsyncClient:
        """vLLM itself, past the proxy: only there may a caller choose a stream."""
        (path,) = self.runtime.glob("*/api.sock")
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(path)),
            base_url="http://engine",
            timeout=600.0,
        )

    def rings(self) -> list[RingReader]:
        with self.client() as client:
            cores = client.get("/v1/clairai").json()["cores"]
        paths = [socket_path(self.runtime, int(core["epoch"], 16)) for core in cores]
        return [RingReader.attach(path, start="newest") for path in paths]


def _embeddings(model: Path) -> NDArray[np.float32]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return np.asarray(file.get_tensor("model.embed_tokens.weight").float().numpy())


@contextmanager
def serving(
    model: Path,
    scratch: Path,
    options: Sequence[str],
    environment: Mapping[str, str],
    more: Sequence[Probe] = (),
    ours: Sequence[str] = (),
) -> Iterator[Served]:
    """Serve the model with the probes of attribution and `more`.

    `options` are vLLM's, and `ours` those of `clairai serve`.
    """
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    vocabulary_VD = _embeddings(model)
    probes = scratch / "probes"
    probes.mkdir()
    for probe in (*attribution.probes(attribution.projections(vocabulary_VD)), *more):
        save(probes / f"{probe.name.replace(':', '-')}.safetensors", probe)
    port, output = parts.free_port(), scratch / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "clairai.cli", "serve", str(model)),
                *("--port", str(port), "--probes", str(probes), "--vllm-log", "-"),
                *ours,
                "--",
                *options,
            ],
            env={**os.environ, **parts.CPU, **environment, "CLAIRAI_RUNTIME_DIR": str(runtime)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    found = Served(process, url, runtime, output, model, vocabulary_VD)
    try:

        def is_served() -> bool:
            assert process.poll() is None, found.said()[-4000:]
            return f"is served on {url}" in found.said()

        until(is_served, READY_S)
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(parts.DEADLINE_S)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(runtime)
