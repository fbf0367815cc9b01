"""Takes a runtime folder; gives a Station as compat/worker.py builds one, and its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from clairai.points import Point
from clairai.probe.columns import Columns
from clairai.probe.files import dumps
from clairai.probe.model import Probe
from clairai.settings import Settings
from clairai.tap.outlet import Inputs
from clairai.tap.rows import Batch, Mark
from clairai.tap.station import About, NewRequest, Station
from clairai.tap.tables import Tables
from tests.unit.tiny_probes import probe

WIDTH, CAPACITY, MAX_TOKENS = 3, 2, 32
FIRST, SECOND = Point("post_block", 0), Point("post_block", 1)
# post_block.0 is pre_attn.1: one tensor, one site.
SITE_OF = {FIRST: "pre_attn.1", Point("pre_attn", 1): "pre_attn.1", SECOND: "post_block.1"}
POINTS = (FIRST, SECOND)


@contextmanager
def running_station(runtime: Path, *, weights: int | None = None) -> Iterator[Station]:
    """A station that is gone, with its ring and its socket, after the block."""
    settings = Settings(
        points=tuple(map(str, POINTS)), capacity=CAPACITY, ring_mib=1, runtime_dir=str(runtime)
    )
    names = list(dict.fromkeys(SITE_OF[point] for point in POINTS))
    tables = Tables(names, width=WIDTH, capacity=CAPACITY, max_tokens=MAX_TOKENS, device="cpu")
    columns = Columns.empty(POINTS, CAPACITY, WIDTH, "org/toy", SITE_OF)
    about = About("toy", "0.0.0", settings.points, weights=weights)
    station = Station(settings, tables, columns, about)
    station.serve()
    try:
        yield station
    finally:
        station.close()


def file_of(name: str = "p", point: Point = SECOND, **changes: object) -> bytes:
    """The safetensors form of a probe that fits."""
    made: Probe = probe(name, point=point, **changes)
    return dumps(made)


def new_request(number: int, *, prompt_len: int = 2) -> NewRequest:
    return NewRequest(f"in-{number}", f"ex-{number}", Mark(1000 + number), prompt_len)


def forward(station: Station, number: int, *, start: int, count: int) -> torch.Tensor:
    """One step of one request; gives the rows that every site was handed."""
    generator = torch.Generator().manual_seed(number * 100 + start)
    rows_TD = torch.randn(count, WIDTH, generator=generator)
    counts_R, starts_R = np.array([count], np.int32), np.array([start], np.int32)
    station.place(Batch([f"in-{number}"], counts_R, starts_R))
    for site in station.tables.sites:
        station.tables.site(site).read(rows_TD)
    station.end(lambda: inputs(start))
    return rows_TD


def inputs(start: int = 0) -> Inputs:
    """The runner's buffers: longer than the step."""
    positions_T = torch.arange(start, start + MAX_TOKENS)
    return Inputs(positions_T, torch.full((MAX_TOKENS,), 5, dtype=torch.int32))


def state_of(station: Station) -> tuple[object, ...]:
    """Everything that a change of the bank changes."""
    columns = station.columns
    weights = station.tables.weights_SHDK.numpy().tobytes()
    return columns.version, columns.bank(), columns.slots(), weights
