"""Takes nothing of ours; gives what an engine asks of its clerk: who takes captured rows on.

There are two: `near.py` in the engine's own process, `far.py` in a process of its own. Nobody who
asks anything here waits.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from clairai.capture import pipe_messages
from clairai.capture.capture_settings import CaptureSettings, ConsumerSpec
from clairai.capture.collector import Collector
from clairai.capture.consumers import (
    Consumer,
    EngineInfo,
    GuardedConsumer,
    find_in_engine_kind,
    open_consumers,
)
from clairai.capture.in_process import InProcessBackend, origin_for
from clairai.capture.remote import RemoteBackend
from clairai.capture.results import CaptureResults
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import AnswerId, Wait
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.errors import ConfigError
from clairai.points import quote


class CaptureBackend(Protocol):
    """One for each engine that captures. What it is told happens in that order."""

    @property
    def arena(self) -> StagingArena:
        """Where rows come to."""

    @property
    def results(self) -> CaptureResults:
        """What has become of them, as far as is known here."""

    @property
    def pending_nbytes(self) -> int:
        """Of rows that wait for a rule."""

    @property
    def trouble(self) -> str:
        """Why no rows are taken; empty if they are."""

    @property
    def is_remote(self) -> bool:
        """Whether it is a process of its own, to which the device says what has come."""

    def may_block(self, names: Iterable[str]) -> bool:
        """Whether one of these consumers asks for tokens to wait."""

    def begin(self, seat: AnswerId, order: CapturePlan) -> None: ...

    def amend(self, seat: AnswerId, steering: str) -> None:
        """From now on the request is steered so."""

    def finish(self, seat: AnswerId) -> None: ...

    def relabel(self, weights: str) -> None:
        """What comes from now on is of these weights."""

    def commit(self) -> None:
        """Have all that was given so far made safe; nobody waits for it."""

    def plan(self, told: pipe_messages.StagingPlanMessage) -> None:
        """How all tickets up to the next plan lie."""

    def put(self, told: pipe_messages.StagedMessage, wait: Wait) -> None:
        """Rows, or scores; they are there when `wait` returns."""

    def post(self) -> None:
        """What was told so far goes now."""

    def close(self) -> None:
        """Give on what is there, then close the consumers; this waits."""


# MERGED
# Takes the engine's capture setting; gives its clerk: a process of its own, if it can be.


# Two processes share plain words of memory, and Python has no other stores than plain ones.
ORDERED: Final = ("x86_64", "AMD64")


def open_backend(setting: CaptureSettings, about: EngineInfo) -> CaptureBackend:
    """ConfigError if a consumer cannot be opened, or not where it was asked for."""
    is_remote = _is_own_process(setting)
    arena = StagingArena.create(setting.staging_mib << 20)
    try:
        return (
            _open_remote(setting, about, arena)
            if is_remote
            else _open_in_process(setting, about, arena)
        )
    except BaseException:
        arena.close()
        raise


def _is_own_process(setting: CaptureSettings) -> bool:
    if setting.process == "engine":
        return False
    kind, machine = find_in_engine_kind(setting.consumers), platform.machine()
    if not kind and machine in ORDERED:
        return True
    if setting.process == "own":
        why = f"consumer {kind} is" if kind else f"on {machine} they are"
        raise ConfigError(
            f'capture.process is "own", but {why} in the engine\'s own process; leave it out'
        )
    return False


def _open_remote(setting: CaptureSettings, about: EngineInfo, arena: StagingArena) -> RemoteBackend:
    specs = tuple(
        pipe_messages.ConsumerConfig(s.name, s.kind, _check_plain_options(s))
        for s in setting.consumers
    )
    return RemoteBackend.start(
        pipe_messages.WriterStart(about, specs, setting.pending_mib << 20), arena
    )


def _check_plain_options(spec: ConsumerSpec) -> dict[str, Any]:
    """Its options, which cross to another process as data."""
    options = dict(spec.options)
    try:
        pipe_messages.ENCODER.encode(options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"options of capture consumer {quote(spec.name)} must be what JSON has: {error}"
        ) from None
    return options


def _open_in_process(
    setting: CaptureSettings, about: EngineInfo, arena: StagingArena
) -> InProcessBackend:
    opened = open_consumers(setting.consumers, about)
    consumers: Mapping[str, Consumer] = {name: GuardedConsumer(one) for name, one in opened.items()}
    collector = Collector(
        consumers,
        origin_for(about),
        batch_nbytes=arena.nbytes // 4,
        pending_nbytes=setting.pending_mib << 20,
    )
    return InProcessBackend(consumers, collector, about, arena)
