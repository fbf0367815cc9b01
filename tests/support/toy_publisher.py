"""A StepPublisher as compat/worker.py builds one, and steps for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from clairai.engine.publish.step_publisher import StepPublisher, WorkerInfo
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, NewRequest, RequestMark, StepBatch
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.files import dumps
from clairai.probe.model import Probe
from clairai.settings import Settings
from tests.support.probes import probe

WIDTH, CAPACITY, MAX_TOKENS = 3, 2, 32
FIRST, SECOND = Point("post_block", 0), Point("post_block", 1)
# post_block.0 is pre_attn.1: one tensor, one site.
SITE_OF = {FIRST: "pre_attn.1", Point("pre_attn", 1): "pre_attn.1", SECOND: "post_block.1"}
POINTS = (FIRST, SECOND)


@contextmanager
def running_publisher(runtime: Path, *, weights: int | None = None) -> Iterator[StepPublisher]:
    """A step publisher that is closed, with its ring and its socket, after the block."""
    settings = Settings(
        points=tuple(map(str, POINTS)), capacity=CAPACITY, ring_mib=1, runtime_dir=str(runtime)
    )
    names = list(dict.fromkeys(SITE_OF[point] for point in POINTS))
    tables = ScoreTables(names, width=WIDTH, capacity=CAPACITY, max_tokens=MAX_TOKENS, device="cpu")
    columns = EngineBank.empty(POINTS, CAPACITY, WIDTH, "org/toy", SITE_OF)
    about = WorkerInfo("toy", "0.0.0", settings.points, weights=weights)
    step_publisher = StepPublisher(settings, tables, columns, about)
    step_publisher.serve()
    try:
        yield step_publisher
    finally:
        step_publisher.close()


def file_of(name: str = "p", point: Point = SECOND, **changes: object) -> bytes:
    """The safetensors form of a probe that fits."""
    made: Probe = probe(name, point=point, **changes)
    return dumps(made)


def new_request(number: int, *, prompt_len: int = 2) -> NewRequest:
    return NewRequest(f"in-{number}", f"ex-{number}", RequestMark(1000 + number), prompt_len)


def forward(step_publisher: StepPublisher, number: int, *, start: int, count: int) -> torch.Tensor:
    """One step of one request; returns the rows that every site read."""
    generator = torch.Generator().manual_seed(number * 100 + start)
    rows_TD = torch.randn(count, WIDTH, generator=generator)
    counts_R, starts_R = np.array([count], np.int32), np.array([start], np.int32)
    step_publisher.place(StepBatch([f"in-{number}"], counts_R, starts_R))
    for site in step_publisher.tables.sites:
        step_publisher.tables.site(site).read(rows_TD)
    step_publisher.end(lambda: inputs(start))
    return rows_TD


def inputs(start: int = 0) -> ForwardInputs:
    """The runner's buffers: longer than the step."""
    positions_T = torch.arange(start, start + MAX_TOKENS)
    return ForwardInputs(positions_T, torch.full((MAX_TOKENS,), 5, dtype=torch.int32))


def state_of(step_publisher: StepPublisher) -> tuple[object, ...]:
    """Everything that a change of the bank changes."""
    columns = step_publisher.bank
    weights = step_publisher.tables.weights_SHDK.numpy().tobytes()
    return columns.version, columns.to_message(), columns.slots, weights
