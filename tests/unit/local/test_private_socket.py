"""Private sockets: who may reach them, what is left of dead engines, and messages over them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from clairai.errors import HandshakeError, RingError
from clairai.local.private_socket import (
    Connection,
    FrameBuffer,
    MessageFormat,
    call_in_forked_child,
    encode_frame,
    live_engine_sockets,
    runtime_dir,
    socket_path,
)
from clairai.wire.ring_messages import AskBank
from tests.support.footprint import nothing_left_behind
from tests.support.ring_engine import running_engine

ACCEPTED = MessageFormat[AskBank](AskBank, max_bytes=100, error=HandshakeError)


def test_engines_are_listed_newest_first_and_only_while_they_live(tmp_path: Path) -> None:
    with running_engine(tmp_path) as old:
        os.utime(old.server.path, (1, 1))
        with running_engine(tmp_path) as new:
            assert live_engine_sockets(tmp_path) == [new.server.path, old.server.path]
        assert live_engine_sockets(tmp_path) == [old.server.path]


def test_a_starting_engine_removes_dead_sockets_and_nothing_else(tmp_path: Path) -> None:
    dead = tmp_path / "engine-00000000deadbeef.sock"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(os.fspath(dead))
    starting = tmp_path / "engine-00000000deadbeef.sock.new"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(os.fspath(starting))
    os.utime(starting, (1, 1))
    (tmp_path / "engine-file.sock").write_text("not a socket")
    (tmp_path / "notes.txt").write_text("mine")
    with running_engine(tmp_path) as living, running_engine(tmp_path):
        assert living.server.path.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"engine-file.sock", "notes.txt"}


def test_folder_and_socket_belong_to_this_user_only(tmp_path: Path) -> None:
    folder = runtime_dir(os.fspath(tmp_path / "a" / "run"))
    with running_engine(folder) as engine:
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
        assert stat.S_IMODE(engine.server.path.lstat().st_mode) == 0o600


def test_the_runtime_folder_is_the_first_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", os.fspath(tmp_path / "home"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("CLAIRAI_RUNTIME_DIR", raising=False)
    assert runtime_dir(None) == tmp_path / "home/.local/state/clairai/run"
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(tmp_path))
    assert runtime_dir(None) == tmp_path / "clairai"
    monkeypatch.setenv("CLAIRAI_RUNTIME_DIR", os.fspath(tmp_path / "set"))
    assert runtime_dir(None) == tmp_path / "set"
    assert runtime_dir(os.fspath(tmp_path / "given")) == tmp_path / "given"


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="may take 107"):
        socket_path(tmp_path / ("x" * 100), 1)


@pytest.fixture
def ends() -> Iterator[tuple[Connection[AskBank], socket.socket]]:
    """A connection, and the bare socket of its peer."""
    with nothing_left_behind():
        ours, theirs = socket.socketpair()
        connection = Connection(ours, ACCEPTED, max_fds=1)
        with theirs:
            yield connection, theirs
        connection.close()


Ends = tuple[Connection[AskBank], socket.socket]


def test_messages_arrive_in_order_with_their_descriptors(ends: Ends) -> None:
    connection, peer = ends
    first = encode_frame(AskBank(1))
    socket.send_fds(peer, [first + encode_frame(AskBank(2))], [peer.fileno()])
    message, fds = connection.receive(5)
    assert message == AskBank(1)
    assert len(fds) == 1
    os.close(fds[0])
    assert connection.receive(5) == (AskBank(2), [])


def test_a_message_that_is_interrupted_by_a_timeout_is_completed_later(ends: Ends) -> None:
    connection, peer = ends
    frame = encode_frame(AskBank(7))
    for part in (frame[:2], frame[2:7]):
        peer.sendall(part)
        with pytest.raises(TimeoutError):
            connection.receive(0.01)
    peer.sendall(frame[7:] + encode_frame(AskBank(8)))
    assert [connection.receive(5)[0].version for _ in range(2)] == [7, 8]


def test_a_peer_that_hangs_up_within_a_message_is_told_from_one_that_finished(ends: Ends) -> None:
    connection, peer = ends
    frame = encode_frame(AskBank(7))
    peer.sendall(frame + frame[:-1])
    peer.shutdown(socket.SHUT_WR)
    assert connection.receive(5)[0] == AskBank(7)
    with pytest.raises(ConnectionAbortedError, match="in the middle"):
        connection.receive(5)
    assert not connection.is_open


def test_a_peer_that_hangs_up_between_two_messages_has_gone(ends: Ends) -> None:
    connection, peer = ends
    assert connection.is_open
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        connection.receive(5)


@pytest.mark.parametrize("is_spread", [False, True], ids=["at once", "byte by byte"])
def test_more_descriptors_than_allowed_are_refused_and_closed(ends: Ends, is_spread: bool) -> None:
    connection, peer = ends
    frame = encode_frame(AskBank(1))
    parts = [bytes([byte]) for byte in frame[:2]] if is_spread else [frame]
    for part in parts:
        socket.send_fds(peer, [part], [peer.fileno()] * (1 if is_spread else 2))
    with pytest.raises(HandshakeError, match="more than 1 descriptors"):
        connection.receive(5)


def test_descriptors_of_an_unfinished_message_are_closed_with_the_connection(ends: Ends) -> None:
    connection, peer = ends
    socket.send_fds(peer, [encode_frame(AskBank(1))[:-1]], [peer.fileno()])
    with pytest.raises(TimeoutError):
        connection.receive(0.01)


def test_hanging_up_waits_for_the_peer_and_ignores_late_replies(ends: Ends) -> None:
    connection, peer = ends
    peer.sendall(encode_frame(AskBank(1)))
    with pytest.raises(TimeoutError):
        connection.hang_up(0.01)
    assert peer.recv(1) == b""
    peer.close()
    with pytest.raises(OSError, match="Broken pipe"):
        connection.send(AskBank(1))


def test_a_frame_buffer_cuts_bytes_into_messages_wherever_they_are_split() -> None:
    raw = b"".join(encode_frame(AskBank(version)) for version in range(5))
    for size in range(1, len(raw) + 1):
        frames, found = FrameBuffer(ACCEPTED), []
        for begin in range(0, len(raw), size):
            frames.feed(raw[begin : begin + size])
            while (message := frames.take()) is not None:
                found.append(message.version)
        assert found == list(range(5))


def test_a_forked_child_calls_methods_of_objects_that_live() -> None:
    class Listener:
        def __init__(self) -> None:
            self.is_released = False

        def release(self) -> None:
            self.is_released = True

    kept, dropped = Listener(), Listener()
    for listener in (kept, dropped):
        call_in_forked_child(listener.release)
    del dropped, listener
    if (child := os.fork()) == 0:
        os._exit(0 if kept.is_released else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not kept.is_released
