"""The ring as a broken or foreign writer may leave it: its memory, and the frames of its socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import msgspec
import numpy as np

from clairai.errors import ClairaiError, HandshakeError, WeightsError
from clairai.local.private_socket import FrameBuffer, MessageFormat, encode_frame
from clairai.ring.layout import (
    HEAD_OFFSET,
    HEADER,
    PAGE_BYTES,
    PAYLOAD_OFFSET,
    SLOT_HEADER,
    RingHeader,
    RingShape,
    epoch_low,
)
from clairai.ring.reader import RingCursor
from clairai.weights import socket_server
from clairai.wire import ring_messages, weights_messages
from tests.fuzz.spans import MSGPACK_VALUES, framed_msgpack_spans
from tests.fuzz.target import Target, grow_prefix
from tests.support.probes import numbers

SLOTS, AHEAD, EPOCH = 4, 1, 0xAABBCCDD11223344
SHAPE = RingShape(SLOTS, PAGE_BYTES, AHEAD)
PREFIX, SLOT_PART, TRAILER = HEADER.size + 8, 144, 8


def targets() -> list[Target]:
    return [
        Target("ring_memory", parse_memory, _memories(), share=3.0),
        *_frame_targets(),
    ]


class Memory:
    """The memory of a ring that is written here and read by a cursor."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.raw = bytearray(nbytes)

    def load(self, offset: int) -> int:
        return int.from_bytes(self.raw[offset : offset + 8], "little")

    def copy(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= self.nbytes, "outside of the ring"
        return bytes(self.raw[offset : offset + nbytes])

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def _memories() -> list[bytes]:
    """Header, head, and of each slot the beginning and the end: what lies between is zeros."""
    found = []
    for head, first in ((0, 0), (3, 0), (6, 2)):
        parts = [RingHeader(EPOCH, SHAPE).pack(), head.to_bytes(8, "little")]
        parts += [_slot(seq) for seq in range(first, first + SLOTS)]
        found.append(b"".join(parts))
    return found


def _slot(seq: int) -> bytes:
    rows = np.zeros(2, ring_messages.ROW)
    rows["stream"], rows["position"], rows["span"], rows["phase"] = 9, (3, 4), 1, 1
    head = SLOT_HEADER.pack(seq, epoch_low(EPOCH), 3, 2, 2, 8, 0, 5)
    part = head.ljust(PAYLOAD_OFFSET, b"\0") + rows.tobytes() + numbers(1, 2, 3, 4).tobytes()
    return part.ljust(SLOT_PART, b"\0")[:SLOT_PART] + seq.to_bytes(TRAILER, "little")


def parse_memory(data: bytes) -> None:
    """Every record is delivered, lost or unread, whatever the writer has written."""
    memory = Memory(SHAPE.nbytes)
    memory.raw[: HEADER.size] = data[: HEADER.size].ljust(HEADER.size, b"\0")
    memory.raw[HEAD_OFFSET : HEAD_OFFSET + 8] = data[HEADER.size : PREFIX].ljust(8, b"\0")
    for index in range(SLOTS):
        part = data[PREFIX + index * (SLOT_PART + TRAILER) :][: SLOT_PART + TRAILER]
        start = SHAPE.slot_offset(index)
        memory.raw[start : start + len(part[:SLOT_PART])] = part[:SLOT_PART]
        end = start + SHAPE.slot_bytes
        memory.raw[end - TRAILER : end] = part[SLOT_PART:].ljust(TRAILER, b"\0")
    cursor = RingCursor(memory)
    for limit in (1, 256):
        for record in cursor.poll(limit):
            assert 1 <= len(record.rows) == len(record.scores_RC)
            assert record.rows.nbytes + record.scores_RC.nbytes < SHAPE.slot_bytes
    told = cursor.statistics()
    assert told.first + told.delivered + told.lost + told.lag == memory.load(HEAD_OFFSET)
    assert told.lost >= told.torn


def _frame_targets() -> list[Target]:
    formats = [
        ("ring_frames", ring_messages.RingMessage, HandshakeError, _ring_messages()),
        ("weights_frames", socket_server.SenderMessage, WeightsError, _sender_messages()),
        ("weights_replies", socket_server.EngineMessage, WeightsError, _reply_messages()),
    ]
    return [
        Target(
            name,
            parse_frames(MessageFormat(types, max_bytes=4096, error=error)),
            [encode_frame(message) for message in messages],
            find_spans=framed_msgpack_spans,
            values=MSGPACK_VALUES,
            repair=grow_prefix(4),
            share=3.0,
        )
        for name, types, error, messages in formats
    ]


def _ring_messages() -> list[msgspec.Struct]:
    probe = ring_messages.ProbeInfo("p", "post_block.1", "relu", 0.5, (-1.0, 1.0), "ab")
    welcome = ring_messages.Welcome(
        *(1, EPOCH, 5, "m", "0.32", "host", SHAPE.nbytes, SLOTS, PAGE_BYTES, ("post_block.1",)),
        *(b"h" * 64, "GPU", 4096),
    )
    others = (ring_messages.AskBank(3), ring_messages.Refusal("ring", "no"))
    return [welcome, ring_messages.Bank(3, (probe, probe), 7), *others]


def _sender_messages() -> list[msgspec.Struct]:
    offer = weights_messages.BufferOffer("0" * 32, 1, 4096, "device", b"h" * 64)
    return [offer, weights_messages.BufferFilled("0" * 32, 1)]


def _reply_messages() -> list[msgspec.Struct]:
    greeting = weights_messages.WeightsGreeting(2, "00000000000000aa", "cpu", 5)
    received = weights_messages.BufferReceived(1, 4096)
    return [greeting, received, ring_messages.Refusal("weights", "no")]


def parse_frames(accepted: MessageFormat[Any]) -> Callable[[bytes], None]:
    """However a peer's bytes arrive, they hold the same messages, or are refused."""

    def parse(data: bytes) -> None:
        step = 1 + (len(data) % 64)
        pieces = [data[at : at + step] for at in range(0, len(data), step)]
        cut, cut_error = _take_all(accepted, pieces)
        whole, error = _take_all(accepted, [data])
        assert cut == whole
        assert (error is None) == (cut_error is None)
        if error is not None:
            raise error

    return parse


def _take_all(
    accepted: MessageFormat[Any], pieces: list[bytes]
) -> tuple[list[bytes], ClairaiError | None]:
    """The messages, written again, and the refusal that ended them."""
    buffer, found = FrameBuffer(accepted), []
    try:
        for piece in pieces:
            buffer.feed(piece)
            while (message := buffer.take()) is not None:
                found.append(msgspec.msgpack.encode(message))
    except ClairaiError as error:
        return found, error
    return found, None
