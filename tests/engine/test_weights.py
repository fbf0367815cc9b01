"""Takes a real server under 8 streams; gives it other weights and the old ones back.

The reference is an engine that was started with the other weights, and the server's own beginning.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest

from clairai.errors import WeightsError
from clairai.offline import config
from clairai.serve.calls import Server
from clairai.serve.engine import EngineProcess as ServerProcess
from clairai.serve.log import EngineLog
from clairai.steer.files import save
from clairai.weights import Sender
from tests.engine import server as parts
from tests.engine import weighed
from tests.engine.process import EngineProcess
from tests.process.parts import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Answer = tuple[int, ...]
STREAMS = 8
DEADLINE_S = 120.0


class Running(NamedTuple):
    url: str
    model: Path
    other: Path
    runtime: Path
    log: Path


@pytest.fixture(scope="module")
def running(cut_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    scratch = tmp_path_factory.mktemp("weights")
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    other = weighed.perturb(cut_model, scratch / "other" / cut_model.name)
    for name in ("probes", "vectors"):
        (scratch / name).mkdir()
    launch = parts.launch(cut_model, runtime, scratch / "probes")
    save(weighed.vector(), scratch / "vectors" / "calm.safetensors")
    asked = ("--weight-transfer-config", '{"backend": "clairai_ipc"}')
    launch = replace(
        launch,
        arguments=(*launch.arguments, *asked),
        additional_config=config(
            probes=scratch / "probes",
            vectors=scratch / "vectors",
            capacity=3,
            runtime_dir=str(runtime),
        ),
    )
    log = scratch / "vllm.log"
    with ServerProcess(launch, log=EngineLog(log)) as engine:
        assert engine.wait_ready()
        yield Running(launch.bind.url, cut_model, other, runtime, log)
    shutil.rmtree(runtime)


@pytest.fixture(scope="module")
def expected(running: Running, runtime: Path) -> list[Answer]:
    """What an engine answers that was started with the other weights."""
    with EngineProcess(
        runtime=runtime,
        model=str(running.other),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
    ) as engine:
        return [tuple(ids) for ids, _ in engine.call(weighed.answers, weighed.prompts(STREAMS))]


def sender(running: Running) -> Sender:
    return Sender(
        running.url,
        api_key=parts.KEY,
        runtime_dir=str(running.runtime),
        buffer_bytes=32 << 20,
    )


@dataclass
class Client:
    """Asks the same again and again, each answer streamed, until it is told to stop."""

    sdk: openai.OpenAI
    prompt: str
    stop: threading.Event
    answers: list[Answer] = field(default_factory=list)

    def run(self) -> None:
        while not self.stop.is_set():
            self.answers.append(self.ask())

    def ask(self) -> Answer:
        chunks = self.sdk.completions.create(
            model=parts.MODEL,
            prompt=self.prompt,
            max_tokens=weighed.TOKENS,
            temperature=0.0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        found: list[int] = []
        for chunk in chunks:
            for choice in chunk.choices:
                found += getattr(choice, "token_ids", None) or []
        return tuple(found)


def test_eight_streams_see_the_old_weights_or_the_new_and_never_both(
    running: Running, expected: list[Answer]
) -> None:
    stop = threading.Event()
    with parts.client(running.url) as sdk:
        clients = [Client(sdk, prompt, stop) for prompt in weighed.prompts(STREAMS)]
        before = [client.ask() for client in clients]
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        try:
            _await_answers(clients)
            sent = sender(running).send(running.other, label="step-1")
            _await_answers(clients)
            back = sender(running).send(running.model, label="step-2")
            _await_answers(clients)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert (sent.version, back.version) == (1, 2)
    assert sent.digest != back.digest
    for client, old, new in zip(clients, before, expected, strict=True):
        assert old != new
        assert [answer for answer, _ in groupby(client.answers)] == [old, new, old]


def _await_answers(clients: list[Client]) -> None:
    """Each client has had two more answers: the second one was asked for after this began."""
    wanted = [len(client.answers) + 2 for client in clients]
    until(
        lambda: all(len(c.answers) >= n for c, n in zip(clients, wanted, strict=True)), DEADLINE_S
    )


def test_the_server_says_which_weights_serve(running: Running) -> None:
    state = Server(running.url, parts.KEY).weights()
    assert (state["version"], state["label"], state["is_torn"]) == (2, "step-2", False)
    assert state["device"] == "cpu"


def test_the_routes_need_the_key(running: Running) -> None:
    for ask in (Server(running.url).weights, lambda: _post(Server(running.url, "wrong"))):
        with pytest.raises(Exception, match="another API key"):
            ask()


def _post(server: Server) -> Any:
    return server.post_weights("commit", b"{}")


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(running: Running) -> None:
    with parts.client(running.url) as sdk:
        client = Client(sdk, weighed.prompts(1)[0], threading.Event())
        before = client.ask()
        for wrong in weighed.misfits(running.other):
            with pytest.raises(WeightsError):
                sender(running).send(wrong)
        assert client.ask() == before
    assert Server(running.url, parts.KEY).weights()["version"] == 2


def test_a_dry_run_changes_nothing(running: Running) -> None:
    assert sender(running).check(running.other) > 1 << 20
    with pytest.raises(WeightsError, match="nothing named"):
        sender(running).check({"model.nothing": np.zeros(4, np.float32)})
    assert Server(running.url, parts.KEY).weights()["version"] == 2


def test_a_probe_is_replaced_by_its_entry_alone(running: Running) -> None:
    server = Server(running.url, parts.KEY)
    held = server.probes()
    direction_D = np.random.default_rng(77).normal(size=parts.WIDTH).astype(np.float32)
    sent = sender(running).send({"probe::first": direction_D})
    after = server.probes()
    assert sent.version == 2, "the model's weights are the same"
    assert sent.bank_version == after["version"] == held["version"] + 1
    changed = {p["name"] for p, q in zip(after["data"], held["data"], strict=True) if p != q}
    assert changed == {"first"}


def test_a_vector_comes_with_the_weights_it_was_made_for(running: Running) -> None:
    server = Server(running.url, parts.KEY)
    (before,) = server.vectors()["data"]
    rows_PD = np.ones((1, parts.WIDTH), np.float32)
    sent = sender(running).send(weighed.held(running.other) | {"steer::calm": rows_PD})
    (after,) = server.vectors()["data"]
    assert (sent.version, sent.vectors_version) == (3, server.vectors()["version"])
    assert after["digest"] != before["digest"]
    assert after["points"] == before["points"]


def test_the_command_line_pushes_a_folder(running: Running) -> None:
    command = [sys.executable, "-m", "clairai.cli", "weights", "push", str(running.model)]
    where = ["--to", running.url, "--runtime-dir", str(running.runtime)]
    environment = os.environ | {"CLAIRAI_API_KEY": parts.KEY}
    told = [
        subprocess.run(
            [*command, *where, *more], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for more in (["--dry-run"], [])
    ]
    assert told[0].startswith("they would be taken: ")
    assert told[1].startswith("version 4 serves: ")
