"""Every message between the first process of a proxy and a completion process.

They travel over a socket pair that nobody else has. A connection travels as a descriptor beside the
message that hands it over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.proxy.access_keys import Right
from clairai.proxy.engine_facts import KnownHealth
from clairai.proxy.observe.log_lines import LogFormat
from clairai.proxy.observe.observer import ProxyCounts, TimesReport
from clairai.proxy.proxy_settings import ProxySettings
from clairai.ring.reader import StartAt

MAX_BYTES: Final = 4 << 20


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message."""


# From the first process


class Begin(Message, frozen=True):
    """The first message: what the process is to do. Keys come this way and no other."""

    settings: bytes
    log_format: LogFormat | None

    @classmethod
    def of(cls, settings: ProxySettings, log_format: LogFormat | None) -> Begin:
        return cls(msgspec.msgpack.encode(settings, enc_hook=_encode_path), log_format)

    def read_settings(self) -> ProxySettings:
        return msgspec.msgpack.decode(self.settings, type=ProxySettings, dec_hook=_decode_path)


class TakeConnection(Message, frozen=True):
    """Comes with a connection, and what it has sent of its next request.

    `is_placed`: this process answers that request, wherever it would look for another like it.
    """

    connection: int
    received: bytes
    is_placed: bool


class EngineState(Message, frozen=True):
    """What the launcher and the first process know of the engine."""

    health: KnownHealth
    is_ending: bool


class RingTargets(Message, frozen=True):
    """Which rings to read, each from which record on: one for each engine core."""

    targets: list[tuple[str, StartAt]]


class EndAnswers(Message, frozen=True):
    """End whatever waits for the engine."""


class FindScores(Message, frozen=True):
    """Answered with FoundScores."""

    question: int
    id: str
    owner: str | None
    rights: frozenset[Right]


class AskCounts(Message, frozen=True):
    """Answered with Counts."""

    question: int


class Stop(Message, frozen=True):
    """End, after the answers that end soon."""


# From a completion process


class Ready(Message, frozen=True):
    """It takes connections."""


class RingChange(Message, frozen=True):
    """It has attached the ring, or lost it."""

    is_attached: bool


class EngineOutage(Message, frozen=True):
    """The engine could not be reached: what is known of it may be out of date."""


class Taken(Message, frozen=True):
    """It answers on these connections from now on."""

    connections: list[int]


class NotTaken(Message, frozen=True):
    """It has no descriptor for this connection."""

    connection: int


class ConnectionClosed(Message, frozen=True):
    """A connection that it had was closed."""

    connection: int


class MoveConnection(Message, frozen=True):
    """Comes with a connection whose next request is not this process's to answer."""

    connection: int
    received: bytes


class FoundScores(Message, frozen=True):
    """How well it can answer for these scores, as KeptScores.look_up says it."""

    question: int
    rank: int
    created_s: float


class Counts(Message, frozen=True):
    """Its counts, all of one moment; `question` is 0 if nobody asked."""

    question: int
    counts: ProxyCounts
    times: TimesReport
    running_since_s: list[float]  # of each completion that runs, on the shared clock
    has_read_on: bool  # rows that were in the ring when it was asked have been counted


ToProcess = (
    Begin | TakeConnection | EngineState | RingTargets | EndAnswers | FindScores | AskCounts | Stop
)
FromProcess = (
    Ready
    | RingChange
    | EngineOutage
    | Taken
    | NotTaken
    | ConnectionClosed
    | MoveConnection
    | FoundScores
    | Counts
)
Answer = FoundScores | Counts


def _encode_path(value: Any) -> str:
    assert isinstance(value, Path)
    return str(value)


def _decode_path(kind: type, value: Any) -> Any:
    return kind(value)
