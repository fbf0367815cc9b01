"""The pause that clients of a server see while its weights change.

Clients ask for short answers, streamed, one after the other; a trainer of its own process sends
whole sets of weights meanwhile. The server lets answers end with the weights they began with and
begins new ones with the others: so there is a time in which no client gets a token. Its length is
the pause; vLLM's loading is part of it. Beside it, the longest gap within an answer: what packing
and verifying take from an engine that serves.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

import clairai
from bench.weights_shape import random_tensors, shapes_of
from clairai.launch.engine_command import EngineCommand, ListenAddress
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess as Server

CLIENTS: Final = 8
NUM_NEW: Final = 64
SETTLE_S: Final = 1.0
MODEL: Final = "served"
# What vLLM's routes for trainers need, and its own `ipc` to unpickle what comes over them.
FOR_TRAINERS: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
Train = Callable[[Connection, str, Path, str, str], None]


def start(
    model: Path, runtime: Path, variables: dict[str, str], backend: str = "clairai_ipc"
) -> Server:
    """A server as users start it: compiled, with graphs."""
    config = clairai.config(points=["post_block.0"], runtime_dir=str(runtime))
    arguments = {
        "--served-model-name": MODEL,
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        "--max-model-len": "1024",
        "--max-num-seqs": "16",
        "--weight-transfer-config": json.dumps({"backend": backend}),
    }
    if "VLLM_CPU_KVCACHE_SPACE" not in variables:
        arguments |= {"--gpu-memory-utilization": "0.1", "--kv-cache-memory-bytes": str(4 << 30)}
    flat = tuple(text for pair in arguments.items() for text in pair)
    launch = EngineCommand(str(model), config, ListenAddress(port=_free_port()), flat, variables)
    server = Server(launch, log=EngineLog(runtime / "server.log"))
    assert server.wait_ready()
    return server


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def measure(
    server: Server,
    model: Path,
    runtime: Path,
    device: str,
    rounds: int,
    train: Train | None = None,
) -> dict[str, Any]:
    """`train` sends in the trainer's process; a Sender unless told otherwise."""
    url = server.command.address.url
    with (
        _trainer(train or send_by_sender, url, model, runtime, device) as trainer,
        _clients(url) as answers,
    ):
        trainer.send(None)
        trainer.recv()  # warms
        time.sleep(SETTLE_S)
        swaps = [_swap(trainer, answers) for _ in range(rounds)]
    return {
        "rounds": rounds,
        "send s": _median(swaps, "seconds"),
        "vLLM's loading ms": _median(swaps, "load_ms"),
        "no token for ms": _median(swaps, "silence_ms"),
        "no token for ms, less loading": _median(swaps, "added_ms"),
        "most": round(max(one["added_ms"] for one in swaps), 1),
        "longest gap in an answer ms": _median(swaps, "gap_ms"),
        "usual gap in an answer ms": _median(swaps, "usual_ms"),
        "answers cut": sum(one["cut"] for one in swaps),
    }


def _median(swaps: list[dict[str, float]], name: str) -> float:
    return round(float(np.median([one[name] for one in swaps])), 2)


@dataclass
class Answer:
    """When the tokens of one answer came."""

    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    is_ended: bool = False


def _swap(trainer: Connection, answers: list[Answer]) -> dict[str, float]:
    before = len(answers)
    began_s = time.perf_counter()
    trainer.send(None)
    sent = trainer.recv()
    time.sleep(SETTLE_S)
    # Answers that ran when it began, and all since.
    seen = [list(one.times) for one in answers[max(before - CLIENTS, 0) :]]
    silence = _longest_gap([at for times in seen for at in times if at >= began_s])
    gaps = [gap for times in seen for gap in np.diff(times)]
    load_ms = sent["load_s"] * 1e3
    return {
        "seconds": sent["seconds"],
        "load_ms": load_ms,
        "silence_ms": silence * 1e3,
        "added_ms": silence * 1e3 - load_ms,
        "gap_ms": float(max(gaps)) * 1e3,
        "usual_ms": float(np.median(gaps)) * 1e3,
        "cut": sum(one.is_ended and one.num_tokens != NUM_NEW for one in answers[before:]),
    }


def _longest_gap(times: list[float]) -> float:
    return float(np.max(np.diff(np.sort(times))))


@contextmanager
def _clients(url: str) -> Iterator[list[Answer]]:
    """Each asks again when it has been answered, until the end."""
    stop, answers = threading.Event(), list[Answer]()
    threads = [
        threading.Thread(target=_ask_on, args=(url, at, stop, answers)) for at in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _ask_on(url: str, number: int, stop: threading.Event, answers: list[Answer]) -> None:
    asked = 0
    while not stop.is_set():
        answer = Answer()
        answers.append(answer)
        asked += 1
        _ask(url, [100 + number, 200 + asked % 1000, *range(300, 314)], answer)


def _ask(url: str, prompt: list[int], answer: Answer) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0.0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        typed = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), typed)
        response = connection.getresponse()
        assert response.status == 200, response.read()[:500]
        for line in response:
            if line.startswith(b"data: {"):
                answer.times.append(time.perf_counter())
                (choice,) = json.loads(line[6:])["choices"]
                answer.num_tokens += len(choice["token_ids"])
    finally:
        connection.close()
    answer.is_ended = True


@contextmanager
def _trainer(
    train: Train, url: str, model: Path, runtime: Path, device: str
) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=train, args=(theirs, url, model, str(runtime), device))
    process.start()
    theirs.close()
    try:
        yield pipe
    finally:
        pipe.close()
        process.join(60)


def send_by_sender(pipe: Connection, url: str, model: Path, runtime: str, device: str) -> None:
    """Send the same weights whenever it is told; runs in the trainer's process."""
    from clairai.weights import Sender

    held = random_tensors(shapes_of(model), device, seed=1)
    sender = Sender(url, runtime_dir=runtime)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        sent = sender.send(held)
        pipe.send({"seconds": sent.seconds, "load_s": sent.load_s, "home": sent.home})


def vllm_backend(device: str) -> str:
    """vLLM's own backend, which needs a GPU; ours stands there without one."""
    return "ipc" if device == "cuda" else "clairai_ipc"


def send_by_vllm(pipe: Connection, url: str, model: Path, runtime: str, device: str) -> None:
    """As above, by vLLM's own trainer (0.28 to 0.32) over its routes, with its own pause.

    It does not say how long loading took: its `load_s` is 0.
    """
    import requests
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    held = random_tensors(shapes_of(model), device, seed=1)
    trainer = WeightTransferTrainerFactory.trainer_init(
        _trainer_info(device, runtime),
        client=HTTPVLLMWeightSyncClient(url),
        source=list(held.items()),
    )
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        began_s = time.perf_counter()
        requests.post(f"{url}/pause?mode=wait", timeout=120).raise_for_status()
        trainer.send_weights()
        requests.post(f"{url}/resume", timeout=120).raise_for_status()
        pipe.send({"seconds": time.perf_counter() - began_s, "load_s": 0.0, "home": "vllm"})


def _trainer_info(device: str, runtime: str) -> Any:
    if device != "cuda":
        from clairai.weights import TrainerInitInfo

        return TrainerInitInfo(rank=0, runtime_dir=runtime)
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=0)
