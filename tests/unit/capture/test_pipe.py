"""The pipe carries messages whole and in order, and sending never blocks."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from clairai.capture import pipe_messages
from clairai.capture.pipe import MAX_NBYTES, Pipe


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    ours, theirs = map(Pipe, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order_however_the_socket_splits_them(
    pipes: tuple[Pipe, Pipe],
) -> None:
    ours, theirs = pipes
    messages = [pipe_messages.AmendAnswer(1, at, "x" * at * 997) for at in range(300)]
    received = list[pipe_messages.EngineMessage]()
    for one in messages:
        ours.add(one)
    while len(received) < len(messages):
        ours.send()
        received += map(pipe_messages.ENGINE_DECODER.decode, theirs.receive() or ())
    assert received == messages
    assert not ours.unsent_nbytes


def test_sending_never_blocks_and_keeps_what_does_not_fit(pipes: tuple[Pipe, Pipe]) -> None:
    ours, theirs = pipes
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


def test_a_closed_pipe_is_seen_at_both_ends(pipes: tuple[Pipe, Pipe]) -> None:
    ours, theirs = pipes
    assert theirs.receive() == []
    ours.close()
    assert theirs.receive() is None
    theirs.add(pipe_messages.CommitFinished())
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send()


def test_a_closed_end_with_nothing_to_send_can_be_closed_again(pipes: tuple[Pipe, Pipe]) -> None:
    ours, _ = pipes
    ours.close()
    ours.send_all(0.01)
    ours.close()


def test_a_length_above_the_bound_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        pipe = Pipe(theirs)
        ours.sendall((MAX_NBYTES + 1).to_bytes(4, "little"))
        with pytest.raises(ValueError, match="may have"):
            pipe.receive()
        pipe.close()


@pytest.mark.parametrize("sent", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4boom"])
def test_bytes_that_are_no_message_are_refused(sent: bytes) -> None:
    for decoder in (pipe_messages.ENGINE_DECODER, pipe_messages.WRITER_DECODER):
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(sent)
