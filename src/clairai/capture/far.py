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
from clairai.capture import landed, tickets
from clairai.capture.arena import Arena
from clairai.capture.consumers import Policy
from clairai.capture.line import Line
from clairai.capture.order import Order
from clairai.capture.results import Results, Totals
from clairai.capture.taken import Seat
from clairai.errors import ClairaiError, ConfigError

START_S: Final = 300.0  # a folder of many shards is looked through before it is written to
CLOSE_S: Final = 65.0  # a consumer gives up after 60
MAX_BEHIND_NBYTES: Final = 64 << 20  # of what could not be told
LOOK_S: Final = 0.25  # for what could not be sent at once
MODULE: Final = "clairai.capture.clerk"
# Numbers that are measured of a few rows need one thread each of these libraries.
ALONE: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
ENDED: Final = (
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
class FarState:
    name: str = "writing"
    reason: str = ""


class FarConsumer:
    """What the engine knows of a consumer in the clerk's process."""

    def __init__(self, where: str, policy: Policy) -> None:
        self.where, self.policy = where, policy
        self.state = FarState()

    def losses(self, _stream: int) -> int:
        """They are told with the answers."""
        return 0


class FarClerk:
    """The process, and what is known of what it does."""

    is_apart = True

    def __init__(
        self,
        line: Line,
        arena: Arena,
        ready: tickets.Ready,
        early: Iterable[bytes] = (),
    ) -> None:
        """`early` is what was heard of it behind its greeting."""
        self._line, self.arena, self.process = line, arena, ready.process
        self._consumers = {one.name: FarConsumer(one.where, one.policy) for one in ready.consumers}
        self.results = Results(self._consumers)  # type: ignore[arg-type]  # all that is asked of them
        self.pending_nbytes = 0
        self.trouble = ""
        self._is_closing = False
        # Plans of tickets that are not counted as delivered: rows that die with the clerk.
        self._out: deque[tickets.Plan | None] = deque()
        self._plan: tickets.Plan | None = None
        self._delivered = 0
        self._lock = threading.Lock()
        for one in early:
            self._hear(one)
        self._thread = threading.Thread(target=self._listen, name="clairai-clerk", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, hello: tickets.Hello, arena: Arena) -> FarClerk:
        """When all consumers are open; ConfigError if one cannot be."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                _spawn(theirs.fileno(), arena)
            line = Line(ours)
            ready, early = _greeted(line, hello)
            undo.pop_all()
        return cls(line, arena, ready, early)

    def may_block(self, names: Iterable[str]) -> bool:
        return any(self._consumers[name].policy == "block" for name in names)

    def begin(self, seat: Seat, order: Order) -> None:
        number = self.results.open(seat, order)
        if self.trouble:
            self.results.failed(seat, self.trouble)
        else:
            self._line.say(tickets.Begin(number, *seat, order))

    def amend(self, seat: Seat, steering: str) -> None:
        self._say(tickets.Amend(*seat, steering))

    def finish(self, seat: Seat) -> None:
        self._say(tickets.Finish(*seat))

    def relabel(self, weights: str) -> None:
        self._say(tickets.Relabel(weights))
        self.post()

    def commit(self) -> None:
        self._say(tickets.Commit())
        self.post()

    def plan(self, told: tickets.Plan) -> None:
        self._plan = told
        self._say(told)

    def put(self, told: tickets.Row, _wait: landed.Wait) -> None:
        plan = self._plan if isinstance(told, tickets.Ticket) else None
        with self._lock:
            if not self.trouble:
                self._out.append(plan)
                self._line.say(told)
                return
        self._lose([plan])

    def _say(self, message: tickets.Asked) -> None:
        if not self.trouble:
            self._line.say(message)

    def post(self) -> None:
        with contextlib.suppress(OSError):  # the thread that listens finds the end, and says so
            self._line.post()
        if self._line.behind_nbytes > MAX_BEHIND_NBYTES:
            self._line.end()  # it has stood still for long: rows have had no room since

    def close(self) -> None:
        self._is_closing = True
        self._say(tickets.Close())
        with contextlib.suppress(OSError):  # as above
            self._line.post_all(CLOSE_S)
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
        report = tickets.ANSWERED.decode(message)
        assert isinstance(report, tickets.Report)
        with self._lock:
            for _ in range(report.delivered - self._delivered):
                self._out.popleft()
        self._delivered, self.pending_nbytes = report.delivered, report.pending_nbytes
        for one in report.standings:
            self._consumers[one.consumer].state = FarState(one.name, one.reason)
        self.results.hear(report.told, Totals(report.rows, report.dropped, report.discarded))

    def _ended(self) -> None:
        with self._lock:
            self.trouble = ENDED
            lost = [*self._out]
            self._out.clear()
        if self._is_closing and not lost:
            return
        self._line.end()  # if it lives it writes what it has, and ends
        _log.error(ENDED)
        for consumer in self._consumers.values():
            consumer.state = FarState("failed", ENDED)
        self._lose(lost)
        self.results.abandon(ENDED)

    def _lose(self, plans: Iterable[tickets.Plan | None]) -> None:
        for plan in plans:
            counts = {} if plan is None else landed.Plan(plan).counts()
            for seat, count in counts.items():
                self.results.dropped(seat, count, ENDED)


def _spawn(end: int, arena: Arena) -> None:
    """The process that is started has a child, which is the clerk, and ends."""
    assert arena.fd is not None
    command = [sys.executable, "-P", "-m", MODULE, f"{end}", f"{arena.fd}", f"{os.getpid()}"]
    # It finds the packages that this process finds, and nothing in the folder it is started in.
    path = os.pathsep.join(os.path.abspath(one) for one in sys.path if one)
    try:
        status = subprocess.run(  # noqa: S603  # a list, no shell; our own module
            command,
            env={**os.environ, **ALONE, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=(end, arena.fd),
            start_new_session=True,  # what a terminal sends is for the engine
            check=False,
        ).returncode
    except OSError as error:
        raise ConfigError(NOT_STARTED.format(error)) from error
    if status:
        raise ConfigError(NOT_STARTED.format(f"it ended with {status}"))


def _greeted(line: Line, hello: tickets.Hello) -> tuple[tickets.Ready, list[bytes]]:
    """What it says first, and what came with it."""
    poll, deadline_s = select.poll(), time.monotonic() + START_S
    poll.register(line.fileno(), select.POLLIN)
    line.say(hello)
    line.post_all(START_S)
    heard: list[bytes] | None = []
    while heard == [] and time.monotonic() < deadline_s:
        poll.poll(1e3 * START_S)
        heard = line.listen()
    if not heard:
        raise ConfigError(NOT_STARTED.format("it said nothing"))
    answered = tickets.ANSWERED.decode(heard[0])
    if isinstance(answered, tickets.Refused):
        raise _ERRORS.get(answered.code, ConfigError)(answered.reason)
    assert isinstance(answered, tickets.Ready)
    return answered, heard[1:]
