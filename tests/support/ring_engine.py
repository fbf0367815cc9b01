"""The ring side of an engine to read from, self-describing records, and waiting with a deadline.

Every word of a record follows from its epoch, its sequence number and its index, so that a single
word of another record is noticed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clairai.local.private_socket import live_engine_sockets
from clairai.ring.attach import RingReader
from clairai.ring.layout import RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.reader import Record, StartAt
from clairai.ring.server import GetBank, RingServer
from clairai.ring.writer import RingWriter, new_epoch
from clairai.wire.ring_messages import ROW, WIRE_VERSION, Bank, ProbeInfo, Welcome

SMALL = RingShape(slots=8, slot_bytes=4096)
NUM_COLUMNS = 16
ROW_WORDS = ROW.itemsize // 4
DEADLINE_S = 60.0  # reached only by what never comes


@dataclass(frozen=True)
class Engine:
    """A writer and the server that offers its ring."""

    epoch: int
    memory: HostMemory
    writer: RingWriter
    server: RingServer


@contextmanager
def running_engine(
    folder: Path,
    *,
    shape: RingShape = SMALL,
    bank_of: GetBank | None = None,
    writer_class: type[RingWriter] = RingWriter,
    engine: str = "",
) -> Iterator[Engine]:
    """An engine that exists within this context; one of the cores of `engine`, if that is given."""
    epoch = new_epoch()
    with HostMemory.create(shape.nbytes) as memory:
        writer = writer_class(memory, shape, epoch)
        greeting = welcome(epoch, shape, engine)
        with RingServer(folder, memory, greeting, bank_of or small_bank) as server:
            yield Engine(epoch, memory, writer, server)


def welcome(epoch: int, shape: RingShape, engine: str = "") -> Welcome:
    """The first message of such an engine."""
    return Welcome(
        wire_version=WIRE_VERSION,
        epoch=epoch,
        pid=os.getpid(),
        model="toy",
        vllm="0.0.0",
        home="host",
        nbytes=shape.nbytes,
        slots=shape.slots,
        slot_bytes=shape.slot_bytes,
        points=("post_block.0",),
        engine=engine,
    )


def small_bank(version: int) -> Bank | None:
    """Bank 1 has one probe; there is no other bank."""
    return Bank(1, (ProbeInfo("kind", "post_block.0"),)) if version == 1 else None


def publish_marked(writer: RingWriter, epoch: int, seqs: range) -> None:
    """Publish records that `is_intact` recognizes; `seqs` must begin at the writer's next one."""
    for seq in seqs:
        words = _marks(seq) ^ _mix(epoch, seq)
        num_rows = _num_rows(seq)
        rows = words[: num_rows * ROW_WORDS].view(ROW)
        scores_RC = words[num_rows * ROW_WORDS :].view(np.float32).reshape(num_rows, NUM_COLUMNS)
        writer.publish(rows, scores_RC, bank_version=seq & 0xFFFF, step=seq ^ epoch)


def is_intact(record: Record, epoch: int) -> bool:
    """True if every word of the record is its own."""
    seq, num_rows = record.seq, _num_rows(record.seq)
    if record.step != seq ^ epoch or record.bank_version != seq & 0xFFFF or record.continued:
        return False
    if record.rows.shape != (num_rows,) or record.scores_RC.shape != (num_rows, NUM_COLUMNS):
        return False
    words = np.frombuffer(record.rows.tobytes() + record.scores_RC.tobytes(), np.uint32)
    return bool((words == _marks(seq) ^ _mix(epoch, seq)).all())


def publish_plain(writer: RingWriter, num_records: int) -> None:
    """Publish one-row records without content."""
    rows, scores_RC = np.zeros(1, ROW), np.zeros((1, NUM_COLUMNS), np.float32)
    for step in range(num_records):
        writer.publish(rows, scores_RC, bank_version=1, step=step)


def attach_first(folder: Path, *, start: StartAt = "oldest") -> RingReader:
    """Attach to the engine in the folder, waiting for it."""
    until(lambda: live_engine_sockets(folder))
    return RingReader.attach(live_engine_sockets(folder)[0], start=start)


def until(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Wait for a condition, with a deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.001)


@contextmanager
def forked(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """Another process, killed at the end of this context."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def _num_rows(seq: int) -> int:
    return 1 + seq % 40


@cache
def _index_words(num_words: int) -> NDArray[np.uint32]:
    return np.arange(1, num_words + 1, dtype=np.uint32) * np.uint32(0x85EBCA6B)


def _marks(seq: int) -> NDArray[np.uint32]:
    return _index_words(_num_rows(seq) * (ROW_WORDS + NUM_COLUMNS))


def _mix(epoch: int, seq: int) -> np.uint32:
    return np.uint32((seq * 0x9E3779B1 ^ epoch) & 0xFFFF_FFFF)
