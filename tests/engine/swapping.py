"""Clients that ask a real server without end, and what its ring and its captures then say."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import openai

from clairai.fields import request_fields
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess as ServerProcess
from clairai.library.config import config
from clairai.library.http_client import ServerClient
from clairai.local.private_socket import live_engine_sockets
from clairai.ring.attach import RingReader
from clairai.ring.reader import Record
from clairai.store.read import open as open_store
from clairai.vector.files import save
from clairai.weights import Sender
from clairai.wire import ring_messages
from tests.engine import server as parts
from tests.engine import weighed
from tests.support.ring_engine import until

DEADLINE_S: Final = 300.0


class Running(NamedTuple):
    """A server that takes weights, the model it has and another like it."""

    url: str
    model: Path
    other: Path
    runtime: Path
    captures: Path

    @property
    def version(self) -> int:
        return int(ServerClient(self.url, parts.KEY).weights()["version"])


@contextmanager
def serving(model: Path, scratch: Path, *, seats: int) -> Iterator[Running]:
    """With probes, a vector and captures; `seats` are the answers it works on at once."""
    runtime = Path(tempfile.mkdtemp(prefix="clairai-"))  # short enough for a socket
    other = weighed.perturb(model, scratch / "other" / model.name)
    for name in ("probes", "vectors"):
        (scratch / name).mkdir()
    launch = parts.launch(model, runtime, scratch / "probes")
    save(weighed.vector(), scratch / "vectors" / "calm.safetensors")
    asked = ("--weight-transfer-config", '{"backend": "clairai_ipc"}', "--max-num-seqs", str(seats))
    launch = replace(
        launch,
        arguments=(*launch.arguments, *asked),
        additional_config=config(
            probes=scratch / "probes",
            vectors=scratch / "vectors",
            capture={"folder": str(scratch / "captures")},
            capacity=3,
            runtime_dir=str(runtime),
        ),
    )
    with ServerProcess(launch, log=EngineLog(scratch / "vllm.log")) as engine:
        assert engine.wait_ready()
        yield Running(launch.address.url, model, other, runtime, scratch / "captures")
    shutil.rmtree(runtime)


def sender(running: Running, url: str | None = None) -> Sender:
    return Sender(
        url or running.url,
        api_key=parts.KEY,
        runtime_dir=str(running.runtime),
        buffer_bytes=32 << 20,
    )


class Answer(NamedTuple):
    """The tokens of one answer, and the version of the weights that it says made it."""

    tokens: tuple[int, ...]
    version: int | None


@dataclass
class Client:
    """Asks the same again and again, each answer streamed, until it is told to stop."""

    sdk: openai.OpenAI
    prompt: str
    stop: threading.Event = field(default_factory=threading.Event)
    answers: dict[int, Answer] = field(default_factory=dict)  # by stream, in order

    def run(self) -> None:
        while not self.stop.is_set():
            self.ask()

    def ask(self, **more: Any) -> Answer:
        stream = request_fields.new_stream_id()
        ours = json.dumps({"stream": stream, **more})
        chunks = self.sdk.completions.create(
            model=parts.MODEL,
            prompt=self.prompt,
            max_tokens=weighed.TOKENS,
            temperature=0.0,
            stream=True,
            extra_body={
                "return_token_ids": True,
                "ignore_eos": True,
                "vllm_xargs": {"clairai": ours},
            },
        )
        tokens: list[int] = []
        told: list[int] = []
        for chunk in chunks:
            told += [(chunk.model_extra or {}).get("clairai", {}).get("weights", -1)]
            for choice in chunk.choices:
                tokens += getattr(choice, "token_ids", None) or []
        assert told[1:] == [-1] * len(told[1:]), "only the first chunk says it"
        self.answers[stream] = Answer(tuple(tokens), told[0])
        return self.answers[stream]


def await_answers(clients: Sequence[Client]) -> None:
    """Each client has had two more answers: the second one was asked for after this began."""
    wanted_counts = [len(client.answers) + 2 for client in clients]
    pairs = list(zip(clients, wanted_counts, strict=True))
    until(lambda: all(len(client.answers) >= count for client, count in pairs), DEADLINE_S)


class Seen(NamedTuple):
    """What the ring says."""

    versions: list[int | None]  # of records with rows of tokens, in order
    streams: dict[int, set[int | None]]  # versions of each stream's rows
    cached: dict[int, int]  # prompt tokens of each stream that a cache served


def seen(runtime: Path) -> Seen:
    """All that the engine has published; none of it may be lost."""
    found = Seen([], {}, {})
    (socket,) = live_engine_sockets(runtime)
    with RingReader.attach(socket, start="oldest") as reader:
        while records := reader.poll():
            for record in records:
                _note(found, record, reader.bank(record.bank_version).weights)
        assert reader.statistics().lost == 0
    return found


def _note(found: Seen, record: Record, version: int | None) -> None:
    rows = record.rows
    is_token = rows["phase"] <= ring_messages.DECODE
    if is_token.any():
        found.versions.append(version)
    for stream in np.unique(rows["stream"][is_token]).tolist():
        found.streams.setdefault(stream, set()).add(version)
    for row in rows[rows["phase"] == ring_messages.CACHED]:
        stream, span = int(row["stream"]), int(row["span"])
        found.cached[stream] = found.cached.get(stream, 0) + span


def kept_weights(folder: Path, handle: dict[str, Any]) -> str:
    """What the captured rows of a request say of their weights."""
    (origin,) = open_store(folder).request(int(handle["id"], 16)).origins
    return str(origin.weights)
