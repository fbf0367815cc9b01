"""The capture writer process: takes an engine's captured rows to their consumers.

`python -m clairai.capture.writer_process SOCKET ARENA ENGINE`: two descriptors and the engine's
process id. It ends when the engine closes the pipe or dies: then it hands on all rows that have
come and closes the consumers. Imports neither torch nor vllm.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from clairai.capture import pipe_messages
from clairai.capture.capture_settings import ConsumerSpec
from clairai.capture.collector import BatchPacing, Collector
from clairai.capture.consumers import Consumer, GuardedConsumer, open_consumers, status_of
from clairai.capture.pipe import Pipe
from clairai.capture.pipe_messages import WriterReport
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import StagingReader
from clairai.errors import ClairaiError, ConfigError
from clairai.local.heartbeat import Heartbeat, open_pidfd

NICENESS: Final = 5
LINGER_S: Final = 0.25
ARENA_PART_IN_BATCH: Final = 8  # this part of the arena is handed on at once
# Polling here is cheaper for the engine than waking this process in every step.
POLL_S: Final = 0.004
MAX_EMPTY_POLLS: Final = 100  # then it sleeps until the engine sends something
ARRIVAL_POLL_S: Final = 0.0005  # how often it looks for what the device has copied
ORPHAN_WAIT_S: Final = 0.5  # how long it waits for the rows of a dead engine's device
CLOSE_TIMEOUT_S: Final = 120.0
COUNTS_INTERVAL_S: Final = 0.25  # how often counts alone are reported
COALESCE_S: Final = 0.003  # changes within this time make one report
LOSSES_INTERVAL_S: Final = 1.0  # how often consumers are asked for their losses
# How often the engine hears of this process, whether or not anything has changed.
REPORT_INTERVAL_S: Final = 1.0
ROUND_S: Final = 1.0  # how long the main loop may wait for the engine without going round
# Whoever ends a process group ends the engine too, and this process follows the engine.
IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log: Final = logging.getLogger("clairai.capture")


class Reporter:
    """Reports changes to the engine, on a thread of its own. Reports are not answered."""

    def __init__(
        self,
        pipe: Pipe,
        collector: Collector,
        consumers: Mapping[str, Consumer],
        num_rounds: Callable[[], int],
    ) -> None:
        """`num_rounds` counts those of the main loop: one that hangs is not reported as well."""
        self._pipe, self._collector, self._consumers = pipe, collector, consumers
        self._num_rounds, self._reported_rounds = num_rounds, 0
        self._last: WriterReport | None = None
        self._reported_s = 0.0
        self._losses_asked_s = 0.0
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="clairai-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send a last report of how everything ended."""
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
                self._report()
            self._report()
        except OSError:
            pass  # the engine is gone

    def _report(self) -> None:
        # Read before the answers: rows of a batch that counts as delivered are in their counts.
        delivered = self._collector.delivered
        results, now_s = self._collector.results, time.monotonic()
        asks_consumers = not self._is_open or now_s > self._losses_asked_s + LOSSES_INTERVAL_S
        if asks_consumers:
            self._losses_asked_s = now_s
        changes = tuple(results.changes(asks_consumers=asks_consumers))
        totals = results.totals()
        report = WriterReport(
            delivered,
            changes,
            tuple(status_of(name, one) for name, one in self._consumers.items()),
            totals.rows,
            totals.dropped,
            totals.discarded,
            self._collector.pending_nbytes,
        )
        if changes or report != self._last or self._is_due(now_s):
            self._last, self._reported_s = report, now_s
            self._reported_rounds = self._num_rounds()
            self._pipe.add(report)
            self._pipe.send_all()

    def _is_due(self, now_s: float) -> bool:
        """True if the engine shall hear that this process makes progress."""
        has_gone_round = self._num_rounds() != self._reported_rounds
        return has_gone_round and now_s >= self._reported_s + REPORT_INTERVAL_S


class CaptureWriter:
    """Receives the engine's messages, on the main thread."""

    def __init__(self, pipe: Pipe, arena: StagingArena, engine: int) -> None:
        self._pipe, self._arena = pipe, arena
        self._reader = StagingReader(arena)
        self._readable = select.poll()
        self._readable.register(pipe.fileno(), select.POLLIN)
        self._engine = open_pidfd(engine)
        self._engine_ended = select.poll()  # for the collector's thread
        if self._engine is not None:
            self._readable.register(self._engine, select.POLLIN)
            self._engine_ended.register(self._engine, select.POLLIN)
        self._is_orphan = False
        self._num_rounds = 0
        self._heartbeat = Heartbeat.open("capture-writer")

    def run(self) -> int:
        messages = self._receive()
        start = next(messages, None)
        if not isinstance(start, pipe_messages.WriterStart):
            return 1
        try:
            consumers = self._open(start)
        except ClairaiError as error:
            return self._refuse(error.code, error.reason)
        except Exception as error:  # a plugin's
            reason = f"a capture consumer cannot be opened, {type(error).__name__}: {error}"
            return self._refuse(ConfigError.code, reason)
        self._serve(start, consumers, messages)
        return 0

    def _refuse(self, code: str, reason: str) -> int:
        self._pipe.add(pipe_messages.WriterRefused(code, reason))
        self._pipe.send_all()
        return 1

    def _open(self, start: pipe_messages.WriterStart) -> dict[str, Consumer]:
        specs = [ConsumerSpec(one.name, one.kind, one.options) for one in start.consumers]
        opened = open_consumers(specs, start.about)
        described = tuple(
            pipe_messages.OpenedConsumer(name, one.where, one.policy)
            for name, one in opened.items()
        )
        self._pipe.add(pipe_messages.WriterReady(os.getpid(), described))
        self._pipe.send_all()
        return {name: GuardedConsumer(one) for name, one in opened.items()}

    def _serve(
        self,
        start: pipe_messages.WriterStart,
        consumers: dict[str, Consumer],
        messages: Iterator[pipe_messages.EngineMessage],
    ) -> None:
        nbytes = self._arena.nbytes
        collector = Collector(
            consumers,
            start.about,
            batch_nbytes=nbytes // 4,
            pending_nbytes=start.pending_nbytes,
            pacing=BatchPacing(LINGER_S, nbytes // ARENA_PART_IN_BATCH),
            is_successor=start.is_successor,
        )
        reporter = Reporter(self._pipe, collector, consumers, lambda: self._num_rounds)
        try:
            for message in messages:
                if isinstance(message, pipe_messages.CloseWriter):
                    break
                self._apply(message, collector)
            else:
                self._is_orphan = True
        finally:
            timeout = threading.Timer(CLOSE_TIMEOUT_S, _exit_with_loss)
            timeout.daemon = True
            timeout.start()
            collector.close()
            reporter.close()
            if self._heartbeat is not None:
                self._heartbeat.close()

    def _apply(self, message: pipe_messages.EngineMessage, collector: Collector) -> None:
        match message:
            case pipe_messages.StagingLayout():
                self._reader.set_layout(message)
            case pipe_messages.StagedRows() | pipe_messages.StagedScores():
                wait = partial(self._wait_for_copy, message.number)
                collector.put(self._reader.open(message, wait))
            case pipe_messages.BeginAnswer(number, stream, choice, plan):
                collector.begin((stream, choice), plan, number)
            case pipe_messages.AmendAnswer(stream, choice, steering):
                collector.amend((stream, choice), steering)
            case pipe_messages.FinishAnswer(stream, choice):
                collector.finish((stream, choice))
            case pipe_messages.SetWeights(weights):
                collector.set_weights(weights)
            case pipe_messages.CommitFinished():
                collector.commit()

    def _receive(self) -> Iterator[pipe_messages.EngineMessage]:
        """Until the engine closes its end of the pipe, or dies."""
        empty_polls = 0
        while (received := self._pipe.receive()) is not None:
            yield from map(pipe_messages.ENGINE_DECODER.decode, received)
            self._go_round()
            empty_polls = 0 if received else empty_polls + 1
            if empty_polls > MAX_EMPTY_POLLS:
                if self._is_engine_gone():
                    return
            elif not received:
                time.sleep(POLL_S)

    def _go_round(self) -> None:
        self._num_rounds += 1
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def _is_engine_gone(self) -> bool:
        """Waits a while until there is something to read, or the engine is dead."""
        readable = {fd for fd, _ in self._readable.poll(1e3 * ROUND_S)}
        # A process that the engine forked may hold the pipe open; messages come first.
        return readable == {self._engine}

    def _wait_for_copy(self, number: int) -> None:
        """On the collector's thread: until the device has copied the rows of this message."""
        deadline_s: float | None = None
        while not self._arena.is_copied(number):
            if self._is_orphan or self._engine_ended.poll(0):
                deadline_s = deadline_s or time.monotonic() + ORPHAN_WAIT_S
                if time.monotonic() > deadline_s:
                    raise RuntimeError("the engine ended before its device had copied these rows")
            time.sleep(ARRIVAL_POLL_S)


def _exit_with_loss() -> None:
    """A consumer hangs, and nobody is left who could wait for it."""
    _log.error("captured rows are lost: no consumer took them in %g s", CLOSE_TIMEOUT_S)
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    end, arena, engine = map(int, arguments)
    if os.fork():  # no longer a child of the engine: whoever kills its children leaves this one
        os._exit(0)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        # The engine may have pinned the thread that started this to one processor.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    threading.main_thread().name = "clairai-capture-writer"
    pipe = Pipe(socket.socket(fileno=end))
    try:
        return CaptureWriter(pipe, StagingArena.attach(arena), engine).run()
    except (OSError, ValueError, msgspec.MsgspecError):
        _log.exception("the capture writer process ends")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
