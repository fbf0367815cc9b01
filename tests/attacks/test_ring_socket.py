"""Peers that are foreign, garbled, greedy or false are refused; others are served."""

from __future__ import annotations

import array
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from clairai.errors import EngineGoneError, HandshakeError, RingError
from clairai.local.private_socket import (
    FrameBuffer,
    encode_frame,
    engine_sockets,
)
from clairai.ring.attach import RingReader
from clairai.ring.memory import HostMemory
from clairai.ring.server import _ACCEPTED, MAX_REQUEST_BYTES
from clairai.ring.writer import RingWriter
from clairai.wire.ring_messages import MAX_MESSAGE_BYTES, AskBank, Bank, Refusal
from tests.support.footprint import nothing_left_behind
from tests.support.ring_engine import (
    DEADLINE_S,
    SMALL,
    forked,
    running_engine,
    small_bank,
    until,
    welcome,
)

NOBODY = 65534


def frame_of(body: object) -> bytes:
    """A well-formed frame around anything."""
    raw = msgspec.msgpack.encode(body)
    return struct.pack("<I", len(raw)) + raw


GARBAGE = {
    "not msgpack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "empty": struct.pack("<I", 0),
    "an unknown tag": frame_of({"type": "shell"}),
    "an extra field": frame_of({"type": "ask_bank", "version": 1, "extra": 2}),
    "a version that is no number": frame_of({"type": "ask_bank", "version": "1"}),
    "a message only engines send": encode_frame(Bank(1, ())),
    "a length over the bound": struct.pack("<I", MAX_REQUEST_BYTES + 1),
    "the largest length": struct.pack("<I", 2**32 - 1),
    "very deep nesting": struct.pack("<I", 4000) + b"\x91" * 4000,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_reader_that_sends_garbage_is_let_go_and_others_stay(tmp_path: Path, name: str) -> None:
    with (
        running_engine(tmp_path) as engine,
        RingReader.attach(engine.server.path) as honest,
        _raw_reader(engine.server.path) as hostile,
    ):
        hostile.sendall(GARBAGE[name])
        assert _is_hung_up(hostile)
        assert honest.bank(1) == small_bank(1)


def test_a_truncated_frame_waits_and_costs_nobody_anything(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine, RingReader.attach(engine.server.path) as honest:
        with _raw_reader(engine.server.path) as hostile:
            hostile.sendall(encode_frame(AskBank(1))[:-1])
            assert honest.bank(1) == small_bank(1)
            hostile.shutdown(socket.SHUT_WR)
            assert _is_hung_up(hostile)
        assert honest.is_alive()


def test_a_reader_that_asks_without_end_and_never_listens_cannot_fill_the_engine(
    tmp_path: Path,
) -> None:
    asked: list[int] = []

    def bank_of(version: int) -> Bank:
        asked.append(version)
        return Bank(version, small_bank(1).probes * 5000)  # type: ignore[union-attr]

    with (
        running_engine(tmp_path, bank_of=bank_of) as engine,
        RingReader.attach(engine.server.path) as honest,
        _raw_reader(engine.server.path) as hostile,
    ):
        hostile.settimeout(0.2)
        with pytest.raises(TimeoutError):
            hostile.sendall(encode_frame(AskBank(7)) * 100_000)
        assert len(asked) <= 3
        assert honest.bank(1).version == 1


def test_a_reader_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(tmp_path) as engine:
        monkeypatch.setattr("clairai.ring.server.peer_uid", lambda _: os.geteuid() + 1)
        with pytest.raises(HandshakeError, match="foreign-user"):
            RingReader.attach(engine.server.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_gets_no_descriptor() -> None:
    ours, theirs = get_context("fork").Pipe()
    with tempfile.TemporaryDirectory() as name, ours, theirs:
        folder = Path(name)
        go = get_context("fork").Event()
        with forked(_connect_as_nobody, folder, theirs, go.wait), running_engine(folder) as engine:
            folder.chmod(0o755)
            engine.server.path.chmod(0o666)
            go.set()
            assert ours.poll(DEADLINE_S)
            code, num_fds = ours.recv()
    assert (code, num_fds) == ("foreign-user", 0)


def test_an_engine_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(tmp_path) as engine:
        monkeypatch.setattr("clairai.local.private_socket.peer_uid", lambda _: os.geteuid() + 1)
        with pytest.raises(HandshakeError, match="belongs to user"):
            RingReader.attach(engine.server.path)


ON_GPU = msgspec.structs.replace(welcome(1, SMALL), home="device", handle=bytes(64), gpu="00ff")
FALSE_GREETINGS = {
    "garbage": (GARBAGE["not msgpack"], 0),
    "a length over the bound": (struct.pack("<I", MAX_MESSAGE_BYTES + 1), 0),
    "no descriptor": (encode_frame(welcome(1, SMALL)), 0),
    "two descriptors": (encode_frame(welcome(1, SMALL)), 2),
    "another epoch than the ring": (encode_frame(welcome(2, SMALL)), 1),
    "another size than the ring": (
        encode_frame(msgspec.structs.replace(welcome(1, SMALL), nbytes=4096)),
        1,
    ),
    "another shape than the ring": (
        encode_frame(msgspec.structs.replace(welcome(1, SMALL), slots=4, slot_bytes=8192)),
        1,
    ),
    "another version": (
        encode_frame(msgspec.structs.replace(welcome(1, SMALL), wire_version=2)),
        1,
    ),
    "a bank first": (encode_frame(Bank(1, ())), 1),
    "a ring on a GPU with a descriptor too": (encode_frame(ON_GPU), 1),
    "a ring on a GPU with a handle too long": (
        encode_frame(msgspec.structs.replace(ON_GPU, handle=bytes(4096))),
        0,
    ),
    "a ring on a GPU without a handle": (
        encode_frame(msgspec.structs.replace(ON_GPU, handle=b"")),
        0,
    ),
    "a ring nowhere": (frame_of(msgspec.to_builtins(ON_GPU) | {"home": "disk"}), 0),
}


@pytest.mark.parametrize("name", FALSE_GREETINGS)
def test_a_false_greeting_is_refused_and_leaves_nothing_open(tmp_path: Path, name: str) -> None:
    frame, num_fds = FALSE_GREETINGS[name]
    with HostMemory.create(SMALL.nbytes) as memory:
        RingWriter(memory, SMALL, 1)
        with nothing_left_behind():
            refusal = _refusal_of(tmp_path / "s", frame, [memory.fd] * num_fds)
    assert type(refusal) is HandshakeError


def test_an_engine_that_dies_within_its_greeting_is_gone(tmp_path: Path) -> None:
    frame = encode_frame(welcome(1, SMALL))[:20]
    with nothing_left_behind():
        assert type(_refusal_of(tmp_path / "s", frame, [])) is EngineGoneError


def test_an_engine_that_never_greets_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(os.fspath(tmp_path / "s"))
        silent.listen()
        with pytest.raises(HandshakeError, match="did not answer"):
            RingReader.attach(tmp_path / "s", timeout_s=0.01)


@contextmanager
def _raw_reader(path: Path) -> Iterator[socket.socket]:
    """A socket past its greeting, with the descriptor thrown away."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(os.fspath(path))
        sock.recv(1 << 16)
        yield sock


def _is_hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def _refusal_of(path: Path, frame: bytes, fds: list[int]) -> RingError:
    """What a reader says to somebody who greets it with anything, and hangs up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=_greet_falsely, args=(listener, frame, fds))
        thread.start()
        with pytest.raises(RingError) as refused:
            RingReader.attach(path)
        thread.join()
    return refused.value


def _greet_falsely(listener: socket.socket, frame: bytes, fds: list[int]) -> None:
    sock, _ = listener.accept()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with sock:
        sock.sendmsg([frame], rights)


def _connect_as_nobody(folder: Path, answers: Connection, wait: Callable[[], bool]) -> None:
    wait()
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    until(lambda: list(folder.iterdir()))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.fspath(next(folder.iterdir())))
        raw, fds, _, _ = socket.recv_fds(sock, 4096, 1)
    frames = FrameBuffer(_ACCEPTED)
    frames.feed(raw)
    answer = frames.take()
    answers.send((answer.code if isinstance(answer, Refusal) else "none", len(fds)))
    assert engine_sockets(folder) == []
