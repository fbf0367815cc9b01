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
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from clairai import errors
from clairai.capture import pipe_messages
from clairai.capture.consumers import Policy
from clairai.capture.pipe import Pipe
from clairai.capture.results import CaptureResults, RowTotals
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import Wait, count_layout_rows
from clairai.engine.capture.capture_plan import AnswerId, CapturePlan
from clairai.errors import ClairaiError, ConfigError
from clairai.wire.capture_messages import ConsumerStatus

START_S: Final = 300.0  # a consumer checks a folder of many shards before it writes to it
CLOSE_S: Final = 65.0  # a consumer gives up after 60
MAX_UNSENT_NBYTES: Final = 64 << 20
SEND_AGAIN_S: Final = 0.25
MODULE: Final = "clairai.capture.writer_process"
# The writer measures a few rows at a time: these libraries need no threads of their own for that.
SINGLE_THREADED: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
WRITER_ENDED: Final = (
    "the capture writer process has ended; rows that were not safe are lost, and nothing is "
    "captured until the engine is started again"
)
NOT_STARTED: Final = (
    "the capture writer process could not be started, {}; see its messages above, or capture "
    'in the engine\'s own process with "process": "engine" in capture'
)
_ERRORS: Final = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ClairaiError)
}
_log: Final = logging.getLogger("clairai.capture")


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

    def status(self, name: str) -> ConsumerStatus:
        return msgspec.structs.replace(self._reported, consumer=name, where=self.where)

    def losses(self, _stream: int) -> int:
        """Reported with the answers."""
        return 0


class RemoteBackend:
    """The writer process, and what it has reported."""

    is_remote = True

    def __init__(
        self,
        pipe: Pipe,
        arena: StagingArena,
        ready: pipe_messages.WriterReady,
        reports: Iterable[bytes] = (),
    ) -> None:
        """`reports` came right behind the writer's first message."""
        self._pipe, self.arena, self.process = pipe, arena, ready.process
        self._consumers = {
            one.name: RemoteConsumer(one.where, one.policy) for one in ready.consumers
        }
        self.results = CaptureResults(self._consumers)  # type: ignore[arg-type]  # it uses no more
        self.pending_nbytes = 0
        self.failure = ""
        self._is_closing = False
        # Layouts of staged messages that are not reported as delivered: they die with the writer.
        self._undelivered: deque[pipe_messages.StagingLayout | None] = deque()
        self._layout: pipe_messages.StagingLayout | None = None
        self._delivered = 0
        self._lock = threading.Lock()
        for report in reports:
            self._apply(report)
        self._thread = threading.Thread(target=self._run, name="clairai-reports", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, start: pipe_messages.WriterStart, arena: StagingArena) -> RemoteBackend:
        """Returns when all consumers are open; ConfigError if one cannot be opened."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                _spawn_writer(theirs.fileno(), arena)
            pipe = Pipe(ours)
            ready, reports = _start_writer(pipe, start)
            undo.pop_all()
        return cls(pipe, arena, ready, reports)

    def may_block(self, consumers: Iterable[str]) -> bool:
        return any(self._consumers[name].policy == "block" for name in consumers)

    def begin(self, answer: AnswerId, plan: CapturePlan) -> None:
        number = self.results.open(answer, plan)
        if self.failure:
            self.results.fail(answer, self.failure)
        else:
            self._pipe.add(pipe_messages.BeginAnswer(number, *answer, plan))

    def amend(self, answer: AnswerId, steering: str) -> None:
        self._add(pipe_messages.AmendAnswer(*answer, steering))

    def finish(self, answer: AnswerId) -> None:
        self._add(pipe_messages.FinishAnswer(*answer))

    def set_weights(self, weights: str) -> None:
        self._add(pipe_messages.SetWeights(weights))
        self.send()

    def commit(self) -> None:
        self._add(pipe_messages.CommitFinished())
        self.send()

    def set_layout(self, layout: pipe_messages.StagingLayout) -> None:
        self._layout = layout
        self._add(layout)

    def put(self, message: pipe_messages.StagedMessage, _wait: Wait) -> None:
        layout = self._layout if isinstance(message, pipe_messages.StagedRows) else None
        with self._lock:
            if not self.failure:
                self._undelivered.append(layout)
                self._pipe.add(message)
                return
        self._lose([layout])

    def _add(self, message: pipe_messages.EngineMessage) -> None:
        if not self.failure:
            self._pipe.add(message)

    def send(self) -> None:
        with contextlib.suppress(OSError):  # the receiving thread finds the end and reports it
            self._pipe.send()
        if self._pipe.unsent_nbytes > MAX_UNSENT_NBYTES:
            self._pipe.shut_down()  # the writer has not read for long; rows have no room either

    def close(self) -> None:
        self._is_closing = True
        self._add(pipe_messages.CloseWriter())
        with contextlib.suppress(OSError):  # as in send()
            self._pipe.send_all(CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("captures are still being written; the capture writer process goes on")
        else:
            self._pipe.close()
        self.arena.close()

    def _run(self) -> None:
        """The thread: receives reports, and sends what could not be sent at once."""
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN)
        try:
            while True:
                poll.poll(1e3 * SEND_AGAIN_S)
                self.send()
                if (messages := self._pipe.receive()) is None:
                    break
                for message in messages:
                    self._apply(message)
        except Exception:  # as good as dead: nobody knows what becomes of rows
            _log.exception("a message of the capture writer process is not understood")
        self._fail()

    def _apply(self, message: bytes) -> None:
        report = pipe_messages.WRITER_DECODER.decode(message)
        assert isinstance(report, pipe_messages.WriterReport)
        with self._lock:
            for _ in range(report.delivered - self._delivered):
                self._undelivered.popleft()
        self._delivered, self.pending_nbytes = report.delivered, report.pending_nbytes
        for one in report.standings:
            self._consumers[one.consumer].apply(one)
        self.results.apply(report.told, RowTotals(report.rows, report.dropped, report.discarded))

    def _fail(self) -> None:
        """The writer has ended, or is given up."""
        with self._lock:
            self.failure = WRITER_ENDED
            lost = [*self._undelivered]
            self._undelivered.clear()
        if self._is_closing and not lost:
            return
        self._pipe.shut_down()  # a writer that lives writes what it has, and ends
        _log.error(WRITER_ENDED)
        for consumer in self._consumers.values():
            consumer.fail(WRITER_ENDED)
        self._lose(lost)
        self.results.fail_unsafe(WRITER_ENDED)

    def _lose(self, layouts: Iterable[pipe_messages.StagingLayout | None]) -> None:
        for layout in layouts:
            counts = {} if layout is None else count_layout_rows(layout)
            for answer, count in counts.items():
                self.results.add_dropped(answer, count, WRITER_ENDED)


def _spawn_writer(end: int, arena: StagingArena) -> None:
    """The process that is started forks the writer and ends."""
    assert arena.fd is not None
    command = [sys.executable, "-P", "-m", MODULE, f"{end}", f"{arena.fd}", f"{os.getpid()}"]
    # It finds the packages of this process, and nothing in the current folder.
    path = os.pathsep.join(os.path.abspath(one) for one in sys.path if one)
    try:
        status = subprocess.run(  # noqa: S603  # a list, no shell; our own module
            command,
            env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=(end, arena.fd),
            start_new_session=True,  # a terminal's signals are for the engine
            check=False,
        ).returncode
    except OSError as error:
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
        raise _ERRORS.get(first.code, ConfigError)(first.reason)
    assert isinstance(first, pipe_messages.WriterReady)
    return first, received[1:]
