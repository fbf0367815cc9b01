"""Control messages to the worker and the engine core, and those of the capture writer's pipe."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from clairai.capture import pipe_messages
from clairai.capture.pipe import Pipe
from clairai.engine.core_control import CoreControl
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.engine.worker_control import answer_control
from clairai.vector.files import dumps
from clairai.wire import (
    capture_messages,
    control_messages,
    ring_messages,
    steering_messages,
    weights_messages,
)
from tests.fuzz.spans import MSGPACK_VALUES, framed_msgpack_spans, msgpack_spans
from tests.fuzz.target import MAX_REASON, Target, grow_prefix
from tests.support import toy_publisher as toy
from tests.support.probes import numbers
from tests.support.vectors import vector

REPLIES = msgspec.msgpack.Decoder(control_messages.ControlReply)


def targets() -> list[Target]:
    shared: dict[str, Any] = {"find_spans": msgpack_spans, "values": MSGPACK_VALUES}
    framed: dict[str, Any] = {"find_spans": framed_msgpack_spans, "values": MSGPACK_VALUES}
    malformed = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)
    pipe = Target(
        "capture_pipe", parse_pipe, _pipe_seeds(), malformed, repair=grow_prefix(4), **framed
    )
    return [
        Target("worker_control", ask_worker, _worker_seeds(), (), share=0.7, **shared),
        Target("core_control", ask_core, _core_seeds(), (), share=0.7, **shared),
        pipe,
    ]


def _encode(*messages: msgspec.Struct) -> list[bytes]:
    return [msgspec.msgpack.encode(message) for message in messages]


def _worker_seeds() -> list[bytes]:
    rows = memoryview(numbers(1, 2, 3).tobytes())
    shared = weights_messages.SharedBytes(os.getpid(), 0, "0" * 32, 12)
    manifest = b'{"version": 1}'
    return _encode(
        control_messages.AddProbes((toy.file_of("p"),)),
        control_messages.RemoveProbes(("p",)),
        control_messages.ReplaceProbes((toy.file_of("p", bias=2.0), toy.file_of("q"))),
        control_messages.RedirectProbes(("p",), rows),
        control_messages.RedirectProbesShared(("p",), shared),
        control_messages.ListProbes(),
        control_messages.Describe(),
        control_messages.FindStreams(("ex-1", "ex-2")),
        capture_messages.FindCaptures(("ex-1",), (5,), is_ended=True),
        capture_messages.ListCaptures(7),
        weights_messages.FindVersions((5, 6)),
        weights_messages.DescribeWeights(vectors=(weights_messages.VectorShape("v", (2, 3)),)),
        weights_messages.CommitWeights(manifest, shared, wants_rows=False),
    )


def _core_seeds() -> list[bytes]:
    tier = b'[{"vector": "v", "scale": 2.0, "when": "prompt"}]'
    return _encode(
        steering_messages.PutVectors((dumps(_vector()),), "put"),
        steering_messages.PutVectors((dumps(_vector("w")),), "add"),
        steering_messages.RemoveVectors(("w",)),
        steering_messages.GetVector("v"),
        steering_messages.ListVectors(),
        steering_messages.GetSteering(),
        steering_messages.SetSteering(tier, b"[]", None),
        steering_messages.SetSteering(b"[]", b"[]", b"[]"),
        steering_messages.ChangeSteering(9, tier),
        steering_messages.WhyRefused(9),
        weights_messages.CheckWeights(b"{}"),
        control_messages.ListProbes(),
    )


def _vector(name: str = "v") -> Any:
    return vector(name, rows={point: numbers(1, 2, 3) for point in toy.POINTS})


def _pipe_seeds() -> list[bytes]:
    layout = pipe_messages.StagingLayout(
        1,
        "float32",
        (pipe_messages.ArrayPlace(0, "rows", 0, "float32", (2, 3)),),
        (pipe_messages.EncodedGroup("raw", (("dtype", "float32"),), (), bytes(8)),),
        *(bytes(8), bytes(8), bytes(2), bytes(8)),
    )
    held = (pipe_messages.HeldTokens(5, 0, "p", 0.5, 0, 2),)
    told = (pipe_messages.AnswerReport(1, 5, 0, "kept", 2, 0, 0, "", "", (0,), ("fs",)),)
    standings = (capture_messages.ConsumerStatus("fs", "x", free_nbytes=5),)
    report = pipe_messages.WriterReport(1, told, standings, 2, 0, 0, 0)
    messages = [
        layout,
        pipe_messages.StagedRows(1, 1, 0, 64, 64, bytes(8), bytes(8)),
        pipe_messages.StagedScores(2, 0, 64, 64, 3, ("p",), held),
        pipe_messages.FinishAnswer(5, 0),
        pipe_messages.AmendAnswer(5, 0, "{}"),
        pipe_messages.SetWeights("v1"),
        pipe_messages.CommitFinished(),
        pipe_messages.WriterReady(5, (pipe_messages.OpenedConsumer("fs", "x", "drop"),)),
        report,
    ]
    bodies = _encode(*messages)
    return [len(body).to_bytes(4, "little") + body for body in bodies]


@cache
def _publisher() -> StepPublisher:
    """One for all inputs: what they change, later ones find changed."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    opened = ExitStack()
    made = opened.enter_context(toy.running_publisher(folder))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(opened.close)
    return made


@cache
def _core() -> CoreControl:
    registry = SteeringRegistry(toy.POINTS, toy.WIDTH, SteeringLimits(rows=8, programs=8))
    return CoreControl(registry, (), lambda _stream, _entries: [3])


def ask_worker(data: bytes) -> None:
    """Whatever is asked, the worker replies, and its bank stays within its bounds."""
    if _asks_for_foreign_memory(data):
        return
    reply = REPLIES.decode(answer_control(_publisher(), data))
    _check_reply(reply)
    if isinstance(reply, control_messages.BankState):
        assert len(reply.probes) <= toy.CAPACITY * len(toy.POINTS)


def ask_core(data: bytes) -> None:
    """The core replies itself, or asks the workers; a change is whole or refused."""
    refusal = msgspec.msgpack.encode(ring_messages.Refusal("request", "asked a worker"))
    for raw in _core().control(data, lambda _: [refusal]):
        _check_reply(REPLIES.decode(raw))


def _check_reply(reply: control_messages.ControlReply) -> None:
    if isinstance(reply, ring_messages.Refusal):
        assert len(reply.reason) <= MAX_REASON, f"a refusal of {len(reply.reason)} characters"
        assert reply.reason.isprintable(), ascii(reply.reason)


def _asks_for_foreign_memory(data: bytes) -> bool:
    """A number that was changed at random may be the process of somebody else."""
    try:
        message = msgspec.msgpack.decode(data, type=control_messages.Control)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    if isinstance(message, control_messages.RedirectProbesShared):
        return message.rows.pid != os.getpid()
    return False


def parse_pipe(data: bytes) -> None:
    """The messages that come out of a pipe are those that were put in, at both of its ends."""
    near, far = socket.socketpair()
    with near, far:
        far.send(data)
        received = Pipe(near).receive() if data else []
    assert received is not None
    assert sum(4 + len(message) for message in received) <= len(data)
    for message in received:
        is_writers = any(tag in message[:24] for tag in (b"ready", b"refused", b"report"))
        decoder: Any = pipe_messages.WRITER_DECODER if is_writers else pipe_messages.ENGINE_DECODER
        found = decoder.decode(message)
        assert decoder.decode(pipe_messages.ENCODER.encode(found)) is not None
