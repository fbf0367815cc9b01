"""Takes nothing; gives what bounds a writer of captures, and the states it can be in."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

import numpy as np

from clairai.errors import StoreError, StoreStoppedError
from clairai.points import quote
from clairai.store.block_queue import BlockQueue, RowCounts, SpillFile
from clairai.store.commit_shards import Committer, PendingShard, PendingShards, ShardFile
from clairai.store.disk import LocalDisk, claim_folder
from clairai.store.recover import Recovery, recover
from clairai.store.row_block import NotedBlock, RequestNote, RowBlock
from clairai.store.shard_manifest import ParsedManifest

Commits = Literal["soon", "on_flush"]
COMMITS: Final[tuple[Commits, ...]] = get_args(Commits)


@dataclass(frozen=True)
class WriterLimits:
    """Bounds of one writer."""

    shard_nbytes: int = 64 << 20
    seal_after_s: float = 5.0
    queue_nbytes: int = 256 << 20
    reserve_nbytes: int = 64 << 20  # of the disk, left to others
    retry_s: float = 1.0
    spill_nbytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("shard_nbytes", "queue_nbytes", "spill_nbytes", "seal_after_s", "retry_s"):
            if not getattr(self, name) > 0:
                raise StoreError(f"{name} is {getattr(self, name)}, must be above 0")
        if self.reserve_nbytes < 0:
            raise StoreError(f"reserve_nbytes is {self.reserve_nbytes}, must be 0 or above")


@dataclass(frozen=True)
class WriterState:
    """`stopped` ends by itself; `failed` does not: the folder must be opened again."""

    name: Literal["writing", "stopped", "failed"] = "writing"
    reason: str = ""


# MERGED
# Takes blocks of captured rows; gives them to the disk, sealed and committed, on its own threads.
#
# Two threads: one collects and computes checksums, the other waits for the disk. Memory is
# bounded by
# `queue_nbytes` and four times `shard_nbytes`. A disk that is full stops the writer with a
# reason,
# and it goes on by itself when there is room. Nobody who offers rows waits, unless `block` is
# set.


DISK_FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)
MAX_STREAM: Final = (1 << 64) - 1


@dataclass(frozen=True)
class _RequestFinished:
    stream: int


@dataclass(frozen=True)
class _QueueEnd:
    """Nothing follows."""


@dataclass(frozen=True)
class _CommitJob:
    """What the disk's thread is given: shards, then whom to tell."""

    ready: list[ShardFile]
    done: threading.Event | None = None


class Writer:
    """The one writer of a folder."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: str = "sharded",
        policy: str = "drop",
        commits: str = "soon",
        limits: WriterLimits | None = None,
        spill_to: str | os.PathLike[str] | None = None,
    ) -> None:
        """`commits="on_flush"`: what was offered between two flushes is one commit, or none."""
        if commits not in COMMITS:
            raise StoreError(f"commits is {quote(commits)}; give one of {', '.join(COMMITS)}")
        self._is_soon = commits == "soon"
        self._limits = limits or WriterLimits()
        self._state = WriterState()
        self._drafts = PendingShards(layout)
        self._has_own_files = layout != "sharded"
        self._notes: dict[int, RequestNote] = {}  # of requests that are not finished
        self._begun: set[int] = set()  # of those, the ones with files of their own
        self._held = ExitStack()
        spill = None
        if spill_to is not None:
            spill = SpillFile(os.fspath(spill_to), self._limits.spill_nbytes)
            self._held.callback(spill.close)
        with self._held:
            self._intake = BlockQueue(policy, self._limits.queue_nbytes, spill)
            disk = self._held.enter_context(claim_folder(path))
            parsed, self.recovery = _recover(disk)
            self._sealer = Committer(disk, parsed, reserve_nbytes=self._limits.reserve_nbytes)
            self._held = self._held.pop_all()
        self._work: queue.Queue[_CommitJob | None] = queue.Queue(maxsize=1)
        self._is_ending = threading.Event()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"clairai-{name}", daemon=True)
            for target, name in ((self._collect, "collect"), (self._write, "write"))
        ]
        for thread in self._threads:
            thread.start()

    recovery: Recovery

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> RowCounts:
        return self._intake.counts

    @property
    def state(self) -> WriterState:
        return self._state

    def begin(
        self,
        stream: int,
        *,
        tags: Mapping[str, Any] | None = None,
        steering: Mapping[str, Any] | None = None,
    ) -> None:
        """Before a request's first rows: what travels with them, until it is finished."""
        self._notes[_check_stream(stream)] = RequestNote.of(tags, steering)

    def offer(self, block: RowBlock) -> bool:
        """Whether the rows were accepted; if not, they are counted as dropped."""
        if not self._notes and not self._has_own_files:
            return self._intake.put(NotedBlock(block))
        streams = np.unique(block.rows_N["stream"]).tolist()
        notes = {stream: self._notes[stream] for stream in streams if stream in self._notes}
        is_taken = self._intake.put(NotedBlock(block, notes))
        if is_taken and self._has_own_files:
            self._begun.update(streams)
        return is_taken

    def finish(self, stream: int) -> None:
        """No rows of this request will follow; files of its own are sealed."""
        self._notes.pop(_check_stream(stream), None)
        # Nothing waits for a request whose rows were all dropped, so that what waits is bounded.
        if stream in self._begun:
            self._begun.discard(stream)
            self._intake.put_other(_RequestFinished(stream))

    def losses(self, stream: int) -> int:
        """Rows of this request that were dropped or lost; told once."""
        return self._intake.losses(stream)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Return when all that was accepted before is committed."""
        if self._is_closed:
            raise StoreStoppedError("the writer is closed: what was accepted is committed or lost")
        done = threading.Event()
        self._intake.put_other(done)
        if not done.wait(timeout_s) or self._state.name == "failed":
            why = self._state.reason or f"the disk took longer than {timeout_s:g} s"
            raise StoreStoppedError(f"{self.counts.pending} rows are not committed: {why}")

    def close(self, timeout_s: float = 60.0) -> None:
        """Commit what was accepted; what the disk does not take until then is counted as lost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._intake.close()
        if self._is_soon:
            done = threading.Event()
            self._intake.put_other(done)
            done.wait(timeout_s)
        self._is_ending.set()
        self._intake.put_other(_QueueEnd())
        for thread in self._threads:
            thread.join()
        self._held.close()
        if lost := self.counts.lost:
            why = self._state.reason or "they were not flushed"
            raise StoreStoppedError(f"{lost} accepted rows are lost: {why}")

    def _collect(self) -> None:
        """The first thread: from the intake to sealed bytes."""
        due_s: float | None = None
        while True:
            for item in self._intake.get(due_s) or [None]:
                if isinstance(item, _QueueEnd):
                    self._lose_drafts(self._drafts.take())
                    self._work.put(None)
                    return
                due_s = self._passed_on(item, due_s)

    def _passed_on(self, item: object, due_s: float | None) -> float | None:
        """When the oldest draft is due after this."""
        drafts = self._placed(item)
        done = item if isinstance(item, threading.Event) else None
        if drafts or done is not None:
            self._hand_over(drafts, done)
        if not len(self._drafts):
            return None
        is_new = due_s is None or bool(drafts)
        return time.monotonic() + self._limits.seal_after_s if is_new else due_s

    def _placed(self, item: object) -> list[PendingShard]:
        """What is to be sealed now. No item at all: the oldest has waited long enough."""
        if isinstance(item, NotedBlock):
            self._drafts.add(item)
        elif isinstance(item, _RequestFinished):
            # While the disk is busy they wait for each other, and are committed together.
            is_time = self._drafts.finish(item.stream) and self._is_soon and not self._work.full()
            return self._drafts.take_finished() if is_time else []
        else:
            return self._drafts.take() if self._is_soon or item is not None else []
        is_large = self._drafts.nbytes >= self._limits.shard_nbytes or self._drafts.is_full
        if is_large and not self._is_soon:
            self._fail(f"over {self._drafts.nbytes} bytes since the last flush; flush more often")
            self._lose_drafts(self._drafts.take())
        return self._drafts.take() if is_large else []

    def _hand_over(self, drafts: list[PendingShard], done: threading.Event | None) -> None:
        ready: list[ShardFile] = []
        try:
            ready = self._sealer.ready(drafts)
        except Exception as error:  # a thread that ends unseen would be the worst of answers
            self._fail(f"a shard could not be made, {type(error).__name__}: {error}")
            self._lose_drafts(drafts)
        self._work.put(_CommitJob(ready, done))

    def _lose_drafts(self, drafts: list[PendingShard]) -> None:
        for block in (block for draft in drafts for block in draft.blocks):
            self._intake.lose(NotedBlock(block).streams())

    def _write(self) -> None:
        """The second thread: from sealed bytes to committed shards."""
        while (work := self._work.get()) is not None:
            if work.ready and not self._commit(work.ready):
                self._lose(work.ready)
            if work.done is not None:
                work.done.set()

    def _lose(self, ready: list[ShardFile]) -> None:
        for span in (span for one in ready for span in one.sealed.head.spans):
            self._intake.lose({int(span.stream, 16): span.rows})

    def _commit(self, ready: list[ShardFile]) -> bool:
        while self._state.name != "failed":
            try:
                entries = self._sealer.commit(ready)
            except OSError as error:
                self._refused(error)
            except StoreStoppedError as error:
                self._fail(error.reason)
            except Exception as error:
                self._fail(f"a shard could not be written, {type(error).__name__}: {error}")
            else:
                self._state = WriterState()
                self._intake.committed(sum(entry.rows for entry in entries))
                return True
            if self._state.name == "stopped" and self._is_ending.wait(self._limits.retry_s):
                return False
        return False

    def _refused(self, error: OSError) -> None:
        if error.errno in DISK_FULL_ERRORS:
            self._state = WriterState("stopped", f"the disk is full, {error.strerror}; make room")
        else:
            self._fail(f"the disk refused a shard, {error.strerror}; check it, then start again")

    def _fail(self, reason: str) -> None:
        self._state = WriterState("failed", reason)
        self._intake.close()


def _recover(disk: LocalDisk) -> tuple[ParsedManifest, Recovery]:
    try:
        return recover(disk)
    except OSError as error:
        raise StoreStoppedError(
            f"{quote(str(disk.path), 200)} cannot be made ready, {error.strerror}; nothing that "
            "was committed is lost: make room, or check the disk"
        ) from None


def _check_stream(stream: object) -> int:
    if type(stream) is not int or not 0 <= stream <= MAX_STREAM:
        raise StoreError(f"stream must be a whole number of 0..{MAX_STREAM}")
    return stream
