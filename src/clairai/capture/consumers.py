"""Takes names of capture consumers and their options; gives the consumers, found as entry points.

A kind of consumer is an entry point of the group `clairai.capture_consumers`. Its object is called
with the options (a mapping) and an `About`, and gives a Consumer. It raises ConfigError for options
it does not take; the engine then does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, Protocol

from clairai.capture.setting import ConsumerSpec
from clairai.errors import ConfigError
from clairai.points import quote
from clairai.store.rows import Block

GROUP: Final = "clairai.capture_consumers"
Policy = Literal["block", "drop", "spill"]


@dataclass(frozen=True)
class About:
    """The engine whose rows will come."""

    model: str
    weights: str  # version
    dtype: str
    width: int
    points: tuple[str, ...]  # that are tapped


class Standing(Protocol):
    """How a consumer is doing."""

    @property
    def name(self) -> str:
        """`writing`, `stopped` (goes on by itself) or `failed`."""

    @property
    def reason(self) -> str: ...


class Consumer(Protocol):
    """Where rows go. One thread calls it, never the engine's; only `flush`, `losses`, `state` and
    `where` are called from others. `clairai.store.writer.Writer` is the model of one.
    """

    @property
    def policy(self) -> Policy:
        """`block`: `offer` may wait, and tokens with it; else it never waits for room."""

    @property
    def where(self) -> str:
        """Where rows can be found, for people and programs: a folder, an address."""

    @property
    def state(self) -> Standing: ...

    def begin(
        self, stream: int, *, tags: Mapping[str, Any] | None, steering: Mapping[str, Any] | None
    ) -> None:
        """Before a request's first rows, and again when it is steered otherwise."""

    def offer(self, block: Block) -> bool:
        """Rows of any requests at one point; False: refused, and counted in `losses`.

        The same row may come again after a preemption: the newest counts.
        """

    def finish(self, stream: int) -> None:
        """No rows of this request will follow, unless it begins again: for another answer."""

    def losses(self, stream: int) -> int:
        """Rows of this request that were refused or lost since this was last asked."""

    def flush(self, timeout_s: float) -> None:
        """Return when all that was accepted before is safe; StoreStoppedError if it is not."""

    def close(self) -> None:
        """Nothing follows; StoreStoppedError if rows that were accepted are lost."""


Factory = Callable[[Mapping[str, Any], About], Consumer]


def in_engine(specs: Iterable[ConsumerSpec], found: Iterable[EntryPoint] | None = None) -> str:
    """The first kind that must be in the engine's own process; empty if there is none.

    Such a factory says so by an attribute: `in_engine = True`.
    """
    known = {entry.name: entry for entry in found or entry_points(group=GROUP)}
    kinds = (spec.kind for spec in specs if getattr(_factory(spec, known), "in_engine", False))
    return next(kinds, "")


def open_consumers(
    specs: Iterable[ConsumerSpec], about: About, found: Iterable[EntryPoint] | None = None
) -> dict[str, Consumer]:
    """All of them by name, or ConfigError and none is left open."""
    known = {entry.name: entry for entry in found or entry_points(group=GROUP)}
    opened: dict[str, Consumer] = {}
    try:
        for spec in specs:
            opened[spec.name] = _factory(spec, known)(spec.options, about)
    except BaseException:
        for consumer in opened.values():
            consumer.close()
        raise
    return opened


def _factory(spec: ConsumerSpec, known: Mapping[str, EntryPoint]) -> Factory:
    if spec.kind not in known:
        raise ConfigError(
            f"no capture consumer is named {quote(spec.kind)}; there are "
            f"{', '.join(sorted(known)) or 'none'}; a package that brings it has an entry point of "
            f"the group {GROUP}"
        )
    factory: Factory = known[spec.kind].load()
    return factory
