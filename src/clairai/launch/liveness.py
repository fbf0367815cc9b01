"""Judges from heartbeats whether the processes of an engine make progress.

Four things are told apart: a process that is gone, one that is suspended, one that has lost its
connection to the engine core, and one that runs and whose loop does not go round. Time counts only
while this process itself runs, so that a suspended launcher, a busy machine or a laptop that slept
does not condemn a healthy engine.

Runs in: the process of `clairai serve` or `clairai demo`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from clairai.local.heartbeat import Activity, Beat, ProcessState, Role, read_process_state
from clairai.local.own_clock import OwnClock

NAMES: Final[dict[Role, str]] = {
    "api-server": "the API server",
    "engine-core": "the engine core",
    "worker": "a worker",
    "capture-writer": "the capture writer",
    "process-guard": "the process guard",
}
# Their guard is their parent and reports their end itself.
_REPORTED_BY_GUARD: Final = ("api-server", "process-guard")
# Generation goes on without it, and the worker starts it again.
_NOT_VITAL: Final = ("capture-writer",)
# A guard that is suspended is woken; nobody waits for it meanwhile.
_WOKEN: Final = ("process-guard",)


@dataclass(frozen=True)
class LivenessLimits:
    """Seconds of this process's own time."""

    gone: float = 1.0  # for vLLM to end in order when one of its processes has ended
    stopped: float = 3.0  # for a process that is suspended
    cut_off: float = 2.0  # for vLLM to end in order, or for us to see which of its processes ended
    slow: float = 8.0  # after so long without progress health says so
    stall: float = 120.0  # and after so long the engine is ended
    call: float = 1800.0  # as `stall`, while weights are loaded or the like


@dataclass(frozen=True)
class Trouble:
    """What is wrong with one process, and since when."""

    reason: str
    since: float  # in seconds since 1970
    is_fatal: bool
    is_stalling: bool = True  # requests wait for this process


Kind = Literal["gone", "stopped", "cut off", "silent"]


@dataclass
class _Watched:
    """One process as seen so far; times are of the watch's own clock."""

    beats: int
    progress_s: float  # when it was last seen to go on
    kind: Kind | None = None
    since_s: float = 0.0  # of `kind`
    since: float = 0.0  # the same, in seconds since 1970


class LivenessWatch:
    """Remembers the last look at each process; `look` is called a few times a second."""

    def __init__(
        self,
        limits: LivenessLimits,
        *,
        state_of: Callable[[int], ProcessState | None] = read_process_state,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits, self._state_of = limits, state_of
        self._clock, self._wall_clock = OwnClock(clock), wall_clock
        self._own_s = 0.0
        self._watched: dict[tuple[int, int], _Watched] = {}

    def look(self, beats: Sequence[Beat]) -> Trouble | None:
        """The worst trouble there is now."""
        self._own_s = self._clock.tick()
        kept = self._leave_out_replaced(beats)
        self._watched = {(beat.pid, beat.start_ticks): self._update(beat) for beat in kept}
        found = [trouble for beat in kept if (trouble := self._judge(beat)) is not None]
        return min(found, key=_urgency, default=None)

    def _leave_out_replaced(self, beats: Sequence[Beat]) -> list[Beat]:
        """Without capture writers that have ended, if another was started after them.

        With several engine cores there are several that live.
        """
        writers = [beat for beat in beats if beat.role == "capture-writer"]
        newest = max(writers, key=lambda one: (one.start_ticks, one.pid), default=None)
        return [
            beat
            for beat in beats
            if beat.role != "capture-writer" or beat == newest or not self._is_gone(beat)
        ]

    def _is_gone(self, beat: Beat) -> bool:
        try:
            state = self._state_of(beat.pid)
        except OSError:
            return False
        return state is None or _has_ended(beat, state)

    def _update(self, beat: Beat) -> _Watched:
        seen = self._watched.get((beat.pid, beat.start_ticks))
        if seen is None:
            seen = _Watched(beat.beats, self._own_s)
        if beat.beats != seen.beats or not beat.beats:
            seen.beats, seen.progress_s = beat.beats, self._own_s
        kind = self._kind_of(beat, seen)
        if kind != seen.kind:
            began_s = seen.progress_s if kind == "silent" else self._own_s
            seen.kind, seen.since_s = kind, began_s
            seen.since = self._wall_clock() - (self._own_s - began_s)
        return seen

    def _kind_of(self, beat: Beat, seen: _Watched) -> Kind | None:
        try:
            state = self._state_of(beat.pid)
        except OSError:  # we have no descriptor: nothing is known that was not known before
            return seen.kind
        if state is None or _has_ended(beat, state):
            return "gone"
        if state.letter == "T":
            return "stopped"
        if beat.activity is Activity.CUT_OFF:
            return "cut off"
        return "silent" if self._own_s - seen.progress_s >= self._limits.slow else None

    def _judge(self, beat: Beat) -> Trouble | None:
        seen = self._watched[beat.pid, beat.start_ticks]
        lasted_s = self._own_s - seen.since_s
        match seen.kind:
            case None:
                return None
            case "gone":
                is_reported = lasted_s >= self._limits.gone and beat.role not in _REPORTED_BY_GUARD
                text, is_fatal = "has ended", True
            case "stopped":
                is_reported = lasted_s >= self._limits.stopped
                text, is_fatal = "is suspended", beat.role not in _WOKEN
            case "cut off":
                is_reported = lasted_s >= self._limits.cut_off
                text, is_fatal = "has lost its connection to the engine core", True
            case "silent":
                is_call = beat.activity is Activity.CALL
                limit_s = self._limits.call if is_call else self._limits.stall
                is_reported, is_fatal = True, lasted_s >= limit_s
                text = "is busy with one call" if is_call else "makes no progress"
        if not is_reported:
            return None
        reason = f"{NAMES[beat.role]} (process {beat.pid}) {text}"
        return Trouble(
            reason,
            seen.since,
            is_fatal and beat.role not in _NOT_VITAL,
            is_stalling=beat.role not in (*_NOT_VITAL, *_WOKEN),
        )


def _has_ended(beat: Beat, state: ProcessState) -> bool:
    return state.start_ticks != beat.start_ticks or state.letter in "ZX"


def _urgency(trouble: Trouble) -> tuple[bool, bool, float]:
    """The least is the worst: it is fatal, or requests wait, or it is the oldest."""
    return not trouble.is_fatal, not trouble.is_stalling, trouble.since
