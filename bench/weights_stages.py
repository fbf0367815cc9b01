"""How long each stage of a transfer takes, measured on the sender's side.

What the engine does meanwhile is seen in what the sender waits for: plan, offer, commit.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final
from unittest import mock

STAGES: Final = (
    "clairai.weights.sender:Sender.send",
    "clairai.weights.sender:Sender._open_transport",
    "clairai.weights.sender:Sender._plan",
    "clairai.weights.engine_client:LlmEngine.state",
    "clairai.weights.engine_client:LlmEngine.plan",
    "clairai.weights.engine_client:LlmEngine.commit",
    "clairai.weights.engine_client:LlmEngine.commit_shared",
    "clairai.weights.pack:HostPacker.pack",
    "clairai.weights.pack:DevicePacker.__init__",
    "clairai.weights.pack:DevicePacker.begin",
    "clairai.weights.pack:DevicePacker._finish",
    "clairai.weights.pack:_allocate",
    "clairai.weights.device_checksum:begin_copy_and_checksum",
    "clairai.weights.socket_client:BufferClient.offer",
    "clairai.weights.socket_client:BufferClient.offer_early",
    "clairai.weights.socket_client:BufferClient.finish",
    "clairai.weights.socket_client:BufferClient.close",
    "clairai.local.gpu_memory:DeviceBlock.close",
    "clairai.library.probe_bank:ProbeBank.redirect",
)
Line = tuple[str, float, float]  # a stage, when it began, what it took


def of(act: Callable[[], Any]) -> dict[str, list[float]]:
    """When each stage first began, in ms, how often it did, and all it took."""
    lines: list[Line] = []
    with ExitStack() as patched:
        for stage in STAGES:
            owner, name = _found(stage)
            timed = _timed(getattr(owner, name), stage.split(":")[1], lines)
            patched.enter_context(mock.patch.object(owner, name, timed))
        began_s = time.perf_counter()
        act()
    found: dict[str, list[float]] = {}
    for name, at_s, took_s in sorted(lines, key=lambda line: line[1]):
        before = found.setdefault(name, [round((at_s - began_s) * 1e3, 2), 0, 0.0])
        before[1] += 1
        before[2] = round(before[2] + took_s * 1e3, 2)
    return found


def _found(stage: str) -> tuple[Any, str]:
    module, name = stage.split(":")
    owner: Any = importlib.import_module(module)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, last


def _timed(original: Any, name: str, lines: list[Line]) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return original(*given, **named)
        finally:
            lines.append((name, began_s, time.perf_counter() - began_s))

    return call
