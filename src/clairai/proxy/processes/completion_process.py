"""A completion process: answers completions on connections that the first process hands it.

It has an event loop, a reader of the ring and connections to the engine of its own. Whatever it is
not to answer goes back to the first process, connection and all. It ends with the first process,
however that ends. Started with `python -m`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from clairai.local.frozen_heap import frozen_heap
from clairai.local.private_socket import Connection
from clairai.local.thread_switch import switch_threads_often
from clairai.proxy.app import create_app, create_completion_server
from clairai.proxy.caller import Caller
from clairai.proxy.observe.log_lines import AccessLog, configure_logging
from clairai.proxy.observe.metrics import TimesObserver
from clairai.proxy.observe.observer import Observer
from clairai.proxy.observe.telemetry import Telemetry
from clairai.proxy.processes import messages
from clairai.proxy.processes.last_answers import LastAnswers
from clairai.proxy.processes.link import Link, accepted
from clairai.proxy.processes.moving_protocol import HandedConnection
from clairai.proxy.processes.placement import place_request
from clairai.proxy.processes.servers import CompletionServer
from clairai.proxy.processes.shared_counts import SharedCounts
from clairai.proxy.proxy import Proxy

BEGIN_S: Final = 30.0  # for the first message
ATTACH_S: Final = 5.0  # for the ring, before it takes connections
REPORT_TICKS: Final = 10  # of a tenth of a second: counts are told once a second
READ_ON_S: Final = 0.5  # for the thread that reads the ring to go round
_POLL_S: Final = 0.005
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessLink:
    """The first process, as this one sees it; a ConnectionMover."""

    def __init__(
        self,
        link: Link[messages.ToProcess],
        proxy: Proxy,
        counts: SharedCounts,
        times: TimesObserver,
    ) -> None:
        self._link, self._proxy = link, proxy
        self._counts, self._times = counts, times
        self._server: CompletionServer | None = None
        self._has_target = False
        self._coming: list[tuple[HandedConnection, int]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, server: CompletionServer) -> None:
        self._server = server
        proxy, link = self._proxy, self._link
        proxy.on_ring_change = lambda: link.send(messages.RingChange(proxy.feed.is_attached))
        proxy.upstream.on_outage = lambda: link.send(messages.EngineOutage())
        link.open(self._receive, _exit_at_once)
        self._spawn(self._begin())

    def beat(self, counter: int) -> None:
        if not self._proxy.feed.is_stalled:  # else it goes on and scores nothing
            self._counts.beat()
        if counter % REPORT_TICKS == 0 and self._link.is_open:
            self._report(0, has_read_on=False)

    # As a ConnectionMover

    def is_elsewhere(self, received: bytes) -> bool:
        place = place_request(received, self._proxy.settings)
        if place.kind == "run":
            return place.number != self._counts.number
        # A client may give several answers one id: the first process finds the newest of them.
        return place.kind != "completion"

    def move(self, number: int, received: bytes, fd: int) -> None:
        self._link.send(messages.MoveConnection(number, received), fd)

    def note_closed(self, number: int) -> None:
        self._link.send(messages.ConnectionClosed(number))

    # What the first process says

    def _receive(self, message: messages.ToProcess) -> None:
        proxy, server = self._proxy, self._server
        assert server is not None
        match message:
            case messages.TakeConnection(number, received, is_placed):
                fd = self._link.take_fd()
                if fd is None:
                    self._link.send(messages.NotTaken(number))
                else:
                    self._note_coming(HandedConnection(number, received, is_placed), fd)
            case messages.EngineState(health, is_ending):
                proxy.health.adopt(health)
                proxy.feed.is_engine_ending = is_ending
            case messages.RingTargets(targets):
                self._has_target = bool(targets)
                proxy.feed.set_targets({Path(path): start for path, start in targets})
            case messages.EndAnswers():
                proxy.upstream.hang_up()
            case messages.Stop():
                server.should_exit = True
            case _:
                self._answer(message)

    def _note_coming(self, handed: HandedConnection, fd: int) -> None:
        if not self._coming:
            asyncio.get_running_loop().call_soon(self._tell)
        self._coming.append((handed, fd))

    def _tell(self) -> None:
        told, self._coming = self._coming, []
        self._link.send(messages.Taken([handed.number for handed, _ in told]))
        self._take_when_sent(told)

    def _take_when_sent(self, told: list[tuple[HandedConnection, int]]) -> None:
        """Not before: what the first process does not know to be taken it hands to another."""
        if self._link.has_unsent:
            asyncio.get_running_loop().call_later(_POLL_S, self._take_when_sent, told)
            return
        assert self._server is not None
        for handed, fd in told:
            self._server.take(handed, fd)

    def _answer(self, message: messages.ToProcess) -> None:
        match message:
            case messages.FindScores(question, response_id, owner, rights):
                caller = Caller(owner, rights)
                rank, created_s = self._proxy.kept_scores.look_up(response_id, caller)
                self._link.send(messages.FoundScores(question, rank, created_s))
            case messages.AskCounts(question):
                self._spawn(self._report_when_read(question))

    async def _begin(self) -> None:
        """Take connections when the ring is attached, if there is one."""
        await self._wait_until(lambda: not self._has_target or self._proxy.feed.is_attached)
        self._counts.beat()
        self._link.send(messages.Ready())

    async def _wait_until(self, condition: Callable[[], bool], limit_s: float = ATTACH_S) -> bool:
        """What the thread that reads the ring counts wakes nobody: look again and again."""
        deadline_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return condition()

    async def _report_when_read(self, question: int) -> None:
        """So that rows which the first process has seen are in these counts."""
        feed = self._proxy.feed
        polls = feed.num_polls + 2  # the one that goes on now, and a whole one
        feed.hurry()
        has_read_on = await self._wait_until(
            lambda: feed.num_polls >= polls or not feed.is_attached, READ_ON_S
        )
        self._report(question, has_read_on=has_read_on)

    def _report(self, question: int, *, has_read_on: bool) -> None:
        proxy = self._proxy
        self._link.send(
            messages.Counts(
                question,
                proxy.counts(),
                self._times.report(),
                proxy.running_since_s(),
                has_read_on,
            )
        )

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def main() -> None:
    link_fd, memory_fd, end_fd, number, num_processes, parent = map(int, sys.argv[1:])
    _end_with(parent)
    for ignored in _IGNORED:  # they are for the first process, which says when to end
        signal.signal(ignored, signal.SIG_IGN)
    for fd in (link_fd, memory_fd, end_fd):
        os.set_inheritable(fd, False)
    counts = SharedCounts(memory_fd, number=number, num_processes=num_processes)
    sock = socket.socket(fileno=link_fd)
    serve(_receive_begin(sock), Link(sock, accepted(messages.ToProcess)), counts, end_fd)


def serve(
    begin: messages.Begin, link: Link[messages.ToProcess], counts: SharedCounts, end_fd: int
) -> None:
    """Until the first process says that it is to end; if this one hangs, through `end_fd`."""
    settings = begin.read_settings()
    if begin.log_format is not None:
        configure_logging(begin.log_format, _write_line)
    switch_threads_often()
    times = TimesObserver()
    observers: list[Observer] = [AccessLog(), times]
    telemetry = Telemetry.from_environ(os.environ)
    if telemetry is not None:
        observers.append(telemetry)
    app = create_app(settings, observers=observers, shared=counts)
    first = ProcessLink(link, app.state.proxy, counts, times)
    server = create_completion_server(app, settings, first)
    LastAnswers(end_fd, server.connections)
    with frozen_heap():
        server.run(sockets=[])
    if telemetry is not None:
        telemetry.close()


def _receive_begin(sock: socket.socket) -> messages.Begin:
    """It is read as a whole and no further: what follows is for the link."""
    reading: Connection[messages.Begin] = Connection(sock, accepted(messages.Begin), max_fds=1)
    begin, _ = reading.receive(BEGIN_S)
    return begin


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the first process ends, even if it is suspended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        _exit_at_once()


def _exit_at_once() -> None:
    """The first process is gone: nothing is left to do, and there is nothing to remove."""
    os._exit(0)


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
