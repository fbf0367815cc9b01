"""Takes a socket and an arena of an engine; gives its captured rows to the consumers. A process.

`python -m clairai.capture.clerk SOCKET ARENA ENGINE`: two descriptors and the engine's process id.
It ends when the engine closes the socket, in whatever way: then all rows that had come are given
on, and the consumers closed. Imports neither torch nor vllm.
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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from clairai.capture import tickets
from clairai.capture.arena import Arena
from clairai.capture.collector import Collector
from clairai.capture.consumers import Consumer, open_consumers
from clairai.capture.guarded import Guarded
from clairai.capture.inbox import Pace
from clairai.capture.landed import Reader
from clairai.capture.line import Line
from clairai.capture.near import origins
from clairai.capture.setting import ConsumerSpec
from clairai.capture.teller import Teller
from clairai.errors import ClairaiError, ConfigError

NICENESS: Final = 5
LINGER_S: Final = 0.25
PART_IN_BATCH: Final = 8  # of the arena, that goes on at once
# To wake a process costs whoever does it, here the engine in each step, more than to leave it
# something to find: while steps come this one looks for them by itself.
LISTEN_S: Final = 0.004
AWAKE: Final = 100  # looks in vain
LOOK_S: Final = 0.0005  # between two looks at what the device has written
LAST_S: Final = 0.5  # for which rows of an engine that is gone are waited for
LEAVE_S: Final = 120.0  # for all that is to be done at the end
# Whoever ends a group of processes ends the engine first: its end is the clerk's.
LEFT_TO_THE_ENGINE: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log: Final = logging.getLogger("clairai.capture")


class Clerk:
    """What the engine says, on the main thread."""

    def __init__(self, line: Line, arena: Arena, engine: int) -> None:
        self._line, self._arena = line, arena
        self._reader = Reader(arena)
        self._poll = select.poll()
        self._poll.register(line.fileno(), select.POLLIN)
        self._engine = _watched(engine)
        self._ended = select.poll()  # of the collector's thread
        if self._engine is not None:
            self._poll.register(self._engine, select.POLLIN)
            self._ended.register(self._engine, select.POLLIN)
        self._is_orphan = False

    def run(self) -> int:
        messages = self._messages()
        hello = next(messages, None)
        if not isinstance(hello, tickets.Hello):
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
        self._line.say(tickets.Refused(code, reason))
        self._line.post_all()
        return 1

    def _open(self, hello: tickets.Hello) -> dict[str, Consumer]:
        specs = [ConsumerSpec(one.name, one.kind, one.options) for one in hello.consumers]
        opened = open_consumers(specs, hello.about)
        said = (tickets.Opened(name, one.where, one.policy) for name, one in opened.items())
        self._line.say(tickets.Ready(os.getpid(), tuple(said)))
        self._line.post_all()
        return {name: Guarded(one) for name, one in opened.items()}

    def _serve(
        self,
        hello: tickets.Hello,
        consumers: dict[str, Consumer],
        messages: Iterator[tickets.Asked],
    ) -> None:
        nbytes = self._arena.nbytes
        collector = Collector(
            consumers,
            origins(hello.about),
            batch_nbytes=nbytes // 4,
            pending_nbytes=hello.pending_nbytes,
            pace=Pace(LINGER_S, nbytes // PART_IN_BATCH),
        )
        teller = Teller(self._line, collector, consumers)
        try:
            for message in messages:
                if isinstance(message, tickets.Close):
                    break
                self._hear(message, collector, hello)
            else:
                self._is_orphan = True
        finally:
            leaving = threading.Timer(LEAVE_S, _leave)
            leaving.daemon = True
            leaving.start()
            collector.close()
            teller.close()

    def _hear(self, message: tickets.Asked, collector: Collector, hello: tickets.Hello) -> None:
        match message:
            case tickets.Plan():
                self._reader.plan(message)
            case tickets.Ticket() | tickets.Scores():
                wait = partial(self._wait, message.number)
                collector.put(self._reader.taken(message, wait))
            case tickets.Begin(number, stream, choice, order):
                collector.begin((stream, choice), order, number)
            case tickets.Amend(stream, choice, steering):
                collector.amend((stream, choice), steering)
            case tickets.Finish(stream, choice):
                collector.finish((stream, choice))
            case tickets.Relabel(weights):
                collector.relabel(origins(replace(hello.about, weights=weights)))
            case tickets.Commit():
                collector.commit()

    def _messages(self) -> Iterator[tickets.Asked]:
        """Until the engine's end of the line is closed, or the engine is gone."""
        rounds = 0
        while (heard := self._line.listen()) is not None:
            yield from map(tickets.ASKED.decode, heard)
            rounds = 0 if heard else rounds + 1
            if rounds > AWAKE:
                if self._is_engine_gone():
                    return
            elif not heard:
                time.sleep(LISTEN_S)

    def _is_engine_gone(self) -> bool:
        """Waits until there is something to read, or nobody who would say anything."""
        readable = {fd for fd, _ in self._poll.poll()}
        # A process that the engine forked may hold the line open; what was said comes first.
        return readable == {self._engine}

    def _wait(self, number: int) -> None:
        """On the collector's thread: until the device says that these rows have come."""
        deadline_s: float | None = None
        while not self._arena.has_landed(number):
            if self._is_orphan or self._ended.poll(0):
                deadline_s = deadline_s or time.monotonic() + LAST_S
                if time.monotonic() > deadline_s:
                    raise RuntimeError("the engine ended before its device had copied these rows")
            time.sleep(LOOK_S)


def _leave() -> None:
    """Nobody is left who waits for it, or makes room."""
    _log.error("captured rows are lost: no consumer took them in %g s", LEAVE_S)
    os._exit(1)


def _watched(engine: int) -> int | None:
    """A descriptor that can be read when the engine has ended; None where there are none."""
    try:
        return os.pidfd_open(engine)
    except OSError:
        return None


def main(arguments: Sequence[str]) -> int:
    end, arena, engine = map(int, arguments)
    if os.fork():  # nobody who ends the engine with its children ends this process
        os._exit(0)
    for number in LEFT_TO_THE_ENGINE:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        # An engine may have bound the thread that started this to one processor.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    threading.main_thread().name = "clairai-clerk"
    line = Line(socket.socket(fileno=end))
    try:
        return Clerk(line, Arena.attach(arena), engine).run()
    except (OSError, ValueError, msgspec.MsgspecError):
        _log.exception("the process that takes captures ends")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
