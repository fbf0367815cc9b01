"""Takes the engine's capture setting; gives its clerk: a process of its own, if it can be."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, Final

from clairai.capture import tickets
from clairai.capture.arena import Arena
from clairai.capture.clerks import Clerk
from clairai.capture.collector import Collector
from clairai.capture.consumers import About, Consumer, in_engine, open_consumers
from clairai.capture.far import FarClerk
from clairai.capture.guarded import Guarded
from clairai.capture.near import NearClerk, origins
from clairai.capture.setting import ConsumerSpec, Setting
from clairai.errors import ConfigError
from clairai.points import quote

# Two processes share plain words of memory, and Python has no other stores than plain ones.
ORDERED: Final = ("x86_64", "AMD64")


def open_clerk(setting: Setting, about: About) -> Clerk:
    """ConfigError if a consumer cannot be opened, or not where it was asked for."""
    is_apart = _is_apart(setting)
    arena = Arena.create(setting.staging_mib << 20)
    try:
        return _far(setting, about, arena) if is_apart else _near(setting, about, arena)
    except BaseException:
        arena.close()
        raise


def _is_apart(setting: Setting) -> bool:
    if setting.process == "engine":
        return False
    kind, machine = in_engine(setting.consumers), platform.machine()
    if not kind and machine in ORDERED:
        return True
    if setting.process == "own":
        why = f"consumer {kind} is" if kind else f"on {machine} they are"
        raise ConfigError(
            f'capture.process is "own", but {why} in the engine\'s own process; leave it out'
        )
    return False


def _far(setting: Setting, about: About, arena: Arena) -> FarClerk:
    specs = tuple(tickets.Spec(s.name, s.kind, _plain(s)) for s in setting.consumers)
    return FarClerk.start(tickets.Hello(about, specs, setting.pending_mib << 20), arena)


def _plain(spec: ConsumerSpec) -> dict[str, Any]:
    """Its options, which cross to another process as data."""
    options = dict(spec.options)
    try:
        tickets.ENCODER.encode(options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"options of capture consumer {quote(spec.name)} must be what JSON has: {error}"
        ) from None
    return options


def _near(setting: Setting, about: About, arena: Arena) -> NearClerk:
    opened = open_consumers(setting.consumers, about)
    consumers: Mapping[str, Consumer] = {name: Guarded(one) for name, one in opened.items()}
    collector = Collector(
        consumers,
        origins(about),
        batch_nbytes=arena.nbytes // 4,
        pending_nbytes=setting.pending_mib << 20,
    )
    return NearClerk(consumers, collector, about, arena)
