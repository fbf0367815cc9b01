"""The completion processes of a proxy, as its first process sees them.

Starts them, hands connections to the one that has the fewest, replaces one that ends or hangs, and
adds up what they count. Runs in: the first process, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from clairai.local.heartbeat import read_process_state
from clairai.local.own_clock import OwnClock
from clairai.local.private_socket import close_all
from clairai.local.run_module import module_command, module_environment
from clairai.proxy.capture_watch import HealthProblem
from clairai.proxy.connections import Connections, OpenConnection
from clairai.proxy.http_protocol import write_refusal
from clairai.proxy.observe.log_lines import configured_format
from clairai.proxy.processes import messages
from clairai.proxy.processes.last_answers import end_connection
from clairai.proxy.processes.link import Link, accepted
from clairai.proxy.processes.moving_protocol import HandedConnection
from clairai.proxy.processes.placement import COMPLETION, Place, place_request
from clairai.proxy.processes.shared_counts import SharedCounts
from clairai.proxy.processes.totals import NOTHING, TotalCounts, add_counts, add_ended_process
from clairai.proxy.proxy import Proxy
from clairai.proxy.ring_feed import RingTargets
from clairai.proxy.upstream import OutOfDescriptors

MODULE: Final = "clairai.proxy.processes.completion_process"
# Variables with keys: a completion process gets digests of them, over its socket.
KEY_VARIABLES: Final = ("CLAIRAI_API_KEY", "VLLM_API_KEY", "CLAIRAI_UPSTREAM_API_KEY")
LOOK_S: Final = 0.25
FULL_S: Final = 1.0  # for so long a process without descriptors gets no connections
LATE_S: Final = 2.0  # after so long without a beat a process gets no new connections
STOPPED_S: Final = 3.0  # after so long a suspended process is replaced
SILENT_S: Final = 10.0  # and one whose event loop, or reader of the ring, does not go round
LAST_S: Final = 2.0  # for a process that has to end to tell its clients why
START_S: Final = 60.0  # and one that does not begin
ANSWER_S: Final = 2.0  # for an answer of a process that goes on
STOP_S: Final = 3.0  # for answers that are being sent when the proxy ends
LONG_S: Final = 60.0  # one that ran for so long is replaced at once
MAX_PAUSE_S: Final = 30.0
_log: Final = logging.getLogger(__name__)

Take = Callable[[HandedConnection, int], None]


class CompletionProcess:
    """One process, from its start to its end."""

    def __init__(
        self, number: int, popen: subprocess.Popen[bytes], sock: socket.socket, end_fd: int
    ) -> None:
        """Takes over the socket, and the descriptor through which the process is told to end."""
        self.number, self.popen = number, popen
        self._end_fd = end_fd
        self.link: Link[messages.FromProcess] = Link(sock, accepted(messages.FromProcess))
        self.started_s = time.monotonic()
        self.is_ready = self.is_attached = False
        self.connections: set[int] = set()
        self.untaken: dict[int, tuple[HandedConnection, int]] = {}  # ours, until it says so
        self._full_s = -math.inf  # when it last had no descriptor for a connection
        self.last = NOTHING  # that it reported
        self.questions: dict[int, asyncio.Future[messages.Answer | None]] = {}
        self.ended = asyncio.Event()
        self._beat_s = self._progress_s = 0.0
        self._stopped_s: float | None = None
        self._told_to_end_s: float | None = None

    @property
    def pid(self) -> int:
        return self.popen.pid

    def note_beat(self, beat_s: float, own_s: float) -> None:
        """`own_s` is the time in which this process itself was running."""
        if beat_s != self._beat_s or not self._progress_s:
            self._beat_s, self._progress_s = beat_s, own_s
        state = read_process_state(self.pid)
        is_stopped = state is not None and state.letter == "T"
        self._stopped_s = (self._stopped_s or own_s) if is_stopped else None

    @property
    def is_full(self) -> bool:
        return time.monotonic() - self._full_s < FULL_S

    def note_full(self) -> None:
        self._full_s = time.monotonic()

    def find_end(self, own_s: float) -> str | None:
        """Why it has to be replaced; None while it goes on."""
        if self._stopped_s is not None and own_s - self._stopped_s >= STOPPED_S:
            return "is suspended"
        limit_s = SILENT_S if self.is_ready else START_S
        return "makes no progress" if own_s - self._progress_s >= limit_s else None

    @property
    def is_ending(self) -> bool:
        return self._told_to_end_s is not None

    def tell_to_end(self, reason: str, own_s: float) -> None:
        """Have it end, and tell its clients why."""
        self._told_to_end_s = own_s
        os.write(self._end_fd, reason.encode())
        self.popen.send_signal(signal.SIGCONT)  # one that is suspended can tell nobody

    def kill_late(self, own_s: float) -> None:
        """Kill it if it has not ended by itself."""
        if self._told_to_end_s is not None and own_s - self._told_to_end_s >= LAST_S:
            self.popen.kill()

    def close(self) -> None:
        self.link.close()
        os.close(self._end_fd)


class CompletionProcesses:
    """All of them; a ConnectionMover for the connections that the first process has itself."""

    def __init__(self, proxy: Proxy, counts: SharedCounts, memory_fd: int) -> None:
        """Takes over the descriptor of the shared counts."""
        self._proxy, self._counts, self._memory_fd = proxy, counts, memory_fd
        self._settings = proxy.settings
        self._running: dict[int, CompletionProcess] = {}  # by number, from 1 on
        self._lost_since: dict[int, float] = {}  # numbers without a process, in s since 1970
        self._connections: Connections | None = None
        self._take_here: Take | None = None
        self._open: dict[int, OpenConnection] = {}  # by number
        self._numbers, self._questions = itertools.count(1), itertools.count(1)
        self._ended = NOTHING  # what processes that have ended had counted
        self._num_restarts = self._num_orphaned = 0
        self._targets: RingTargets = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def open(self, connections: Connections, take_here: Take) -> None:
        """Start them; until one is ready the first process answers completions itself."""
        self._connections, self._take_here = connections, take_here
        loop, proxy = asyncio.get_running_loop(), self._proxy

        def send_state() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the proxy has ended
                loop.call_soon_threadsafe(self._send_state)

        proxy.health.on_change = send_state
        proxy.health.find_own_problems = self.find_problems
        proxy.feed.on_targets = self._set_targets
        for number in range(1, self._counts.num_processes):
            self._spawn(self._keep(number))
        self._spawn(self._watch())

    async def close(self) -> None:
        """End all of them."""
        self._is_closing = True
        processes = list(self._running.values())
        for process in processes:
            process.link.send(messages.Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*(process.ended.wait() for process in processes))
        for process in processes:
            process.popen.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in list(self._running.values()):
            self._bury(process)
        os.close(self._memory_fd)

    # Connections

    def take_new(self, peer: str, fd: int) -> None:
        """A connection that was just accepted; takes over the descriptor."""
        assert self._connections is not None
        number = next(self._numbers)
        self._open[number] = self._connections.open(peer, lambda: None)
        self._hand(self._choose(), HandedConnection(number), fd)

    def is_elsewhere(self, received: bytes) -> bool:
        place = place_request(received, self._settings)
        if place.kind == "completion":
            return self._choose() is not None
        return place.kind == "scores" or (place.kind == "run" and place.number in self._running)

    def move(self, number: int, received: bytes, fd: int) -> None:
        place = place_request(received, self._settings)
        handed = HandedConnection(number, received, is_placed=True)
        if place.kind == "scores":
            self._spawn(self._hand_to_scores(place, handed, fd))
        elif place.kind == "run":
            self._hand(self._ready(place.number), handed, fd)
        else:
            self._hand(self._choose() if place.kind == "completion" else None, handed, fd)

    def note_closed(self, number: int) -> None:
        assert self._connections is not None
        self._connections.close(self._open.pop(number))

    def _choose(self) -> CompletionProcess | None:
        """The one with the fewest connections; one that is late only if all are.

        None if all are full, or none is ready.
        """
        ready = [one for one in self._running.values() if one.is_ready and not one.is_full]
        return min(ready, key=lambda one: (self._is_late(one), len(one.connections)), default=None)

    def _is_late(self, process: CompletionProcess) -> bool:
        return time.monotonic() - self._counts.last_beat_s(process.number) > LATE_S

    def _ready(self, number: int) -> CompletionProcess | None:
        process = self._running.get(number)
        return process if process is not None and process.is_ready else None

    def _hand(self, process: CompletionProcess | None, handed: HandedConnection, fd: int) -> None:
        """None: the first process answers. Takes over the descriptor."""
        try:
            copied = None if process is None else os.dup(fd)
        except OSError:  # there is no descriptor for another
            copied = None
        if process is None or copied is None:
            assert self._take_here is not None
            self._take_here(handed, fd)
            return
        process.connections.add(handed.number)
        process.untaken[handed.number] = (handed, fd)
        message = messages.TakeConnection(handed.number, handed.received, handed.is_placed)
        process.link.send(message, copied)

    def _answer_for(self, process: CompletionProcess, number: int) -> None:
        """A process has no descriptor for a connection: what it alone can answer is refused."""
        handed, fd = process.untaken[number]
        if not handed.received or place_request(handed.received, self._settings) == COMPLETION:
            self._hand_again(process, number)
            return
        del process.untaken[number]
        process.connections.remove(number)
        self.note_closed(number)
        with contextlib.suppress(OSError):  # the client has left
            end_connection(fd, write_refusal(OutOfDescriptors()))
        os.close(fd)

    def _hand_again(self, process: CompletionProcess, number: int) -> None:
        """A connection that this process has not taken goes to another."""
        process.connections.remove(number)
        self._hand(self._choose(), *process.untaken.pop(number))

    async def _hand_to_scores(self, place: Place, handed: HandedConnection, fd: int) -> None:
        """To whoever has these scores, or knows best why nobody has.

        Waits for a process that is late: its scores are there until it is replaced.
        """
        caller = place.caller
        assert caller is not None
        asked = [one for one in self._running.values() if one.is_ready]
        answers = await asyncio.gather(
            *(
                self._ask(
                    one,
                    lambda n: messages.FindScores(n, place.id, caller.name, caller.rights),
                    limit_s=None,
                )
                for one in asked
            )
        )
        own = self._proxy.kept_scores.look_up(place.id, caller)
        best, found = own, None
        for process, answer in zip(asked, answers, strict=True):
            if isinstance(answer, messages.FoundScores) and process.is_ready:
                rank = (answer.rank, answer.created_s)
                best, found = (rank, process) if rank > best else (best, found)
        self._hand(found, handed, fd)

    # What all of them are told

    def end_answers(self) -> None:
        self._send_all(messages.EndAnswers())

    def _set_targets(self, targets: RingTargets) -> None:
        self._targets = targets
        self._send_all(_ring_targets(targets))

    def _send_state(self) -> None:
        self._send_all(self._state())

    def _state(self) -> messages.EngineState:
        return messages.EngineState(self._proxy.health.known, self._proxy.feed.is_engine_ending)

    def _send_all(self, message: messages.Message) -> None:
        for process in self._live():
            process.link.send(message)

    def _live(self) -> list[CompletionProcess]:
        return [one for one in self._running.values() if not one.ended.is_set()]

    # What they are asked

    @property
    def is_reading(self) -> bool:
        return all(one.is_attached for one in self._running.values() if one.is_ready)

    def ready_pids(self) -> dict[int, int]:
        """The processes that take connections, by number."""
        return {one.number: one.pid for one in self._running.values() if one.is_ready}

    def num_connections(self) -> dict[int, int]:
        """Of each process, by its number."""
        return {one.number: len(one.connections) for one in self._running.values()}

    async def total_counts(self) -> TotalCounts:
        ring = self._proxy.feed.counts(0)
        num_rows = ring.rows + ring.orphaned
        asked = [one for one in self._live() if one.is_ready and not self._is_late(one)]
        questions = (self._ask(one, messages.AskCounts, limit_s=ANSWER_S) for one in asked)
        await asyncio.gather(*questions)
        # From here on nothing waits: all of it is of one moment.
        reports = [self._ended, *(one.last for one in self._running.values())]
        total = add_counts(self._proxy.counts(), [report.counts for report in reports])
        if all(report.has_read_on for report in reports):
            self._num_orphaned = max(self._num_orphaned, num_rows - total.ring.rows)
        counts = replace(
            total,
            ring=replace(total.ring, orphaned=self._num_orphaned),
            processes=sum(one.is_ready for one in self._running.values()),
            process_restarts=self._num_restarts,
        )
        return TotalCounts(counts, [report.times for report in reports])

    def find_problems(self) -> list[HealthProblem]:
        """Of processes that were lost, or are late, or do not read the ring."""
        found = [
            HealthProblem(f"completion process {number} has ended and is started again", since)
            for number, since in self._lost_since.items()
        ]
        for one in self._running.values():
            if one.is_ready and self._is_late(one):
                silent_s = time.monotonic() - self._counts.last_beat_s(one.number)
                reason = f"completion process {one.number} makes no progress"
                found.append(HealthProblem(reason, time.time() - silent_s))
        return found

    async def _ask(
        self,
        process: CompletionProcess,
        make: Callable[[int], messages.Message],
        *,
        limit_s: float | None,
    ) -> messages.Answer | None:
        """None if it does not answer in time, or ends, as one does that makes no progress."""
        question = next(self._questions)
        answer: asyncio.Future[messages.Answer | None]
        answer = process.questions[question] = asyncio.get_running_loop().create_future()
        process.link.send(make(question))
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            process.questions.pop(question, None)

    # Their lives

    async def _keep(self, number: int) -> None:
        """Have a process of this number, one after the other."""
        num_short = 0  # in a row that did not run for long
        while not self._is_closing:
            began_s = time.monotonic()
            try:
                process = self._start(number)
            except OSError as error:
                _log.error("completion process %d cannot be started: %s", number, error.strerror)
                self._lost_since.setdefault(number, time.time())
            else:
                await process.ended.wait()
                await asyncio.to_thread(process.popen.wait)
                self._bury(process)
            if self._is_closing:
                return
            num_short = 1 if time.monotonic() - began_s >= LONG_S else num_short + 1
            await asyncio.sleep(min(2.0 ** (num_short - 1) - 1.0, MAX_PAUSE_S))
            self._num_restarts += 1

    def _start(self, number: int) -> CompletionProcess:
        ours, theirs = socket.socketpair()
        end_read, end_write = os.pipe()
        fds = (theirs.fileno(), self._memory_fd, end_read)
        arguments = (*fds, number, self._counts.num_processes, os.getpid())
        environ = {k: v for k, v in module_environment().items() if k not in KEY_VARIABLES}
        with theirs, contextlib.ExitStack() as closing, contextlib.ExitStack() as undo:
            closing.callback(os.close, end_read)
            undo.callback(ours.close)
            undo.callback(os.close, end_write)
            popen = subprocess.Popen(  # noqa: S603  # a list, no shell; our own module
                module_command(MODULE, *map(str, arguments)),
                env=environ,
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
            undo.pop_all()
        process = self._running[number] = CompletionProcess(number, popen, ours, end_write)
        process.link.open(
            lambda message: self._receive(process, message), lambda: self._end(process)
        )
        process.link.send(messages.Begin.of(self._settings, configured_format()))
        process.link.send(self._state())
        # No request of its own has rows from before it began.
        newest: RingTargets = dict.fromkeys(self._targets, "newest")
        process.link.send(_ring_targets(newest if self._num_restarts else self._targets))
        return process

    def _receive(self, process: CompletionProcess, message: messages.FromProcess) -> None:
        match message:
            case messages.Ready():
                if not process.is_ending:
                    process.is_ready = True
                    self._lost_since.pop(process.number, None)
            case messages.RingChange(is_attached):
                process.is_attached = is_attached
            case messages.EngineOutage():
                self._proxy.upstream.note_outage()
            case messages.Taken(numbers):
                for number in numbers:
                    os.close(process.untaken.pop(number)[1])
            case messages.NotTaken(number):
                process.note_full()
                self._answer_for(process, number)
            case messages.ConnectionClosed(number):
                process.connections.remove(number)
                self.note_closed(number)
            case messages.MoveConnection(number, received):
                process.connections.remove(number)
                fd = process.link.take_fd()
                if fd is None:
                    self.note_closed(number)
                else:
                    self.move(number, received, fd)
            case messages.Counts():
                self._note_counts(process, message)
        if isinstance(message, messages.Answer):
            answer = process.questions.get(message.question)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _note_counts(self, process: CompletionProcess, report: messages.Counts) -> None:
        if report.counts.ring.records_lost > process.last.counts.ring.records_lost:
            self._proxy.feed.note_loss_elsewhere()
        process.last = report

    def _end(self, process: CompletionProcess) -> None:
        """Its link has ended, so it is gone, or of no use any more."""
        process.popen.kill()
        process.ended.set()
        if not process.is_ending:
            self._note_lost(process)
        if not self._is_closing:
            for number in list(process.untaken):
                self._hand_again(process, number)

    def _note_lost(self, process: CompletionProcess) -> None:
        """It answers nothing any more, and what it kept is gone."""
        process.is_ready = False
        self._proxy.kept_scores.note_lost_process(process.last.counts.kept_answers)
        for answer in process.questions.values():
            if not answer.done():
                answer.set_result(None)
        if not self._is_closing:
            self._lost_since.setdefault(process.number, time.time())

    def _bury(self, process: CompletionProcess) -> None:
        """Give back what it held, and keep what it had counted; its connections are closed."""
        del self._running[process.number]
        process.close()
        process.popen.wait()
        close_all(fd for _, fd in process.untaken.values())
        self._counts.clear(process.number)
        for number in process.connections:
            self.note_closed(number)
        self._ended = add_ended_process(self._ended, process.last, time.monotonic())
        if not self._is_closing:
            num_cut = process.last.counts.streams
            _log.error(
                "completion process %d (process %d) has ended (%s); %d completions ended with it",
                *(process.number, process.pid, _describe_end(process.popen.returncode), num_cut),
            )

    async def _watch(self) -> None:
        clock = OwnClock()
        while True:
            await asyncio.sleep(LOOK_S)
            own_s = clock.tick()
            for process in self._live():
                self._watch_one(process, own_s)

    def _watch_one(self, process: CompletionProcess, own_s: float) -> None:
        if process.is_ending:
            process.kill_late(own_s)
            return
        process.note_beat(self._counts.last_beat_s(process.number), own_s)
        reason = process.find_end(own_s)
        if reason is not None:
            _log.error("completion process %d %s: it is ended", process.number, reason)
            self._note_lost(process)
            process.tell_to_end(reason, own_s)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ring_targets(targets: RingTargets) -> messages.RingTargets:
    return messages.RingTargets([(str(path), start) for path, start in targets.items()])


def _describe_end(code: int) -> str:
    return f"code {code}" if code >= 0 else signal.Signals(-code).name
