"""Commits, crashes, reopenings and reads in any order agree with a plain list."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from clairai.store.commit_shards import Committer
from clairai.store.read import Store
from clairai.store.recover import recover, verify
from tests.support.crash_disk import CrashDisk, CrashError, random_fate
from tests.support.row_blocks import block, pending_shard, values


class WriterReaderCrash(RuleBasedStateMachine):
    """One writer at a time, a reader that stays open, and crashes at any moment."""

    @initialize()
    def start(self) -> None:
        self.disk = CrashDisk()
        self.committed: list[int] = []
        self.under_way: list[int] = []
        self.next_stream = 1
        self.committer: Committer | None = None
        self.reader: Store | None = None

    @precondition(lambda self: self.committer is None)
    @rule()
    def open(self) -> None:
        manifest, _ = recover(self.disk)
        self.committer = Committer(self.disk, manifest)
        shown = [request.stream for request in Store(self.disk).requests()]
        assert shown in (self.committed, self.committed + self.under_way)
        self.committed, self.under_way = shown, []

    @precondition(lambda self: self.committer is not None)
    @rule(num_shards=st.integers(1, 3))
    def commit(self, num_shards: int) -> None:
        assert self.committer is not None
        streams = self._streams(num_shards)
        self.committer.commit(self.committer.seal([pending_shard(block(s, 2)) for s in streams]))
        self.committed += streams

    @precondition(lambda self: self.committer is not None)
    @rule(room=st.integers(0, 3000))
    def commit_on_a_disk_with_little_room(self, room: int) -> None:
        assert self.committer is not None
        (stream,) = self._streams(1)
        self.disk.room = self._used() + room
        try:
            self.committer.commit(self.committer.seal([pending_shard(block(stream, 2))]))
            self.committed.append(stream)
        except OSError:
            assert room < 3000
        self.disk.room = 1 << 60

    @precondition(lambda self: self.committer is not None)
    @rule(operations=st.integers(0, 14), seed=st.integers(0, 1 << 30))
    def crash_in_a_commit(self, operations: int, seed: int) -> None:
        assert self.committer is not None
        self.under_way = self._streams(2)
        self.disk.operations_left = operations
        try:
            self.committer.commit(
                self.committer.seal([pending_shard(block(s, 2)) for s in self.under_way])
            )
            self.committed, self.under_way = self.committed + self.under_way, []
        except CrashError:
            pass
        fate = random_fate(random.Random(seed))  # noqa: S311 - a test, not a secret
        self.disk = self.disk.after_crash(fate)
        self.committer = self.reader = None

    @precondition(lambda self: self.committer is not None)
    @rule()
    def look_with_a_reader_that_was_open_before(self) -> None:
        if self.reader is None:
            self.reader = Store(self.disk)
        self.reader.refresh()
        assert [request.stream for request in self.reader.requests()] == self.committed

    @invariant()
    def what_is_committed_is_there_and_right(self) -> None:
        if getattr(self, "committer", None) is None:
            return
        assert [check.fault for check in verify(self.disk) if check.fault] == []
        store = Store(self.disk)
        assert [request.stream for request in store.requests()] == self.committed
        for stream in self.committed[-2:]:
            assert np.array_equal(store.rows(stream), values(stream, np.arange(2), "post_block.3"))

    def _streams(self, count: int) -> list[int]:
        first, self.next_stream = self.next_stream, self.next_stream + count
        return list(range(first, first + count))

    def _used(self) -> int:
        return sum(len(inode.data) for inode in self.disk.files.values())


WriterReaderCrash.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None, derandomize=True, database=None
)
TestAnyOrderOfEvents = WriterReaderCrash.TestCase
