"""Opens the capture backend of an engine: who takes captured rows to their consumers.

There are two: `remote.py` in a process of its own, `in_process.py` on a thread of the worker.

Runs in: the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from clairai.capture.capture_settings import CaptureSettings, ConsumerSpec
from clairai.capture.collector import Collector
from clairai.capture.consumers import (
    Consumer,
    EngineInfo,
    GuardedConsumer,
    find_in_engine_kind,
    open_consumers,
)
from clairai.capture.in_process import InProcessBackend
from clairai.capture.pipe_messages import (
    ENCODER,
    ConsumerConfig,
    StagedMessage,
    StagingLayout,
    WriterStart,
)
from clairai.capture.remote import RemoteBackend
from clairai.capture.results import CaptureResults
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import Wait
from clairai.engine.capture.capture_plan import AnswerId, CapturePlan
from clairai.errors import ConfigError, quote


class CaptureBackend(Protocol):
    """One for each engine that captures. Calls take effect in order; only `close` blocks."""

    @property
    def arena(self) -> StagingArena:
        """Where rows are copied to."""

    @property
    def results(self) -> CaptureResults:
        """What became of the rows, as far as is known here."""

    @property
    def pending_nbytes(self) -> int:
        """Of rows that are held for a rule."""

    @property
    def failure(self) -> str:
        """Why no rows are taken now; empty while they are."""

    @property
    def lasting_failure(self) -> str:
        """Why rows of a new answer would not be taken either; empty if they would."""

    @property
    def is_remote(self) -> bool:
        """True if it is another process, to which the device says what it has copied."""

    def may_block(self, consumers: Iterable[str]) -> bool:
        """True if one of these consumers has the policy `block`."""

    def begin(self, answer: AnswerId, plan: CapturePlan) -> None: ...

    def amend(self, answer: AnswerId, steering: str) -> None:
        """The steering of an answer has changed."""

    def finish(self, answer: AnswerId) -> None: ...

    def set_weights(self, weights: str) -> None:
        """Rows that follow were computed with these weights."""

    def commit(self) -> None:
        """Have the rows of all finished answers made safe."""

    def set_layout(self, layout: StagingLayout) -> None:
        """How all rows up to the next layout lie in their regions."""

    def put(self, message: StagedMessage, wait: Wait) -> None:
        """Rows or scores; in this process they are there when `wait` returns."""

    def send(self) -> None:
        """Pass on now what was given so far."""

    def close(self) -> None:
        """Hand on what is there, then close the consumers. This waits."""


def open_backend(settings: CaptureSettings, engine: EngineInfo) -> CaptureBackend:
    """ConfigError if a consumer cannot be opened, or not in the process that was asked for."""
    is_remote = _is_own_process(settings)
    arena = StagingArena.create(settings.staging_mib << 20)
    try:
        if is_remote:
            return _open_remote(settings, engine, arena)
        return _open_in_process(settings, engine, arena)
    except BaseException:
        arena.close()
        raise


def _is_own_process(settings: CaptureSettings) -> bool:
    if settings.process == "engine":
        return False
    kind = find_in_engine_kind(settings.consumers)
    if kind and settings.process == "own":
        raise ConfigError(
            f'capture.process is "own", but consumer {kind} runs in the engine\'s own process; '
            "leave it out"
        )
    return not kind


def _open_remote(
    settings: CaptureSettings, engine: EngineInfo, arena: StagingArena
) -> RemoteBackend:
    consumers = tuple(
        ConsumerConfig(spec.name, spec.kind, _check_plain_options(spec))
        for spec in settings.consumers
    )
    return RemoteBackend.start(WriterStart(engine, consumers, settings.pending_mib << 20), arena)


def _check_plain_options(spec: ConsumerSpec) -> dict[str, Any]:
    """The options, which go to another process as data."""
    options = dict(spec.options)
    try:
        ENCODER.encode(options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"options of capture consumer {quote(spec.name)} must be what JSON has: {error}"
        ) from None
    return options


def _open_in_process(
    settings: CaptureSettings, engine: EngineInfo, arena: StagingArena
) -> InProcessBackend:
    opened = open_consumers(settings.consumers, engine)
    consumers: Mapping[str, Consumer] = {name: GuardedConsumer(c) for name, c in opened.items()}
    collector = Collector(
        consumers,
        engine,
        batch_nbytes=arena.nbytes // 4,
        pending_nbytes=settings.pending_mib << 20,
    )
    return InProcessBackend(consumers, collector, arena)
