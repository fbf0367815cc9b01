"""The capture backend in a process of its own: the engine's side of the capture writer.

Messages go through a pipe that never blocks the engine; rows lie in the staging arena, which both
processes map. One small thread receives the writer's reports.

Runs in: the worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from clairai.capture import pipe_messages
from clairai.capture.consumers import Policy
from clairai.capture.pipe import Pipe
from clairai.capture.pipe_messages import StagedMessage, StagingLayout
from clairai.capture.results import CaptureResults, RowTotals
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import Wait, count_layout_rows
from clairai.engine.capture.capture_plan import AnswerId, CapturePlan
from clairai.errors import ConfigError, make_error
from clairai.local.heartbeat import open_pidfd
from clairai.local.own_clock import OwnClock
from clairai.local.run_module import module_command, module_environment
from clairai.wire.capture_messages import ConsumerStatus

START_S: Final = 300.0  # a consumer checks a folder of many shards before it writes to it
CLOSE_S: Final = 65.0  # a consumer gives up after 60
MAX_UNSENT_NBYTES: Final = 64 << 20
SEND_AGAIN_S: Final = 0.25
SILENT_S: Final = 5.0  # without a report, which comes once a second: the consumers say so
GIVE_UP_S: Final = 30.0  # without a report: it is killed and replaced
END_S: Final = 10.0  # for a writer to end by itself
MAX_RESTARTS: Final = 5  # in a row
MAX_PAUSE_S: Final = 30.0  # before a restart; the first pause is a second, and each one doubles it
LONG_LIFE_S: Final = 120.0  # a writer that lived so long was well
MODULE: Final = "clairai.capture.writer_process"
WRITER_ENDED: Final = (
    "the capture writer process has ended; rows that were not safe are lost, and nothing is "
    "captured until it has been started again"
)
WRITER_SILENT: Final = "the capture writer process does not answer; it is replaced if it stays so"
GIVEN_UP: Final = (
    "the capture writer process has ended too often; nothing is captured until the engine is "
    "started again"
)
NOT_STARTED: Final = (
    "the capture writer process could not be started, {}; see its messages above, or capture "
    'in the engine\'s own process with "process": "engine" in capture'
)
_log: Final = logging.getLogger("clairai.capture")
Restart = Callable[[str | None], "WriterLink"]


@dataclass(frozen=True)
class RemoteConsumerState:
    name: str = "writing"
    reason: str = ""
    since: float = field(default_factory=time.time)


class RemoteConsumer:
    """What the engine knows of a consumer in the writer process."""

    def __init__(self, where: str, policy: Policy) -> None:
        self.where, self.policy = where, policy
        self.state = RemoteConsumerState()
        self._reported = ConsumerStatus("", where)

    def apply(self, reported: ConsumerStatus) -> None:
        """Take over what the writer process says."""
        # A consumer that drops rows takes others: for an answer it is writing.
        name = "writing" if reported.state == "dropping" else reported.state
        reason = "" if name == "writing" else reported.reason
        self.state, self._reported = RemoteConsumerState(name, reason, reported.since), reported

    def fail(self, reason: str) -> None:
        """The writer process has ended."""
        self.state = RemoteConsumerState("failed", reason)
        self._reported = msgspec.structs.replace(
            self._reported, state="failed", reason=reason, since=self.state.since
        )

    def stop(self, reason: str, since: float) -> None:
        """The writer process does not answer; the next report says how it is."""
        if self.state.name == "writing":
            self.state = RemoteConsumerState("stopped", reason, since)
            self._reported = msgspec.structs.replace(
                self._reported, state="stopped", reason=reason, since=since
            )

    def status(self, name: str) -> ConsumerStatus:
        return msgspec.structs.replace(self._reported, consumer=name, where=self.where)

    def losses(self, _stream: int) -> int:
        """Reported with the answers."""
        return 0


class WriterLink:
    """One writer process: its pipe, and what was sent to it and is not known to be delivered."""

    def __init__(
        self, pipe: Pipe, ready: pipe_messages.WriterReady, reports: Iterable[bytes] = ()
    ) -> None:
        """`reports` came right behind the writer's first message."""
        self.pipe, self.process, self.consumers = pipe, ready.process, ready.consumers
        self.early_reports = tuple(reports)
        # Layouts of staged messages, each with the answers that are not this writer's.
        self.undelivered: deque[tuple[StagingLayout | None, frozenset[AnswerId]]] = deque()
        self.delivered = 0
        self.layout: StagingLayout | None = None  # the last that was sent
        self.started_s = time.monotonic()
        self._pidfd = open_pidfd(ready.process) if _is_writer(ready.process) else None

    @classmethod
    def start(cls, start: pipe_messages.WriterStart, arena: StagingArena) -> WriterLink:
        """Returns when all consumers are open; ConfigError if one cannot be opened."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                _spawn_writer(theirs.fileno(), arena)
            pipe = Pipe(ours)
            ready, reports = _start_writer(pipe, start)
            undo.pop_all()
        return cls(pipe, ready, reports)

    def add_rows(self, message: StagedMessage, layout: StagingLayout | None) -> None:
        if layout is not None and layout is not self.layout:
            self.add_layout(layout)
        self.pipe.add(message)

    def add_layout(self, layout: StagingLayout) -> None:
        self.layout = layout
        self.pipe.add(layout)

    def end(self) -> None:
        """Return when the process has ended: a folder has one writer at a time."""
        self.pipe.shut_down()  # a writer that lives writes what it has, and ends
        if self._pidfd is None:
            return
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(1e3 * END_S):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            ended.poll(1e3 * END_S)

    def close(self) -> None:
        self.pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class RemoteBackend:
    """The writer process, and what it has reported. One that dies or hangs is replaced."""

    is_remote = True

    def __init__(
        self, link: WriterLink, arena: StagingArena, restart: Restart | None = None
    ) -> None:
        """`restart` starts the next writer, for rows of the weights that it is given."""
        self._link, self.arena, self._restart = link, arena, restart
        self._consumers = {
            one.name: RemoteConsumer(one.where, one.policy) for one in link.consumers
        }
        self.results = CaptureResults(self._consumers)  # type: ignore[arg-type]  # it uses no more
        self.pending_nbytes = 0
        self.failure = ""
        self._next: WriterLink | None = None  # started, and not in use before the next answer
        self._weights: str | None = None
        self._open: frozenset[AnswerId] = frozenset()
        self._orphans: frozenset[AnswerId] = frozenset()  # open, of an earlier writer
        self._layout: StagingLayout | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        for report in link.early_reports:
            self._apply(link, report)
        self._thread = threading.Thread(target=self._run, name="clairai-reports", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, start: pipe_messages.WriterStart, arena: StagingArena) -> RemoteBackend:
        """Returns when all consumers are open; ConfigError if one cannot be opened."""

        def restart(weights: str | None) -> WriterLink:
            about = start.about if weights is None else replace(start.about, weights=weights)
            successor = msgspec.structs.replace(start, about=about, is_successor=True)
            return WriterLink.start(successor, arena)

        return cls(WriterLink.start(start, arena), arena, restart)

    @property
    def process(self) -> int:
        """The writer process that rows go to."""
        return self._link.process

    @property
    def lasting_failure(self) -> str:
        return "" if self._next is not None else self.failure

    def may_block(self, consumers: Iterable[str]) -> bool:
        return any(self._consumers[name].policy == "block" for name in consumers)

    def begin(self, answer: AnswerId, plan: CapturePlan) -> None:
        self._use_next()
        number = self.results.open(answer, plan)
        self._open |= {answer}
        self._orphans -= {answer}
        if self.failure:
            self._orphans |= {answer}
            self.results.fail(answer, self.failure)
        else:
            self._link.pipe.add(pipe_messages.BeginAnswer(number, *answer, plan))

    def _use_next(self) -> None:
        """Rows go to the next writer from now on. On the engine's thread, between two steps.

        Nobody reads the arena then: what lies in it was for the writer that died.
        """
        with self._lock:
            link, self._next = self._next, None
            if link is None:
                return
            old, self._link, self.failure = self._link, link, ""
            self._orphans = self._open
        old.close()
        self.arena.discard_all()

    def amend(self, answer: AnswerId, steering: str) -> None:
        self._add(pipe_messages.AmendAnswer(*answer, steering))

    def finish(self, answer: AnswerId) -> None:
        self._open -= {answer}
        self._orphans -= {answer}
        self._add(pipe_messages.FinishAnswer(*answer))

    def set_weights(self, weights: str) -> None:
        self._weights = weights
        self._add(pipe_messages.SetWeights(weights))
        self.send()

    def commit(self) -> None:
        self._add(pipe_messages.CommitFinished())
        self.send()

    def set_layout(self, layout: StagingLayout) -> None:
        self._layout = layout
        if not self.failure:
            self._link.add_layout(layout)

    def put(self, message: StagedMessage, _wait: Wait) -> None:
        layout = self._layout if isinstance(message, pipe_messages.StagedRows) else None
        with self._lock:
            is_taken = not self.failure
            if is_taken:
                self._link.undelivered.append((layout, self._orphans))
                self._link.add_rows(message, layout)
        self._lose(layout, only=self._orphans if is_taken else None)

    def _add(self, message: pipe_messages.EngineMessage) -> None:
        if not self.failure:
            self._link.pipe.add(message)

    def send(self) -> None:
        if not self.failure:
            _send(self._link.pipe)

    def close(self) -> None:
        self._closing.set()
        self._add(pipe_messages.CloseWriter())
        with contextlib.suppress(OSError):  # as in _send()
            self._link.pipe.send_all(CLOSE_S)
        if (successor := self._next) is not None:
            successor.pipe.shut_down()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("captures are still being written; the capture writer process goes on")
        else:
            self._link.close()
        self.arena.close()

    def _run(self) -> None:
        """The thread: follows one writer after the other."""
        link: WriterLink | None = self._link
        num_deaths = 0
        while link is not None:
            self._follow(link)
            self._fail(link)
            lived_s = time.monotonic() - link.started_s
            num_deaths = 1 if lived_s >= LONG_LIFE_S else num_deaths + 1
            link = self._start_again(num_deaths)

    def _follow(self, link: WriterLink) -> None:
        """Receive reports, and send what could not be sent at once, until the writer's end."""
        poll, clock, heard_s = select.poll(), OwnClock(), 0.0
        poll.register(link.pipe.fileno(), select.POLLIN)
        try:
            while True:
                poll.poll(1e3 * SEND_AGAIN_S)
                _send(link.pipe)
                if (messages := link.pipe.receive()) is None:
                    return
                for message in messages:
                    self._apply(link, message)
                now_s = clock.tick()
                heard_s = now_s if messages else heard_s
                if self._is_given_up(now_s - heard_s):
                    return
        except Exception:  # as good as dead: nobody knows what becomes of rows
            _log.exception("a message of the capture writer process is not understood")

    def _is_given_up(self, silent_s: float) -> bool:
        """True if the writer has not reported for too long; before that its consumers say so."""
        if silent_s >= SILENT_S:
            for consumer in self._consumers.values():
                consumer.stop(WRITER_SILENT, time.time() - silent_s)
        return silent_s >= GIVE_UP_S

    def _apply(self, link: WriterLink, message: bytes) -> None:
        report = pipe_messages.WRITER_DECODER.decode(message)
        assert isinstance(report, pipe_messages.WriterReport)
        with self._lock:
            for _ in range(report.delivered - link.delivered):
                link.undelivered.popleft()
        link.delivered, self.pending_nbytes = report.delivered, report.pending_nbytes
        for one in report.standings:
            self._consumers[one.consumer].apply(one)
        self.results.apply(report.told, RowTotals(report.rows, report.dropped, report.discarded))

    def _fail(self, link: WriterLink) -> None:
        """The writer has ended, or is given up."""
        with self._lock:
            is_unused = link is self._next
            if is_unused:
                self._next = None
            self.failure = WRITER_ENDED
            lost = [*link.undelivered]
            link.undelivered.clear()
        if self._closing.is_set() and not lost:
            if is_unused:
                link.close()
            return
        _log.error(WRITER_ENDED)
        # Counted before anything is said to have failed: then the numbers are final.
        for layout, not_its in lost:
            self._lose(layout, but=not_its)
        for consumer in self._consumers.values():
            consumer.fail(WRITER_ENDED)
        self.results.fail_unsafe(WRITER_ENDED)
        self.results.keep_totals()
        link.end()
        if is_unused:
            link.close()

    def _start_again(self, num_deaths: int) -> WriterLink | None:
        """The next writer; None if there shall be none, or if too many have died in a row."""
        if self._restart is None:
            return None
        while num_deaths <= MAX_RESTARTS:
            if self._closing.wait(min(2.0 ** (num_deaths - 1), MAX_PAUSE_S)):
                return None
            try:
                link = self._restart(self._weights)
            except Exception as error:  # a folder that is busy, no memory: try again later
                _log.error("the capture writer cannot be started again: %s", error)
                num_deaths += 1
                continue
            with self._lock:
                self._next = link
            if self._closing.is_set():
                link.pipe.shut_down()  # close() may have come before there was a next one
            for report in link.early_reports:
                self._apply(link, report)
            _log.warning("the capture writer has been started again (process %d)", link.process)
            return link
        _log.error(GIVEN_UP)
        self.failure = GIVEN_UP
        for consumer in self._consumers.values():
            consumer.fail(GIVEN_UP)
        return None

    def _lose(
        self,
        layout: StagingLayout | None,
        *,
        only: frozenset[AnswerId] | None = None,
        but: frozenset[AnswerId] = frozenset(),
    ) -> None:
        """Count the rows of a staged message as dropped: of all answers, `only` or all `but`."""
        if layout is None or only == frozenset():
            return
        for answer, count in count_layout_rows(layout).items():
            if answer not in but and (only is None or answer in only):
                self.results.add_dropped(answer, count, WRITER_ENDED)


def _is_writer(pid: int) -> bool:
    """True if this is a process that may be killed for being a capture writer that hangs."""
    with contextlib.suppress(OSError):
        return MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _send(pipe: Pipe) -> None:
    with contextlib.suppress(OSError):  # the receiving thread finds the end and reports it
        pipe.send()
    if pipe.unsent_nbytes > MAX_UNSENT_NBYTES:
        pipe.shut_down()  # the writer has not read for long; rows have no room either


def _spawn_writer(end: int, arena: StagingArena) -> None:
    """The process that is started forks the writer and ends."""
    assert arena.fd is not None
    command = module_command(MODULE, f"{end}", f"{arena.fd}", f"{os.getpid()}")
    try:
        status = subprocess.run(  # noqa: S603  # a list, no shell; our own module
            command,
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=(end, arena.fd),
            start_new_session=True,  # a terminal's signals are for the engine
            check=False,
            timeout=START_S,
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(NOT_STARTED.format(error)) from error
    if status:
        raise ConfigError(NOT_STARTED.format(f"it ended with {status}"))


def _start_writer(
    pipe: Pipe, start: pipe_messages.WriterStart
) -> tuple[pipe_messages.WriterReady, list[bytes]]:
    """The writer's first message, and those that came with it."""
    poll, deadline_s = select.poll(), time.monotonic() + START_S
    poll.register(pipe.fileno(), select.POLLIN)
    pipe.add(start)
    pipe.send_all(START_S)
    received: list[bytes] | None = []
    while received == [] and time.monotonic() < deadline_s:
        poll.poll(1e3 * START_S)
        received = pipe.receive()
    if not received:
        raise ConfigError(NOT_STARTED.format("it said nothing"))
    first = pipe_messages.WRITER_DECODER.decode(received[0])
    if isinstance(first, pipe_messages.WriterRefused):
        raise make_error(first.code, first.reason, ConfigError)
    assert isinstance(first, pipe_messages.WriterReady)
    return first, received[1:]
