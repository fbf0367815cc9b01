"""A server that no longer listens is found; one that is busy is left alone."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from clairai.launch.listen_watch import REFUSED_S, ListenWatch, is_refused

EPOCH = 1_700_000_000.0


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(0)
    return sock


def test_a_socket_that_was_shut_down_is_fatal_after_some_seconds(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "api.sock"
    watch = ListenWatch(path, clock=clock, wall_clock=lambda: EPOCH + clock.now_s)
    with listen(path) as server:
        assert watch.look() is None
        server.shutdown(socket.SHUT_RDWR)
        clock.now_s += 1.0
        assert watch.look() is None
        clock.now_s += REFUSED_S
        trouble = watch.look()
    assert trouble is not None
    assert trouble.is_fatal
    assert trouble.reason == "the API server no longer listens on its socket"
    assert trouble.since == EPOCH + 101.0


def test_a_server_that_listens_again_is_well(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "api.sock"
    watch = ListenWatch(path, clock=clock)
    assert watch.look() is None  # the first refusal
    with listen(path):
        clock.now_s += REFUSED_S - 0.5
        assert watch.look() is None
        clock.now_s += REFUSED_S
        assert watch.look() is None


def test_a_server_too_busy_to_accept_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with listen(path), socket.socket(socket.AF_UNIX) as first:
        first.connect(str(path))  # the queue is full now
        assert not is_refused(path)
    assert is_refused(path)
    path.unlink()
    assert is_refused(path)


def test_without_a_descriptor_nothing_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    assert not is_refused(tmp_path / "api.sock")
