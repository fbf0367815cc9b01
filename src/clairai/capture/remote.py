"""Takes captured rows; has them taken to their consumers by a process of its own, the clerk.

The engine's side of it. What is told goes through a socket that is never waited for; rows lie in
memory that both have. One small thread hears what became of them.
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
from dataclasses import dataclass
from typing import Final

from clairai import errors
from clairai.capture import pipe_messages, staging_reader
from clairai.capture.consumers import Policy
from clairai.capture.pipe import Pipe
from clairai.capture.results import CaptureResults, RowTotals
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import AnswerId
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.errors import ClairaiError, ConfigError

START_S: Final = 300.0  # a folder of many shards is looked through before it is written to
CLOSE_S: Final = 65.0  # a consumer gives up after 60
MAX_BEHIND_NBYTES: Final = 64 << 20  # of what could not be told
LOOK_S: Final = 0.25  # for what could not be sent at once
MODULE: Final = "clairai.capture.writer_process"
# Numbers that are measured of a few rows need one thread each of these libraries.
SINGLE_THREADED: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
WRITER_ENDED: Final = (
    "the process that takes captures has ended; rows that were not safe are lost, and nothing is "
    "captured until the engine is started again"
)
NOT_STARTED: Final = (
    "the process that takes captures could not be started, {}; see its messages above, or have "
    'rows taken in the engine\'s own process with "process": "engine" in capture'
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


class RemoteConsumer:
    """What the engine knows of a consumer in the clerk's process."""

    def __init__(self, where: str, policy: Policy) -> None:
        self.where, self.policy = where, policy
        self.state = RemoteConsumerState()

    def losses(self, _stream: int) -> int:
        """They are told with the answers."""
        return 0


class RemoteBackend:
    """The process, and what is known of what it does."""

    is_remote = True

    def __init__(
        self,
        line: Pipe,
        arena: StagingArena,
        ready: pipe_messages.WriterReady,
        early: Iterable[bytes] = (),
    ) -> None:
        """`early` is what was heard of it behind its greeting."""
        self._line, self.arena, self.process = line, arena, ready.process
        self._consumers = {
            one.name: RemoteConsumer(one.where, one.policy) for one in ready.consumers
        }
        self.results = CaptureResults(self._consumers)  # type: ignore[arg-type]  # all that is asked of them
        self.pending_nbytes = 0
        self.trouble = ""
        self._is_closing = False
        # Plans of tickets that are not counted as delivered: rows that die with the clerk.
        self._out: deque[pipe_messages.StagingPlanMessage | None] = deque()
        self._plan: pipe_messages.StagingPlanMessage | None = None
        self._delivered = 0
        self._lock = threading.Lock()
        for one in early:
            self._hear(one)
        self._thread = threading.Thread(target=self._listen, name="clairai-clerk", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, hello: pipe_messages.WriterStart, arena: StagingArena) -> RemoteBackend:
        """When all consumers are open; ConfigError if one cannot be."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                _spawn_writer(theirs.fileno(), arena)
            line = Pipe(ours)
            ready, early = _greet(line, hello)
            undo.pop_all()
        return cls(line, arena, ready, early)

    def may_block(self, names: Iterable[str]) -> bool:
        return any(self._consumers[name].policy == "block" for name in names)

    def begin(self, seat: AnswerId, order: CapturePlan) -> None:
        number = self.results.open(seat, order)
        if self.trouble:
            self.results.failed(seat, self.trouble)
        else:
            self._line.say(pipe_messages.BeginAnswer(number, *seat, order))

    def amend(self, seat: AnswerId, steering: str) -> None:
        self._say(pipe_messages.AmendAnswer(*seat, steering))

    def finish(self, seat: AnswerId) -> None:
        self._say(pipe_messages.FinishAnswer(*seat))

    def relabel(self, weights: str) -> None:
        self._say(pipe_messages.SetWeights(weights))
        self.post()

    def commit(self) -> None:
        self._say(pipe_messages.CommitFinished())
        self.post()

    def plan(self, told: pipe_messages.StagingPlanMessage) -> None:
        self._plan = told
        self._say(told)

    def put(self, told: pipe_messages.StagedMessage, _wait: staging_reader.Wait) -> None:
        plan = self._plan if isinstance(told, pipe_messages.StagedRows) else None
        with self._lock:
            if not self.trouble:
                self._out.append(plan)
                self._line.say(told)
                return
        self._lose([plan])

    def _say(self, message: pipe_messages.EngineMessage) -> None:
        if not self.trouble:
            self._line.say(message)

    def post(self) -> None:
        with contextlib.suppress(OSError):  # the thread that listens finds the end, and says so
            self._line.post()
        if self._line.unsent_nbytes > MAX_BEHIND_NBYTES:
            self._line.end()  # it has stood still for long: rows have had no room since

    def close(self) -> None:
        self._is_closing = True
        self._say(pipe_messages.CloseWriter())
        with contextlib.suppress(OSError):  # as above
            self._line.send_all(CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("captures are still being written; the process that does it goes on")
        else:
            self._line.close()
        self.arena.close()

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        try:
            while True:
                poll.poll(1e3 * LOOK_S)
                self.post()
                if (heard := self._line.listen()) is None:
                    break
                for one in heard:
                    self._hear(one)
        except Exception:  # as good as dead: nobody knows what becomes of rows
            _log.exception("what the process that takes captures says is not understood")
        self._ended()

    def _hear(self, message: bytes) -> None:
        report = pipe_messages.WRITER_DECODER.decode(message)
        assert isinstance(report, pipe_messages.WriterReport)
        with self._lock:
            for _ in range(report.delivered - self._delivered):
                self._out.popleft()
        self._delivered, self.pending_nbytes = report.delivered, report.pending_nbytes
        for one in report.standings:
            self._consumers[one.consumer].state = RemoteConsumerState(one.name, one.reason)
        self.results.hear(report.told, RowTotals(report.rows, report.dropped, report.discarded))

    def _ended(self) -> None:
        with self._lock:
            self.trouble = WRITER_ENDED
            lost = [*self._out]
            self._out.clear()
        if self._is_closing and not lost:
            return
        self._line.end()  # if it lives it writes what it has, and ends
        _log.error(WRITER_ENDED)
        for consumer in self._consumers.values():
            consumer.state = RemoteConsumerState("failed", WRITER_ENDED)
        self._lose(lost)
        self.results.fail_unsafe(WRITER_ENDED)

    def _lose(self, plans: Iterable[pipe_messages.StagingPlanMessage | None]) -> None:
        for plan in plans:
            counts = {} if plan is None else staging_reader.StagingPlanReader(plan).counts()
            for seat, count in counts.items():
                self.results.dropped(seat, count, WRITER_ENDED)


def _spawn_writer(end: int, arena: StagingArena) -> None:
    """The process that is started has a child, which is the clerk, and ends."""
    assert arena.fd is not None
    command = [sys.executable, "-P", "-m", MODULE, f"{end}", f"{arena.fd}", f"{os.getpid()}"]
    # It finds the packages that this process finds, and nothing in the folder it is started in.
    path = os.pathsep.join(os.path.abspath(one) for one in sys.path if one)
    try:
        status = subprocess.run(  # noqa: S603  # a list, no shell; our own module
            command,
            env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=(end, arena.fd),
            start_new_session=True,  # what a terminal sends is for the engine
            check=False,
        ).returncode
    except OSError as error:
        raise ConfigError(NOT_STARTED.format(error)) from error
    if status:
        raise ConfigError(NOT_STARTED.format(f"it ended with {status}"))


def _greet(
    line: Pipe, hello: pipe_messages.WriterStart
) -> tuple[pipe_messages.WriterReady, list[bytes]]:
    """What it says first, and what came with it."""
    poll, deadline_s = select.poll(), time.monotonic() + START_S
    poll.register(line.fileno(), select.POLLIN)
    line.say(hello)
    line.send_all(START_S)
    heard: list[bytes] | None = []
    while heard == [] and time.monotonic() < deadline_s:
        poll.poll(1e3 * START_S)
        heard = line.listen()
    if not heard:
        raise ConfigError(NOT_STARTED.format("it said nothing"))
    answered = pipe_messages.WRITER_DECODER.decode(heard[0])
    if isinstance(answered, pipe_messages.WriterRefused):
        raise _ERRORS.get(answered.code, ConfigError)(answered.reason)
    assert isinstance(answered, pipe_messages.WriterReady)
    return answered, heard[1:]
