"""What the handshake between an engine and its readers guarantees."""

from __future__ import annotations

import os
import signal
import socket
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from clairai.errors import EngineGoneError, HandshakeError
from clairai.local.private_socket import encode_frame, live_engine_sockets
from clairai.ring.attach import RingReader
from clairai.ring.memory import HostMemory
from clairai.ring.server import MAX_READERS, RingServer
from clairai.ring.writer import new_epoch
from clairai.wire.ring_messages import MAX_MESSAGE_BYTES, Bank, ProbeInfo
from tests.support.ring_engine import (
    DEADLINE_S,
    SMALL,
    attach_first,
    forked,
    publish_plain,
    running_engine,
    small_bank,
    until,
    welcome,
)


def test_many_readers_each_get_every_record(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        readers = [RingReader.attach(engine.server.path) for _ in range(5)]
        publish_plain(engine.writer, 3)
        assert [len(reader.poll()) for reader in readers] == [3] * 5
        assert {reader.welcome.epoch for reader in readers} == {engine.epoch}
        for reader in readers:
            reader.close()


def test_a_bank_of_a_thousand_probes_crosses_the_socket(tmp_path: Path) -> None:
    probes = tuple(
        ProbeInfo(
            f"probe-{i:04}-{'n' * 40}", "post_block.10", "sigmoid", 0.5, (-1.0, 1.0), "d" * 64
        )
        for i in range(1000)
    )
    bank = Bank(3, probes)
    assert 200_000 < len(encode_frame(bank)) < MAX_MESSAGE_BYTES
    with (
        running_engine(tmp_path, bank_of=lambda _: bank) as engine,
        RingReader.attach(engine.server.path) as reader,
    ):
        assert reader.bank(3) == bank


def test_a_bank_too_large_for_a_message_is_refused_and_the_reader_stays(tmp_path: Path) -> None:
    bank = Bank(3, (ProbeInfo("n" * MAX_MESSAGE_BYTES, "post_block.1"),))
    with (
        running_engine(tmp_path, bank_of=lambda _: bank) as engine,
        RingReader.attach(engine.server.path) as reader,
    ):
        with pytest.raises(HandshakeError, match="too-large"):
            reader.bank(3)
        assert reader.is_alive()


def test_a_bank_is_asked_for_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def bank_of(version: int) -> Bank:
        asked.append(version)
        return Bank(version, ())

    with (
        running_engine(tmp_path, bank_of=bank_of) as engine,
        RingReader.attach(engine.server.path) as reader,
    ):
        assert reader.bank(4) is reader.bank(4)
    assert asked == [4]


def test_an_unknown_bank_is_refused_and_the_reader_stays_attached(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine, RingReader.attach(engine.server.path) as reader:
        with pytest.raises(HandshakeError, match="unknown-bank"):
            reader.bank(99)
        assert reader.bank(1).version == 1


def test_a_failing_bank_lookup_disconnects_only_that_reader(tmp_path: Path) -> None:
    def bank_of(version: int) -> Bank:
        return {1: Bank(1, ())}[version]

    with (
        running_engine(tmp_path, bank_of=bank_of) as engine,
        RingReader.attach(engine.server.path) as first,
        RingReader.attach(engine.server.path) as second,
    ):
        with pytest.raises(EngineGoneError):
            first.bank(2)
        assert second.bank(1) == Bank(1, ())


def test_a_closed_engine_is_seen_as_gone_and_its_socket_is_removed(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        reader = RingReader.attach(engine.server.path)
        assert reader.is_alive()
        assert not reader.wait(timeout_s=0.001)
    with reader:
        assert not reader.is_alive()
        assert reader.wait(timeout_s=0)
    assert list(tmp_path.iterdir()) == []


def test_a_socket_without_an_engine_is_engine_gone(tmp_path: Path) -> None:
    with pytest.raises(EngineGoneError, match="start the engine"):
        RingReader.attach(tmp_path / "engine-0.sock")


def test_readers_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        readers = [RingReader.attach(engine.server.path) for _ in range(MAX_READERS)]
        with pytest.raises(HandshakeError, match="detach one"):
            RingReader.attach(engine.server.path)
        for reader in readers:
            reader.close()
        until(lambda: _can_attach(engine.server.path))


def test_a_reader_dropped_open_warns(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        reader = RingReader.attach(engine.server.path)
        with pytest.warns(ResourceWarning, match="dropped open"):
            del reader


def test_a_forked_child_of_the_engine_neither_unlinks_nor_hides_its_death(tmp_path: Path) -> None:
    with forked(_fork_and_wait, tmp_path) as engine, attach_first(tmp_path) as reader:
        child_file = tmp_path / "child"
        until(child_file.exists)
        assert live_engine_sockets(tmp_path)
        engine.kill()
        until(lambda: not reader.is_alive())
        os.kill(int(child_file.read_text()), signal.SIGKILL)


def _fork_and_wait(folder: Path) -> None:
    with running_engine(folder) as engine:
        warnings.simplefilter("ignore")  # newer Pythons warn about fork with threads
        if os.fork() == 0:
            engine.server.close()
            (folder / "starting").write_text(str(os.getpid()))
            (folder / "starting").rename(folder / "child")
        signal.pause()


class _GatedMemory:
    """A ring's memory that is handed to a reader only when the gate opens."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self.asked, self.gate = threading.Event(), threading.Event()

    @property
    def fds(self) -> Sequence[int]:
        self.asked.set()
        self.gate.wait(DEADLINE_S)
        return self._memory.fds


def test_a_child_forked_while_a_reader_attaches_does_not_hide_the_engines_death(
    tmp_path: Path,
) -> None:
    """The gate opens when a fork is about to happen: the reader's socket has no session yet."""
    with HostMemory.create(SMALL.nbytes) as memory:
        gated = _GatedMemory(memory)
        greeting = welcome(new_epoch(), SMALL)
        with (
            RingServer(tmp_path, gated, greeting, small_bank) as server,
            socket.socket(socket.AF_UNIX) as reader,
        ):
            reader.connect(str(server.path))
            assert gated.asked.wait(DEADLINE_S)
            os.register_at_fork(before=gated.gate.set)
            child = _fork_and_pause()
            try:
                server.close()
                reader.settimeout(DEADLINE_S)
                assert b"".join(iter(partial(reader.recv, 1 << 16), b""))  # greeting, then the end
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _fork_and_pause() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about fork with threads
        child = os.fork()
    while child == 0:
        signal.pause()
    return child


def _can_attach(path: Path) -> bool:
    try:
        RingReader.attach(path).close()
    except HandshakeError:
        return False
    return True
