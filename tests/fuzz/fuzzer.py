"""Gives one target random inputs, keeps those that reach something new, and judges every answer.

An input is new if it is refused at another place of the code than all before, or if it runs a line
that none before has run; lines are watched for some inputs only, since watching takes ten times as
long. What is found is a finding: another exception than the target's refusals, a refusal that is
too long, cannot be printed or names a path of this machine, too much memory, too much time.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import clairai
from clairai.errors import ClairaiError
from clairai.proxy.responses import HttpRefusal
from tests.fuzz.mutate import Mutator
from tests.fuzz.target import MAX_REASON, Target

PACKAGE: Final = os.path.dirname(clairai.__file__)
MAX_SECONDS: Final = 1.0  # of computing, for one input
MEMORY_FACTOR: Final = 2
MEMORY_FLOOR: Final = 16 << 20
MAX_FINDINGS: Final = 20  # of one target; more are counted
_WATCH_EVERY: Final = 32  # inputs
_MEASURE_EVERY: Final = 64
_TICK_S: Final = 0.5
_DEADLINE_EVERY: Final = 256
# What no refusal may name: places of this machine that no input has said.
_PRIVATE: Final = tuple(
    {PACKAGE, os.getcwd(), sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(Path.home())}
    - {"/"}
)


# Errors whose text somebody reads; a decoder's own is not shown.
_SPOKEN: Final = (ClairaiError, HttpRefusal)


# An error's kind, that of the first error it came of, and the file and line of that one.
Place = tuple[str, str, str, int]


class TooSlow(BaseException):
    """One input has used MAX_SECONDS; no parser catches this."""


@dataclass(frozen=True)
class Finding:
    """An input that a target must not answer like this."""

    target: str
    what: str
    data: bytes

    @property
    def file_name(self) -> str:
        return f"{hashlib.sha256(self.data).hexdigest()[:16]}.bin"


@dataclass
class Outcome:
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    peak_nbytes: int = 0  # of the inputs that were measured
    places: set[str] = field(default_factory=set)  # where inputs were refused, and lines run
    kept: int = 0  # inputs that reached something new
    findings: list[Finding] = field(default_factory=list)
    num_findings: int = 0


@dataclass
class Fuzzer:
    """One target. `record` is told every input before it is parsed."""

    target: Target
    seed: int
    record: Callable[[bytes], None] = lambda _: None

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.target.name)
        self._mutator = Mutator(self.target, random.Random(f"{self.target.name} {self.seed}"))  # noqa: S311
        self._places: set[object] = set()
        self._lines = LineWatch()
        self._found: set[object] = set()

    def run(self, inputs: int, deadline_s: float | None = None) -> Outcome:
        """The seeds first, then mutations, until one of the two bounds is reached.

        Called again, it goes on where it was.
        """
        begin_s = time.perf_counter()
        with _time_limit(lambda: self.outcome.inputs), warnings.catch_warnings():
            warnings.simplefilter("error")
            begin = self.outcome.inputs
            for number in range(begin, begin + inputs):
                if number % _DEADLINE_EVERY == 0 and _is_past(deadline_s):
                    break
                self._run_one(number)
        self.outcome.seconds += time.perf_counter() - begin_s
        return self.outcome

    def _run_one(self, number: int) -> None:
        seeds = self.target.seeds
        data = seeds[number] if number < len(seeds) else self._mutator.make()
        self.outcome.inputs += 1
        self.record(data)
        is_watched = number < len(seeds) or number % _WATCH_EVERY == 0
        accepted = self.outcome.accepted
        is_new = self._answer(data, is_watched=is_watched)
        if is_new and number >= len(seeds):
            self.outcome.kept += 1
            self._mutator.add(data, is_valid=self.outcome.accepted > accepted)
        if is_new or number % _MEASURE_EVERY == 0:
            self._measure(data)

    def _answer(self, data: bytes, *, is_watched: bool) -> bool:
        """Parse, judge, and tell whether something new was reached."""
        num_lines = len(self._lines.seen)
        place: Place | None = None
        try:
            if is_watched:
                self._lines.call(self.target.parse, data)
            else:
                self.target.parse(data)
        except self.target.refusals as error:
            if isinstance(error, _SPOKEN):
                self._judge_refusal(error, data)
            place = _place(error)
        except (Exception, TooSlow) as error:
            self._find(f"{type(error).__name__}: {str(error)[:300]}", data, key=_place(error))
            return False
        else:
            self.outcome.accepted += 1
        is_new = (place is not None and place not in self._places) or (
            len(self._lines.seen) > num_lines
        )
        if place is not None and place not in self._places:
            self._places.add(place)
            self.outcome.places.add(_describe_place(place))
        return is_new

    def _judge_refusal(self, error: Exception, data: bytes) -> None:
        reason = str(error)
        if len(reason) > MAX_REASON:
            self._find(f"refusal of {len(reason)} characters: {reason[:80]}", data)
        if not reason.isprintable():
            self._find(f"refusal that cannot be printed: {ascii(reason)[:300]}", data)
        if "/" in reason and any(place in reason for place in _PRIVATE):
            self._find(f"refusal names a path of this machine: {reason[:300]}", data)

    def _measure(self, data: bytes) -> None:
        tracemalloc.start()
        try:
            self.target.parse(data)
        except (Exception, TooSlow) as error:  # judged when it was first parsed
            del error
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.outcome.peak_nbytes = max(self.outcome.peak_nbytes, peak)
        if peak > MEMORY_FACTOR * len(data) + MEMORY_FLOOR:
            self._find(f"{peak} bytes of memory for {len(data)} of input", data)

    def _find(self, what: str, data: bytes, key: object = None) -> None:
        """Keep the first input of each kind: others of it say nothing new."""
        self.outcome.num_findings += 1
        kind = what[:30] if key is None else key
        if kind not in self._found and len(self.outcome.findings) < MAX_FINDINGS:
            self._found.add(kind)
            self.outcome.findings.append(Finding(self.target.name, what, data))


class LineWatch:
    """The lines of the package that were run by watched calls."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int]] = set()
        self._is_ours: dict[CodeType, bool] = {}

    def call(self, parse: Callable[[bytes], object], data: bytes) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            parse(data)
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(PACKAGE)
        return self._step if is_ours else None

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.seen.add((frame.f_code, frame.f_lineno))
        return self._step


def _place(error: BaseException) -> Place:
    """The kind of an error, and where in the code it began."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    trace = first.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_code.co_filename
    return type(error).__name__, type(first).__name__, name, trace.tb_lineno


def _describe_place(place: Place) -> str:
    kind, _, name, line = place
    return f"{kind} at {name.removeprefix(PACKAGE).lstrip('/')}:{line}"


def _is_past(deadline_s: float | None) -> bool:
    return deadline_s is not None and time.monotonic() > deadline_s


@contextmanager
def _time_limit(count: Callable[[], int]) -> Iterator[None]:
    """Raise TooSlow in an input that computes for too long; costs the others nothing.

    It counts computing, and not time, so that a busy machine makes nothing slow.
    """
    last, ticks = -1, 0

    def tick(_signal: int, _frame: object) -> None:
        nonlocal last, ticks
        ticks = ticks + 1 if count() == last else 0
        last = count()
        if ticks * _TICK_S >= MAX_SECONDS:
            ticks = 0
            raise TooSlow(f"over {MAX_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, tick)
    signal.setitimer(signal.ITIMER_VIRTUAL, _TICK_S, _TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def shrink(target: Target, finding: Finding, tries: int = 300) -> Finding:
    """A shorter input with the same finding, if one is near."""
    kind, data = finding.what.partition(":")[0], finding.data
    step = len(data) // 2
    while step and tries > 0:
        for start in range(0, len(data), step):
            shorter = data[:start] + data[start + step :]
            tries -= 1
            again = Fuzzer(Target(**{**vars(target), "seeds": [shorter]}), 0).run(1).findings
            if again and again[0].what.partition(":")[0] == kind:
                data = shorter
                break
        else:
            step //= 2
    return Finding(finding.target, finding.what, data)
