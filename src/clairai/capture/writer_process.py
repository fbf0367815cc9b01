"""Takes what the clerk knows of captured answers; tells the engine what has changed. One thread."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from clairai.capture import pipe_messages
from clairai.capture.capture_settings import ConsumerSpec
from clairai.capture.collector import BatchPacing, Collector
from clairai.capture.consumers import Consumer, GuardedConsumer, open_consumers
from clairai.capture.in_process import origin_for
from clairai.capture.pipe import Pipe
from clairai.capture.pipe_messages import ConsumerReport, WriterReport
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import StagingReader
from clairai.errors import ClairaiError, ConfigError

COUNTS_INTERVAL_S: Final = 0.25  # numbers alone are told so often
COALESCE_S: Final = 0.003  # what else changes, with what changes in this time after it
LOSSES_INTERVAL_S: Final = 1.0  # consumers are asked for their losses so often


class Reporter:
    """Reports go one way, and are not answered."""

    def __init__(self, line: Pipe, collector: Collector, consumers: Mapping[str, Consumer]) -> None:
        self._line, self._collector, self._consumers = line, collector, consumers
        self._last: WriterReport | None = None
        self._asked_s = 0.0
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="clairai-tell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The last report says how all has ended."""
        self._is_open = False
        self._collector.results.news.set()
        self._thread.join()

    def _run(self) -> None:
        news = self._collector.results.news
        try:
            while self._is_open:
                if news.wait(COUNTS_INTERVAL_S):
                    time.sleep(COALESCE_S)
                news.clear()
                self._tell()
            self._tell()
        except OSError:
            pass  # the engine is gone: nobody is left to be told

    def _tell(self) -> None:
        # Before the answers: rows that come in between are then told of, and not counted twice.
        delivered = self._collector.delivered
        results = self._collector.results
        asks_consumers = not self._is_open or time.monotonic() > self._asked_s + LOSSES_INTERVAL_S
        if asks_consumers:
            self._asked_s = time.monotonic()
        told = tuple(results.changes(asks_consumers=asks_consumers))
        totals = results.totals()
        report = WriterReport(
            delivered,
            told,
            tuple(
                ConsumerReport(name, one.state.name, one.state.reason)
                for name, one in self._consumers.items()
            ),
            totals.rows,
            totals.dropped,
            totals.discarded,
            self._collector.pending_nbytes,
        )
        if told or report != self._last:
            self._last = report
            self._line.say(report)
            self._line.send_all()


# MERGED
# Takes a socket and an arena of an engine; gives its captured rows to the consumers. A process.
#
# `python -m clairai.capture.writer_process SOCKET ARENA ENGINE`: two descriptors and the engine's
# process id.
# It ends when the engine closes the socket, in whatever way: then all rows that had come are
# given
# on, and the consumers closed. Imports neither torch nor vllm.


NICENESS: Final = 5
LINGER_S: Final = 0.25
ARENA_PART_IN_BATCH: Final = 8  # of the arena, that goes on at once
# To wake a process costs whoever does it, here the engine in each step, more than to leave it
# something to find: while steps come this one looks for them by itself.
POLL_S: Final = 0.004
MAX_EMPTY_POLLS: Final = 100  # looks in vain
ARRIVAL_POLL_S: Final = 0.0005  # between two looks at what the device has written
ORPHAN_WAIT_S: Final = 0.5  # for which rows of an engine that is gone are waited for
CLOSE_TIMEOUT_S: Final = 120.0  # for all that is to be done at the end
# Whoever ends a group of processes ends the engine first: its end is the clerk's.
IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log: Final = logging.getLogger("clairai.capture")


class CaptureWriter:
    """What the engine says, on the main thread."""

    def __init__(self, line: Pipe, arena: StagingArena, engine: int) -> None:
        self._line, self._arena = line, arena
        self._reader = StagingReader(arena)
        self._poll = select.poll()
        self._poll.register(line.fileno(), select.POLLIN)
        self._engine = _open_pidfd(engine)
        self._ended = select.poll()  # of the collector's thread
        if self._engine is not None:
            self._poll.register(self._engine, select.POLLIN)
            self._ended.register(self._engine, select.POLLIN)
        self._is_orphan = False

    def run(self) -> int:
        messages = self._messages()
        hello = next(messages, None)
        if not isinstance(hello, pipe_messages.WriterStart):
            return 1
        try:
            consumers = self._open(hello)
        except ClairaiError as error:
            return self._refuse(error.code, error.reason)
        except Exception as error:  # of somebody's plugin
            said = f"a capture consumer cannot be opened, {type(error).__name__}: {error}"
            return self._refuse(ConfigError.code, said)
        self._serve(hello, consumers, messages)
        return 0

    def _refuse(self, code: str, reason: str) -> int:
        self._line.say(pipe_messages.WriterRefused(code, reason))
        self._line.send_all()
        return 1

    def _open(self, hello: pipe_messages.WriterStart) -> dict[str, Consumer]:
        specs = [ConsumerSpec(one.name, one.kind, one.options) for one in hello.consumers]
        opened = open_consumers(specs, hello.about)
        said = (
            pipe_messages.OpenedConsumer(name, one.where, one.policy)
            for name, one in opened.items()
        )
        self._line.say(pipe_messages.WriterReady(os.getpid(), tuple(said)))
        self._line.send_all()
        return {name: GuardedConsumer(one) for name, one in opened.items()}

    def _serve(
        self,
        hello: pipe_messages.WriterStart,
        consumers: dict[str, Consumer],
        messages: Iterator[pipe_messages.EngineMessage],
    ) -> None:
        nbytes = self._arena.nbytes
        collector = Collector(
            consumers,
            origin_for(hello.about),
            batch_nbytes=nbytes // 4,
            pending_nbytes=hello.pending_nbytes,
            pace=BatchPacing(LINGER_S, nbytes // ARENA_PART_IN_BATCH),
        )
        reporter = Reporter(self._line, collector, consumers)
        try:
            for message in messages:
                if isinstance(message, pipe_messages.CloseWriter):
                    break
                self._hear(message, collector, hello)
            else:
                self._is_orphan = True
        finally:
            leaving = threading.Timer(CLOSE_TIMEOUT_S, _exit_with_loss)
            leaving.daemon = True
            leaving.start()
            collector.close()
            reporter.close()

    def _hear(
        self,
        message: pipe_messages.EngineMessage,
        collector: Collector,
        hello: pipe_messages.WriterStart,
    ) -> None:
        match message:
            case pipe_messages.StagingPlanMessage():
                self._reader.plan(message)
            case pipe_messages.StagedRows() | pipe_messages.StagedScores():
                wait = partial(self._wait, message.number)
                collector.put(self._reader.taken(message, wait))
            case pipe_messages.BeginAnswer(number, stream, choice, order):
                collector.begin((stream, choice), order, number)
            case pipe_messages.AmendAnswer(stream, choice, steering):
                collector.amend((stream, choice), steering)
            case pipe_messages.FinishAnswer(stream, choice):
                collector.finish((stream, choice))
            case pipe_messages.SetWeights(weights):
                collector.relabel(origin_for(replace(hello.about, weights=weights)))
            case pipe_messages.CommitFinished():
                collector.commit()

    def _messages(self) -> Iterator[pipe_messages.EngineMessage]:
        """Until the engine's end of the line is closed, or the engine is gone."""
        rounds = 0
        while (heard := self._line.listen()) is not None:
            yield from map(pipe_messages.ENGINE_DECODER.decode, heard)
            rounds = 0 if heard else rounds + 1
            if rounds > MAX_EMPTY_POLLS:
                if self._is_engine_gone():
                    return
            elif not heard:
                time.sleep(POLL_S)

    def _is_engine_gone(self) -> bool:
        """Waits until there is something to read, or nobody who would say anything."""
        readable = {fd for fd, _ in self._poll.poll()}
        # A process that the engine forked may hold the line open; what was said comes first.
        return readable == {self._engine}

    def _wait(self, number: int) -> None:
        """On the collector's thread: until the device says that these rows have come."""
        deadline_s: float | None = None
        while not self._arena.is_copied(number):
            if self._is_orphan or self._ended.poll(0):
                deadline_s = deadline_s or time.monotonic() + ORPHAN_WAIT_S
                if time.monotonic() > deadline_s:
                    raise RuntimeError("the engine ended before its device had copied these rows")
            time.sleep(ARRIVAL_POLL_S)


def _exit_with_loss() -> None:
    """Nobody is left who waits for it, or makes room."""
    _log.error("captured rows are lost: no consumer took them in %g s", CLOSE_TIMEOUT_S)
    os._exit(1)


def _open_pidfd(engine: int) -> int | None:
    """A descriptor that can be read when the engine has ended; None where there are none."""
    try:
        return os.pidfd_open(engine)
    except OSError:
        return None


def main(arguments: Sequence[str]) -> int:
    end, arena, engine = map(int, arguments)
    if os.fork():  # nobody who ends the engine with its children ends this process
        os._exit(0)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        # An engine may have bound the thread that started this to one processor.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    threading.main_thread().name = "clairai-clerk"
    line = Pipe(socket.socket(fileno=end))
    try:
        return CaptureWriter(line, StagingArena.attach(arena), engine).run()
    except (OSError, ValueError, msgspec.MsgspecError):
        _log.exception("the process that takes captures ends")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
