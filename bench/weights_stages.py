"""Takes a process before its engine starts; gives how long each stage of a hand-over takes there.

The engine core is forked from it, so it has the same clocks around its functions. Each writes a
line when a stage is over, while the file is there; who sends makes it, reads it and takes it away.
Where vLLM spawns its core instead (its CPU build does) only the sender's stages are seen.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

ENVIRONMENT: Final = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
FILE: Final = "stages.jsonl"
STAGES: Final = (
    "clairai.weights.sender:Sender.send",
    "clairai.weights.sender:Sender._reach",
    "clairai.weights.sender:Sender._plan",
    "clairai.weights.ways:InProcess.state",
    "clairai.weights.ways:InProcess.plan",
    "clairai.weights.ways:InProcess.commit",
    "clairai.weights.pack:Packer.__init__",
    "clairai.weights.pack:Packer.pack",
    "clairai.weights.pack:_allocate",
    "clairai.weights.device_sums:begin_copy",
    "clairai.weights.device_sums:_finished",
    "clairai.weights.port:Port.offer",
    "clairai.weights.port:Port.close",
    "clairai.ring.cuda:DeviceBlock.close",
    "clairai.offline:ProbeBank.redirect",
    "clairai.steer.desk:Desk.control",
    "clairai.weights.intake:Handover.answer",
    "clairai.weights.receiver:Receiver.check",
    "clairai.weights.receiver:_check_cargo",
    "clairai.weights.receiver:_shipment",
    "clairai.weights.dock:Dock.land",
    "clairai.weights.dock:Dock._open",
    "clairai.weights.dock:_read",
    "clairai.weights.dock:Cargo.close",
    "clairai.compat.reload:reload",
    "clairai.probe.columns:Columns.redirect",
    "clairai.tap.tables:Tables.load",
    "clairai.tap.station:Station.install",
    "clairai.tap.station:Station.reweigh",
)


def plant(folder: str) -> None:
    """Runs in the engine's process before vLLM is imported there."""
    for stage in STAGES:
        module, name = stage.split(":")
        owner: Any = importlib.import_module(module)
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, _timed(getattr(owner, last), name, Path(folder) / FILE))


def planted(folder: Path) -> Callable[[], None]:
    return partial(plant, str(folder))


def _timed(original: Any, name: str, file: Path) -> Any:
    @wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return original(*given, **named)
        finally:
            took_ms = (time.perf_counter() - began_s) * 1e3
            if file.exists():
                _write(file, [os.getpid(), name, began_s, took_ms])

    return call


def _write(file: Path, line: list[Any]) -> None:
    with file.open("a") as target:
        target.write(json.dumps(line) + "\n")


def of(folder: Path, act: Callable[[], Any]) -> dict[str, list[float]]:
    """Of one call: when each stage first began, in ms, how often it did, and all it took."""
    file = folder / FILE
    file.touch()
    began_s = time.perf_counter()
    try:
        act()
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    finally:
        file.unlink()
    found: dict[str, list[float]] = {}
    for pid, name, at_s, took_ms in sorted(lines, key=lambda line: line[2]):
        side = "sender" if pid == os.getpid() else "engine"
        first = round((at_s - began_s) * 1e3, 2)
        before = found.setdefault(f"{side} {name}", [first, 0, 0.0])
        before[1] += 1
        before[2] = round(before[2] + took_ms, 2)
    return found
