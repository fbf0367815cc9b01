"""Messages between an engine and its clerk: whole, in order, and never waited for."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from clairai.capture import pipe_messages
from clairai.capture.pipe import MAX_NBYTES, Pipe


@pytest.fixture
def lines() -> Iterator[tuple[Pipe, Pipe]]:
    ours, theirs = map(Pipe, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_come_whole_and_in_order_however_the_socket_cuts_them(
    lines: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = lines
    said = [pipe_messages.AmendAnswer(1, at, "x" * at * 997) for at in range(300)]
    heard = list[pipe_messages.EngineMessage]()
    for one in said:
        ours.add(one)
    while len(heard) < len(said):
        ours.send()
        heard += map(pipe_messages.ENGINE_DECODER.decode, theirs.receive() or ())
    assert heard == said
    assert not ours.unsent_nbytes


def test_who_speaks_never_waits_and_what_does_not_go_is_kept(lines: tuple[Pipe, Pipe]) -> None:
    ours, theirs = lines
    ours.add(pipe_messages.SetWeights("x" * (4 << 20)))
    ours.send()
    assert ours.unsent_nbytes
    with pytest.raises(TimeoutError):
        ours.send_all(0.01)
    found: list[bytes] = []
    while not found:
        found = theirs.receive() or []
        ours.send()
    assert not ours.unsent_nbytes
    assert pipe_messages.ENGINE_DECODER.decode(found[0]) == pipe_messages.SetWeights(
        "x" * (4 << 20)
    )


def test_the_end_of_a_line_is_seen_at_both_ends(lines: tuple[Pipe, Pipe]) -> None:
    ours, theirs = lines
    assert theirs.receive() == []
    ours.close()
    assert theirs.receive() is None
    theirs.add(pipe_messages.CommitFinished())
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send()


def test_a_closed_end_with_nothing_to_send_can_be_closed_again(lines: tuple[Pipe, Pipe]) -> None:
    ours, _ = lines
    ours.close()
    ours.send_all(0.01)
    ours.close()


def test_a_length_that_no_message_has_ends_the_line() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        line = Pipe(theirs)
        ours.sendall((MAX_NBYTES + 1).to_bytes(4, "little"))
        with pytest.raises(ValueError, match="may have"):
            line.receive()
        line.close()


@pytest.mark.parametrize("sent", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4boom"])
def test_what_is_no_message_is_refused(sent: bytes) -> None:
    for decoder in (pipe_messages.ENGINE_DECODER, pipe_messages.WRITER_DECODER):
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(sent)
