"""The fault matrix: which fault is planted in which process in which state, and what must hold.

164 cells. A cell has an `Expectation`, or it is `Impossible` with the fact that makes it so, which
is checked too. `run_faults.py` plants every fault in a real engine; docs/faults.md has what it saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from types import MappingProxyType
from typing import Final, NamedTuple

NOTICE_S: Final = 10.0  # a process that is killed, stopped or hangs is noticed within this time


class State(StrEnum):
    """What the service is doing when the fault comes."""

    IDLE = "idle"
    STREAMING = "streaming"  # answers are being streamed
    CAPTURING = "capturing"  # answers are being streamed, and their rows kept
    SWAPPING = "swapping weights"  # half of the new weights has arrived; answers are streamed


class Role(StrEnum):
    """The process in which the fault is planted."""

    API_SERVER = "API server"
    CORE = "core"
    WORKER = "worker"
    CAPTURE = "capture process"
    PROXY = "proxy"
    COMPLETION = "completion process"  # one of two
    GUARD = "guard"
    SIDECAR = "sidecar"


class Fault(StrEnum):
    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    DISK_FULL = "disk full"
    NO_FDS = "fd exhaustion"
    SOCKET_CLOSED = "socket closed"
    HANG = "hang"  # its main thread computes for good; other threads of the process go on


class Cell(NamedTuple):
    state: State
    role: Role
    fault: Fault

    def __str__(self) -> str:
        return f"{self.state} / {self.role} / {self.fault}"


class Notice(StrEnum):
    """How the fault becomes known, within NOTICE_S."""

    HEALTH = "GET /health says what and since when"
    REFUSALS = "requests are answered, or refused with a reason"
    ENGINE_LOG = "the guard writes it to the engine's log"
    EVERYTHING_ENDS = "the guard ends everything"
    WOKEN = "the supervisor wakes it"
    NOTHING = "nothing has to be noticed: health stays ready"


class Streams(StrEnum):
    """What becomes of answers that are being streamed."""

    NONE = "no stream runs"
    GO_ON = "streams go on"
    END = "streams end with an error"
    WAIT = "streams wait, and go on afterwards"
    BREAK = "streams end: their connection is gone"
    END_OR_GO_ON = "streams end with an error or go on"
    OWN_END = "its own streams end with an error, others go on"
    OWN_BREAK = "its own streams end: their connection is gone; others go on"


class Back(StrEnum):
    """How the service is whole again."""

    UNHARMED = "never left"
    RECOVERS = "when the fault is over"
    RESTARTED = "a new engine is started by itself"
    WRITER_RESTARTED = "a new capture process is started by itself"
    PROCESS_RESTARTED = "a new completion process is started by itself"
    COMMAND = "somebody starts the command again"


class Rows(StrEnum):
    """What becomes of rows that are being captured; committed rows stay readable in any case."""

    NONE = "nothing is captured"
    KEPT = "every row is kept"
    SAID = "kept, or the answer says how many are lost and why"
    PREFIX = "what is there is right"  # the answer had no end that could have said more


class Weights(StrEnum):
    """What the engine serves afterwards; never a mixture."""

    SAME = "unchanged"
    OLD = "the old weights"
    NEW = "the new weights"
    EITHER = "the old or the new weights"


@dataclass(frozen=True)
class Expectation:
    """What must hold. `because` says why, where the words above do not."""

    notice: Notice
    streams: Streams
    back: Back
    rows: Rows = Rows.NONE
    weights: Weights = Weights.SAME
    because: str = ""

    def sentence(self) -> str:
        parts: list[str] = [self.notice]
        parts += [] if self.streams is Streams.NONE else [self.streams]
        parts.append(f"back: {self.back}")
        parts += [] if self.rows is Rows.NONE else [f"rows: {self.rows}"]
        parts += [] if self.weights is Weights.SAME else [f"serves {self.weights}"]
        return "; ".join(parts) + (f" ({self.because})" if self.because else "")


@dataclass(frozen=True)
class Impossible:
    """The fault cannot be planted there; `fact` is checked in the running service instead."""

    fact: str

    def sentence(self) -> str:
        return f"cannot occur: {self.fact}"


# What must hold while answers are streamed; `_in_state` derives the other states from it.
_UNHARMED: Final = Expectation(Notice.NOTHING, Streams.GO_ON, Back.UNHARMED)
_RESTARTED: Final = Expectation(Notice.HEALTH, Streams.END, Back.RESTARTED)
_NEW_WRITER: Final = Expectation(
    Notice.HEALTH, Streams.GO_ON, Back.WRITER_RESTARTED, because="answers do not need it"
)
_NEW_PROCESS: Final = Expectation(Notice.HEALTH, Streams.OWN_END, Back.PROCESS_RESTARTED)
_LOG_ONLY: Final = replace(_UNHARMED, because="it writes to the engine's log alone")
_OWN_OUTPUT: Final = replace(_UNHARMED, because="only its own log lines are lost")
_NOT_OURS: Final = replace(_UNHARMED, because="nobody waits for a reader")
_NO_SOCKET: Final = Impossible("the guard has no socket, only a pipe from its owner")

_WHILE_STREAMING: Final[Mapping[tuple[Role, Fault], Expectation | Impossible]] = {
    (Role.API_SERVER, Fault.SIGKILL): _RESTARTED,
    (Role.API_SERVER, Fault.SIGSTOP): _RESTARTED,
    (Role.API_SERVER, Fault.DISK_FULL): _LOG_ONLY,
    (Role.API_SERVER, Fault.NO_FDS): Expectation(
        Notice.REFUSALS, Streams.GO_ON, Back.RECOVERS, because="open connections stay"
    ),
    (Role.API_SERVER, Fault.SOCKET_CLOSED): Expectation(
        Notice.REFUSALS, Streams.END, Back.UNHARMED, because="the proxy connects again"
    ),
    (Role.CORE, Fault.SIGKILL): _RESTARTED,
    (Role.CORE, Fault.SIGSTOP): _RESTARTED,
    (Role.CORE, Fault.DISK_FULL): _LOG_ONLY,
    (Role.CORE, Fault.NO_FDS): replace(_UNHARMED, because="it opens nothing while it runs"),
    (Role.CORE, Fault.SOCKET_CLOSED): _RESTARTED,
    (Role.WORKER, Fault.SIGKILL): _RESTARTED,
    (Role.WORKER, Fault.SIGSTOP): _RESTARTED,
    (Role.WORKER, Fault.DISK_FULL): _LOG_ONLY,
    (Role.WORKER, Fault.NO_FDS): replace(_UNHARMED, because="only new readers are refused"),
    (Role.WORKER, Fault.SOCKET_CLOSED): replace(_UNHARMED, because="readers attach again"),
    (Role.CAPTURE, Fault.SIGKILL): _NEW_WRITER,
    (Role.CAPTURE, Fault.SIGSTOP): replace(_NEW_WRITER, back=Back.RECOVERS),
    (Role.CAPTURE, Fault.DISK_FULL): replace(_UNHARMED, because="it has nothing to write"),
    (Role.CAPTURE, Fault.NO_FDS): replace(_UNHARMED, because="it opens nothing without rows"),
    (Role.CAPTURE, Fault.SOCKET_CLOSED): _NEW_WRITER,
    (Role.PROXY, Fault.SIGKILL): Expectation(Notice.EVERYTHING_ENDS, Streams.BREAK, Back.COMMAND),
    (Role.PROXY, Fault.SIGSTOP): Expectation(Notice.ENGINE_LOG, Streams.WAIT, Back.RECOVERS),
    (Role.PROXY, Fault.DISK_FULL): _OWN_OUTPUT,
    (Role.PROXY, Fault.NO_FDS): Expectation(
        Notice.REFUSALS, Streams.GO_ON, Back.RECOVERS, because="open connections stay"
    ),
    (Role.PROXY, Fault.SOCKET_CLOSED): Expectation(
        Notice.REFUSALS, Streams.BREAK, Back.UNHARMED, because="clients connect again"
    ),
    (Role.COMPLETION, Fault.SIGKILL): replace(_NEW_PROCESS, streams=Streams.OWN_BREAK),
    (Role.COMPLETION, Fault.SIGSTOP): _NEW_PROCESS,
    (Role.COMPLETION, Fault.DISK_FULL): _OWN_OUTPUT,
    (Role.COMPLETION, Fault.NO_FDS): replace(
        _UNHARMED, because="others take new connections; open ones stay"
    ),
    (Role.COMPLETION, Fault.SOCKET_CLOSED): replace(
        _NEW_PROCESS,
        streams=Streams.OWN_BREAK,
        because="without its link to the first process it ends",
    ),
    (Role.COMPLETION, Fault.HANG): _NEW_PROCESS,
    (Role.GUARD, Fault.SIGKILL): _RESTARTED,
    (Role.GUARD, Fault.SIGSTOP): Expectation(Notice.WOKEN, Streams.GO_ON, Back.UNHARMED),
    (Role.GUARD, Fault.DISK_FULL): replace(_UNHARMED, because="it writes nothing"),
    (Role.GUARD, Fault.NO_FDS): replace(_UNHARMED, because="it opens files only to end others"),
    (Role.GUARD, Fault.SOCKET_CLOSED): _NO_SOCKET,
    (Role.SIDECAR, Fault.SIGKILL): _NOT_OURS,
    (Role.SIDECAR, Fault.SIGSTOP): _NOT_OURS,
    (Role.SIDECAR, Fault.DISK_FULL): _NOT_OURS,
    (Role.SIDECAR, Fault.NO_FDS): _NOT_OURS,
    (Role.SIDECAR, Fault.SOCKET_CLOSED): replace(_NOT_OURS, because="it attaches again"),
}

_EXCEPTIONS: Final[Mapping[Cell, Expectation]] = {
    Cell(State.IDLE, Role.API_SERVER, Fault.SOCKET_CLOSED): Expectation(
        Notice.HEALTH,
        Streams.NONE,
        Back.RESTARTED,
        because="it is the socket on which it listens",
    ),
    Cell(State.IDLE, Role.GUARD, Fault.NO_FDS): Expectation(
        Notice.EVERYTHING_ENDS,
        Streams.NONE,
        Back.COMMAND,
        because="the command is told to end meanwhile: the guard ends all of it nevertheless",
    ),
    Cell(State.CAPTURING, Role.CAPTURE, Fault.DISK_FULL): Expectation(
        Notice.HEALTH, Streams.GO_ON, Back.RECOVERS, Rows.SAID
    ),
    Cell(State.CAPTURING, Role.CAPTURE, Fault.NO_FDS): Expectation(
        Notice.HEALTH, Streams.GO_ON, Back.RECOVERS, Rows.SAID
    ),
    Cell(State.SWAPPING, Role.WORKER, Fault.NO_FDS): replace(
        _UNHARMED,
        weights=Weights.EITHER,
        because="a buffer that comes while it can open nothing is refused, and the sender told",
    ),
    Cell(State.SWAPPING, Role.WORKER, Fault.SOCKET_CLOSED): replace(
        _UNHARMED, weights=Weights.OLD, because="the sender is told; readers attach again"
    ),
}


def _in_state(state: State, expected: Expectation) -> Expectation:
    """The same fault while something else, or nothing, goes on."""
    if state is State.STREAMING:
        return expected
    if state is State.IDLE:
        return replace(expected, streams=Streams.NONE)
    if state is State.CAPTURING:
        return replace(expected, rows=_rows(expected))
    return replace(expected, weights=_weights(expected))


def _rows(expected: Expectation) -> Rows:
    if expected.back is Back.WRITER_RESTARTED or expected.notice is Notice.HEALTH:
        return Rows.SAID if expected.streams is Streams.GO_ON else Rows.PREFIX
    return Rows.KEPT if expected.streams is Streams.GO_ON else Rows.PREFIX


def _weights(expected: Expectation) -> Weights:
    if expected.back in (Back.RESTARTED, Back.COMMAND):
        return Weights.OLD  # those in the model's folder
    is_untouched = expected.back is Back.UNHARMED and expected.streams is Streams.GO_ON
    if expected.back is Back.PROCESS_RESTARTED:  # the first process passes weights on
        is_untouched = True
    return Weights.NEW if is_untouched else Weights.EITHER


def _expect(cell: Cell) -> Expectation | Impossible:
    if cell in _EXCEPTIONS:
        return _EXCEPTIONS[cell]
    expected = _WHILE_STREAMING[cell.role, cell.fault]
    return expected if isinstance(expected, Impossible) else _in_state(cell.state, expected)


# Hangs of the other processes: test_liveness.py.
CELLS: Final = tuple(
    Cell(state, role, fault) for state, (role, fault) in product(State, _WHILE_STREAMING)
)
MATRIX: Final[Mapping[Cell, Expectation | Impossible]] = MappingProxyType(
    {cell: _expect(cell) for cell in CELLS}
)
