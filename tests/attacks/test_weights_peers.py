"""Peers of other users, and links in place of folders, numbered: each is refused."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection as PipeEnd
from pathlib import Path

import pytest

from clairai.errors import EngineGoneError, RingError, WeightsError
from clairai.local.private_socket import Connection, runtime_dir, socket_path
from clairai.weights.socket_client import BufferClient
from clairai.weights.socket_server import FROM_ENGINE, SOCKET_KIND, BufferServer
from clairai.wire.ring_messages import Refusal
from tests.support.ring_engine import DEADLINE_S, forked
from tests.support.weights_target import Target, target

NOBODY = 65534


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Target]:
    with target(tmp_path) as made:
        yield made


def test_61_a_peer_of_another_user_is_refused(
    attacked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairai.weights.socket_server.peer_uid", lambda _: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.fspath(attacked.llm.updater.receiver.path))
        answer, fds = Connection(sock, FROM_ENGINE, max_fds=4).receive(DEADLINE_S)
    assert isinstance(answer, Refusal)
    assert "may send weights" in answer.reason
    assert fds == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_62_a_process_of_another_user_is_refused_even_where_it_can_connect() -> None:
    ours, theirs = get_context("fork").Pipe()
    with tempfile.TemporaryDirectory() as name, ours, theirs:
        folder = Path(name)
        go = get_context("fork").Event()
        with forked(_connect_as_nobody, folder, theirs, go.wait), target(folder) as attacked:
            folder.chmod(0o755)
            attacked.llm.updater.receiver.path.chmod(0o666)
            go.set()
            assert ours.poll(DEADLINE_S)
            assert "may send weights" in ours.recv()


def _connect_as_nobody(folder: Path, answers: PipeEnd, wait: Callable[[], bool]) -> None:
    wait()
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.fspath(next(folder.glob(f"{SOCKET_KIND}-*.sock"))))
        answer, _ = Connection(sock, FROM_ENGINE, max_fds=4).receive(DEADLINE_S)
    answers.send(getattr(answer, "reason", "taken"))


def test_63_an_engine_of_another_user_is_refused_by_the_sender(
    attacked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairai.local.private_socket.peer_uid", lambda _: os.geteuid() + 1)
    with pytest.raises(WeightsError, match="belongs to user"):
        BufferClient(attacked.folder, attacked.llm.epoch)


def test_64_a_link_in_place_of_the_runtime_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RingError, match="is a link"):
        runtime_dir(str(tmp_path / "link"))


def test_65_a_link_in_place_of_the_socket_leads_nowhere(attacked: Target, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    planted = socket_path(tmp_path / "other", int("ab" * 8, 16), SOCKET_KIND)
    planted.symlink_to(attacked.llm.updater.receiver.path)
    with pytest.raises(WeightsError, match="answers in place of"):
        BufferClient(tmp_path / "other", "ab" * 8)
    (tmp_path / "file").mkdir(mode=0o700)
    socket_path(tmp_path / "file", 1, SOCKET_KIND).write_text("x")
    with pytest.raises(EngineGoneError):
        BufferClient(tmp_path / "file", f"{1:016x}")


def test_66_the_socket_is_for_its_user_alone(attacked: Target) -> None:
    status = attacked.llm.updater.receiver.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert attacked.folder.stat().st_mode & 0o077 == 0


def test_67_a_forked_child_does_not_keep_the_socket_of_a_dead_engine(attacked: Target) -> None:
    link = attacked.llm.updater.receiver._server
    ours, theirs = get_context("fork").Pipe()
    with ours, theirs, forked(_tell_listener, theirs, link):
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == -1, "open: senders would wait for nobody"
    assert link._listener.fileno() >= 0
    assert attacked.still_takes_honest_weights()


def _tell_listener(answers: PipeEnd, link: BufferServer) -> None:
    answers.send(link._listener.fileno())
