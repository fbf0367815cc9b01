"""One engine of a run on many machines: captures the prompts of a task into the run's folder.

Rows go through a scratch folder of the actor's own. When all prompts of a task are committed
there, their shards are put into the folder of the run, and the report names them: the command
commits them with one line, or never.

Runs in: an actor of Ray Data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from clairai.batch.capture_engine import BatchCapture, CapturingEngine, start_engine
from clairai.batch.prompts import Prompt
from clairai.batch.resume import RunIdentity
from clairai.batch.run_job import plan_batches, run_batches
from clairai.errors import ClairaiError
from clairai.store.disk import LocalDisk
from clairai.store.read import Store
from clairai.store.shard_manifest import ShardEntry
from clairai.store.shared_folder import ShardPlace, open_place
from clairai.train.start_engine import prepare_environment


@dataclass(frozen=True)
class ActorPlan:
    """What every actor of a run does, and where its rows go."""

    model: str
    capture: BatchCapture
    arguments: Mapping[str, Any]
    identity: RunIdentity
    where: str
    first_line: bytes  # of the manifest there


class TaskReport(msgspec.Struct, frozen=True):
    """What an actor did with a task. With an `error` nothing of it is to be committed."""

    task: int
    tokens: int = 0
    shards: tuple[ShardEntry, ...] = ()
    error: str = ""


class CaptureActor:
    """For `map_batches`: a batch is one row, with the number and the prompts of a task."""

    def __init__(self, plan: ActorPlan) -> None:
        self._plan = plan
        self._resources = ExitStack()
        self._engine: CapturingEngine | None = None
        self._error = ""
        try:
            self._start()
        except ClairaiError as error:  # of every task: an actor that raises is only started again
            self._error = error.reason

    def _start(self) -> None:
        plan = self._plan
        self._place: ShardPlace = open_place(plan.where, plan.first_line)
        folder = tempfile.TemporaryDirectory(prefix="clairai-")
        self._scratch = Path(self._resources.enter_context(folder)) / "captures"
        prepare_environment()
        self._engine = self._resources.enter_context(
            start_engine(plan.model, self._scratch, plan.capture, plan.arguments)
        )
        self._num_placed = 0  # commits of the scratch folder

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        task, prompts = int(batch["task"][0]), batch["prompts"][0]
        try:
            report = self._run(task, msgspec.json.decode(prompts, type=list[Prompt]))
        except ClairaiError as error:
            report = TaskReport(task, error=error.reason)
        return {"report": [msgspec.json.encode(report)]}

    def _run(self, task: int, prompts: list[Prompt]) -> TaskReport:
        if self._engine is None:
            return TaskReport(task, error=self._error)
        batches = plan_batches(self._engine, prompts, self._plan.capture.max_tokens)
        for _ in run_batches(self._engine, batches, self._plan.identity):
            pass
        return TaskReport(task, sum(one.num_tokens for one in batches), self._place_shards())

    def _place_shards(self) -> tuple[ShardEntry, ...]:
        """Move what was committed to the scratch folder since, to the folder of the run."""
        disk = LocalDisk(self._scratch)
        commits = Store(disk).commits
        entries = tuple(one for line in commits[self._num_placed :] for one in line.shards)
        for entry in entries:
            self._place.put(entry.name, disk.view(entry.name))
            disk.remove(entry.name)
        self._num_placed = len(commits)
        return entries

    def __del__(self) -> None:
        self._resources.close()
