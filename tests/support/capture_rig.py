"""The worker's captures without a worker: tests run their steps one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from msgspec import structs

from clairai.capture.backend import CaptureBackend, open_backend
from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.collector import Collector
from clairai.capture.consumers import EngineInfo, GuardedConsumer
from clairai.capture.in_process import InProcessBackend
from clairai.capture.staging_arena import StagingArena
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.engine.capture.row_copier import RowCopier
from clairai.engine.capture.worker_capture import WorkerCapture
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, JudgedDrafts, NewRequest, RequestMark
from clairai.wire import capture_messages
from tests.support.capture_parts import ToyConsumer, batch

WIDTH, ROWS = 64, 32
SITE_NAMES = ("pre_attn.0", "post_block.0", "post_block.1")
SITES = {name: index for index, name in enumerate(SITE_NAMES)}


class ToyScores:
    """The sites and columns of some probes."""

    def __init__(self, **columns: tuple[int, int]) -> None:
        self._columns = columns
        self.followed: list[int] = []

    def column(self, probe: str) -> tuple[int, int] | None:
        return self._columns.get(probe)

    def make_wait(self, stream: int) -> None:
        self.followed.append(stream)


ABOUT = EngineInfo("m", "w", "float32", WIDTH, SITE_NAMES)


class Rig:
    """A worker's captures, on score tables of their own."""

    def __init__(self, backend: CaptureBackend, *, dtype: torch.dtype, device: str = "cpu") -> None:
        self.tables = ScoreTables(
            SITE_NAMES,
            width=WIDTH,
            capacity=2,
            max_tokens=ROWS,
            device=device,
            dtype=dtype,
            stash_rows=ROWS,
            is_capturing=True,
        )
        self.backend = backend
        self.copier = RowCopier(self.tables, backend)
        self.scores = ToyScores(anger=(1, 1))
        self.capture = WorkerCapture(self.copier, backend, SITES, self.scores)
        self.rng = np.random.default_rng(3)

    def enter(self, name: str, stream: int, wanted: CapturePlan, choice: int = 0) -> None:
        request = NewRequest(name, f"api-{name}", RequestMark(stream, choice), 4, None, wanted)
        self.capture.begin([request], [])

    def step(
        self,
        *laid: tuple[str, int, int],
        finished: tuple[str, ...] = (),
        rejected: tuple[int, ...] | None = None,
    ) -> Any:
        """Run a step and return its stash. The token at position p is 1000 + p.

        With `rejected` only the device knows that so many of each request's last tokens are
        rejected drafts, and where its rows lie: the host takes them for up to three behind.
        """
        self.capture.begin([], finished)
        given, drafts = batch(*laid), None
        if rejected is not None:
            spread_R = self.rng.integers(0, 4, len(laid)).astype(np.int32)
            starts_R = given.starts_R + np.where(given.starts_R > 0, spread_R, 0).astype(np.int32)
            given = structs.replace(given, starts_R=starts_R, lowest_R=given.starts_R)
            firsts_R = torch.zeros(len(laid) + 1, dtype=torch.int32)
            drafts = JudgedDrafts(firsts_R, torch.tensor(rejected).to(self.tables.device))
        num_tokens = int(given.counts_R.sum())
        self.capture.place(given)
        rows_STD = torch.tensor(self.rng.standard_normal((3, num_tokens, WIDTH)) * 3)
        for index, name in enumerate(SITE_NAMES):
            self.tables.site(name).read(rows_STD[index].to(self.tables.stash_SRD))
        positions = np.concatenate([np.arange(s, s + n) for _, s, n in laid])
        device = self.tables.device
        tokens = torch.tensor(positions + 1000, dtype=torch.int32, device=device)
        inputs = ForwardInputs(torch.tensor(positions, device=device), tokens, drafts)
        self.capture.end(lambda: inputs)
        return self.tables.stash_SRD[:, :num_tokens].clone()

    def told(self, stream: int) -> capture_messages.Captured:
        """What is known now of a stream's first answer."""
        reply = self.capture.answer(capture_messages.FindCaptures(streams=(stream,)))
        assert isinstance(reply, capture_messages.Captures)
        return reply.found[0][0]

    def ended(self, request_id: str, state: str) -> capture_messages.Captured:
        """Say that the caller has the last token, and wait until the answer has this state."""
        asked = capture_messages.FindCaptures((request_id,), is_ended=True)
        deadline_s = time.monotonic() + 60
        while True:
            reply = self.capture.answer(asked)
            assert isinstance(reply, capture_messages.Captures)
            ((told,),) = reply.found
            if told.state == state:
                return told
            assert time.monotonic() < deadline_s, told
            self.settle()

    def settle(self) -> None:
        """Give the backend time to work."""
        time.sleep(0.002)


class InProcessRig(Rig):
    """Captures in this process, with consumers that the test holds."""

    def __init__(
        self,
        consumers: dict[str, ToyConsumer],
        *,
        nbytes: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.consumers = consumers
        guarded: dict[str, Any] = {name: GuardedConsumer(one) for name, one in consumers.items()}
        about = replace(ABOUT, dtype=str(dtype).removeprefix("torch."))
        self.collector = Collector(guarded, about, batch_nbytes=1 << 20, pending_nbytes=20_000)
        backend = InProcessBackend(guarded, self.collector, StagingArena.create(nbytes))
        super().__init__(backend, dtype=dtype, device=device)

    def found(self, stream: int) -> capture_messages.Captured:
        """The same, once everything so far has been handed on."""
        self.settle()
        return self.told(stream)

    def settle(self) -> None:
        done = threading.Event()
        self.collector._inbox.put(done.set)
        assert done.wait(60)


@contextmanager
def rig(
    *,
    nbytes: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **consumers: ToyConsumer,
) -> Iterator[InProcessRig]:
    made = InProcessRig(
        consumers or {"toy": ToyConsumer()}, nbytes=nbytes, dtype=dtype, device=device
    )
    try:
        yield made
    finally:
        made.capture.close()


@contextmanager
def remote_rig(
    setting: dict[str, Any], *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Iterator[Rig]:
    """Captures with a capture writer process, and the consumers of the setting."""
    about = replace(ABOUT, dtype=str(dtype).removeprefix("torch."))
    made = Rig(open_backend(CaptureSettings.parse(setting), about), dtype=dtype, device=device)
    try:
        yield made
    finally:
        made.capture.close()
