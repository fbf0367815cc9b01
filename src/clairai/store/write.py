"""Write captured rows to a folder, in sealed shards that are committed to its manifest.

A block goes one way: `Writer.offer` puts it into a `BlockQueue`; the thread `clairai-collect` takes
it out, adds it to the `PendingShards` and seals those that are large or old enough, checksums
included; the thread `clairai-write` commits sealed shards, and it alone waits for the disk. Memory
is bounded by `queue_nbytes` and four times `shard_nbytes`. A full disk stops the writer with a
reason, and it continues by itself when there is room. `offer` never waits, unless the policy is
`block`.

Runs in: the capture writer process, or the worker if captures are written in process.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self, get_args

import numpy as np

from clairai.errors import StoreError, StoreStoppedError, quote
from clairai.store.block_queue import BlockQueue, QueuedBlock, RowCounts, SpillFile
from clairai.store.commit_shards import Committer, PendingShard, PendingShards
from clairai.store.disk import LocalDisk, claim_folder
from clairai.store.recover import Recovery, recover
from clairai.store.row_block import RequestNote, RowBlock, count_rows
from clairai.store.shard import SealedShard
from clairai.store.shard_manifest import ParsedManifest

Commits = Literal["soon", "on_flush"]
COMMITS: Final[tuple[Commits, ...]] = get_args(Commits)
CLOSE_S: Final = 60.0  # how long `close` waits for the disk
DISK_FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)
NO_DESCRIPTOR_ERRORS: Final = (errno.EMFILE, errno.ENFILE)
MAX_STREAM: Final = (1 << 64) - 1


@dataclass(frozen=True)
class WriterLimits:
    """The bounds of one writer."""

    shard_nbytes: int = 64 << 20
    seal_after_s: float = 5.0
    queue_nbytes: int = 256 << 20
    reserve_nbytes: int = 64 << 20  # space on the disk that is left to others
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
    """A `stopped` writer continues by itself; a `failed` one does not: open the folder again."""

    name: Literal["writing", "stopped", "failed"] = "writing"
    reason: str = ""
    since: float = field(default_factory=time.time, compare=False)  # in seconds since 1970

    def after(self, last: WriterState) -> WriterState:
        """This state, which began earlier if the last one has the same name."""
        return replace(self, since=last.since) if self.name == last.name else self


@dataclass(frozen=True)
class _RequestFinished:
    """A marker: no rows of this request follow."""

    stream: int


@dataclass(frozen=True)
class _QueueEnd:
    """A marker: nothing follows."""


@dataclass(frozen=True)
class _CommitJob:
    """Work for the thread that writes: shards to commit, then an event to set."""

    shards: list[SealedShard]
    done: threading.Event | None = None


class Writer:
    """The one writer of a folder."""

    recovery: Recovery

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
        """With `commits="on_flush"`, what is offered between two flushes is one commit, or none."""
        if commits not in COMMITS:
            raise StoreError(f"commits is {quote(commits)}; give one of {', '.join(COMMITS)}")
        self._commits_soon = commits == "soon"
        self._limits = limits or WriterLimits()
        self._state = WriterState()
        self._changing_state = threading.Lock()
        self._pending = PendingShards(layout)
        self._has_own_files = layout != "sharded"
        self._with_own_files: set[int] = set()  # running requests that have files of their own
        self._resources = ExitStack()
        spill = None
        if spill_to is not None:
            spill = SpillFile(os.fspath(spill_to), self._limits.spill_nbytes)
            self._resources.callback(spill.close)
        with self._resources:
            self._queue = BlockQueue(policy, self._limits.queue_nbytes, spill)
            self._disk = self._resources.enter_context(claim_folder(path))
            manifest, self.recovery = _recover(self._disk)
            self._committer = Committer(
                self._disk, manifest, reserve_nbytes=self._limits.reserve_nbytes
            )
            self._resources = self._resources.pop_all()
        self._jobs: queue.Queue[_CommitJob | None] = queue.Queue(maxsize=1)
        self._is_ending = threading.Event()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"clairai-{name}", daemon=True)
            for target, name in ((self._collect, "collect"), (self._write, "write"))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> RowCounts:
        return self._queue.counts

    @property
    def state(self) -> WriterState:
        return self._state

    @property
    def free_nbytes(self) -> int | None:
        """Space on the disk, less the reserve; None once the writer is closed."""
        if self._is_closed:
            return None
        return max(self._disk.free_nbytes() - self._limits.reserve_nbytes, 0)

    def begin(
        self,
        stream: int,
        *,
        tags: Mapping[str, Any] | None = None,
        steering: Mapping[str, Any] | None = None,
        owner: str | None = None,
    ) -> None:
        """Set what is stored with a request's rows. Call it before the first, and at a change."""
        self._queue.begin(_check_stream(stream), RequestNote.of(tags, steering, owner))

    def offer(self, block: RowBlock) -> bool:
        """Return whether the rows were accepted; if not, they are counted as dropped."""
        is_accepted = self._queue.put(block)
        if is_accepted and self._has_own_files:
            self._with_own_files.update(np.unique(block.rows_N["stream"]).tolist())
        return is_accepted

    def finish(self, stream: int) -> None:
        """End a request: no rows of it follow, and files of its own can be sealed."""
        self._queue.end(_check_stream(stream))
        # No marker for a request without accepted rows, so that the number of markers is bounded.
        if stream in self._with_own_files:
            self._with_own_files.discard(stream)
            self._queue.put_marker(_RequestFinished(stream))

    def losses(self, stream: int) -> int:
        """Return how many rows of a request were dropped or lost, and forget the number."""
        return self._queue.losses(stream)

    def flush(self, timeout_s: float = CLOSE_S) -> None:
        """Return when everything accepted so far is committed."""
        if self._is_closed:
            raise StoreStoppedError("the writer is closed: what was accepted is committed or lost")
        done = threading.Event()
        self._queue.put_marker(done)
        if not done.wait(timeout_s) or self._state.name == "failed":
            why = self._state.reason or f"the disk took longer than {timeout_s:g} s"
            raise StoreStoppedError(f"{self.counts.pending} rows are not committed: {why}")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Commit what was accepted; what the disk has not taken by then is counted as lost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.close()
        if self._commits_soon:
            done = threading.Event()
            self._queue.put_marker(done)
            done.wait(timeout_s)
        self._is_ending.set()
        self._queue.put_marker(_QueueEnd())
        for thread in self._threads:
            thread.join()
        self._resources.close()
        if lost := self.counts.lost:
            why = self._state.reason or "they were not flushed"
            raise StoreStoppedError(f"{lost} accepted rows are lost: {why}")

    def _collect(self) -> None:
        """Run the thread `clairai-collect`: from queued blocks to sealed shards."""
        seal_at_s: float | None = None  # when the oldest pending shard is due
        while True:
            for item in self._queue.get(seal_at_s) or [None]:
                if isinstance(item, _QueueEnd):
                    self._lose_pending(self._pending.take_all())
                    self._jobs.put(None)
                    return
                seal_at_s = self._handle(item, seal_at_s)

    def _set_state(self, state: WriterState) -> None:
        """A writer that has failed stays so: its queue is closed. Called on both threads."""
        with self._changing_state:
            if self._state.name != "failed":
                self._state = state.after(self._state)

    def _handle(self, item: object, seal_at_s: float | None) -> float | None:
        """Handle a queue item, or None if `seal_at_s` has passed. Returns the next `seal_at_s`."""
        due = self._take_due(item)
        done = item if isinstance(item, threading.Event) else None
        if due or done is not None:
            self._seal(due, done)
        if not len(self._pending):
            return None
        is_new = seal_at_s is None or bool(due)
        return time.monotonic() + self._limits.seal_after_s if is_new else seal_at_s

    def _take_due(self, item: object) -> list[PendingShard]:
        """Add the item to the pending shards, and return those to seal now."""
        if isinstance(item, _RequestFinished):
            # While the disk is busy, finished requests wait and share the next commit.
            is_due = (
                self._pending.finish(item.stream) and self._commits_soon and not self._jobs.full()
            )
            return self._pending.take_finished() if is_due else []
        if not isinstance(item, QueuedBlock):  # a flush, or the oldest shard is due
            return self._pending.take_all() if self._commits_soon or item is not None else []
        self._pending.add(item)
        if self._pending.nbytes < self._limits.shard_nbytes and not self._pending.is_full:
            return []
        if not self._commits_soon:
            self._fail(f"over {self._pending.nbytes} bytes since the last flush; flush more often")
            self._lose_pending(self._pending.take_all())
        return self._pending.take_all()

    def _seal(self, pending: list[PendingShard], done: threading.Event | None) -> None:
        shards: list[SealedShard] = []
        try:
            shards = self._committer.seal(pending)
        except Exception as error:  # without this the thread would end and nobody would know
            self._fail(f"a shard could not be made, {type(error).__name__}: {error}")
            self._lose_pending(pending)
        self._jobs.put(_CommitJob(shards, done))

    def _lose_pending(self, pending: list[PendingShard]) -> None:
        for block in (block for shard in pending for block in shard.blocks):
            self._queue.count_lost(count_rows(block))

    def _write(self) -> None:
        """Run the thread `clairai-write`: from sealed shards to committed ones."""
        while (job := self._jobs.get()) is not None:
            if job.shards and not self._commit(job.shards):
                for span in (span for shard in job.shards for span in shard.head.spans):
                    self._queue.count_lost({int(span.stream, 16): span.rows})
            if job.done is not None:
                job.done.set()

    def _commit(self, shards: list[SealedShard]) -> bool:
        """Commit, retrying while the disk is full or no file can be opened.

        Returns False if the shards are lost.
        """
        while self._state.name != "failed":
            try:
                entries = self._committer.commit(shards)
            except OSError as error:
                self._note_refusal(error)
            except StoreStoppedError as error:
                self._fail(error.reason)
            except Exception as error:
                self._fail(f"a shard could not be written, {type(error).__name__}: {error}")
            else:
                self._set_state(WriterState())
                self._queue.count_committed(sum(entry.rows for entry in entries))
                return True
            if self._state.name == "stopped" and self._is_ending.wait(self._limits.retry_s):
                return False
        return False

    def _note_refusal(self, error: OSError) -> None:
        """Stop for a trouble that may pass; fail for any other."""
        if error.errno in DISK_FULL_ERRORS:
            reason = f"the disk is full, {error.strerror}; make room"
            self._set_state(WriterState("stopped", reason))
        elif error.errno in NO_DESCRIPTOR_ERRORS:
            reason = f"no file can be opened, {error.strerror}; raise the limit (ulimit -n)"
            self._set_state(WriterState("stopped", reason))
        else:
            self._fail(f"the disk refused a shard, {error.strerror}; check it, then start again")

    def _fail(self, reason: str) -> None:
        self._set_state(WriterState("failed", reason))
        self._queue.close()


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
