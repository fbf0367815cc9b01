"""`clairai capture run --ray`: the same as `run_job`, with engines on many machines.

The prompts that are not done yet are cut into tasks, and Ray Data gives each to an actor. An actor
that dies is started again, and its tasks are done again. This process alone commits: the shards of
a task become part of the folder with one line of its manifest, so each prompt is there once.

Runs in: the process of the command; it has no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.batch.capture_engine import BatchCapture
from clairai.batch.prompts import Prompt, read_prompts
from clairai.batch.ray_actor import ActorPlan, CaptureActor, TaskReport
from clairai.batch.resume import leave_out_finished, wait_for_writer
from clairai.batch.run_job import CaptureJob, JobProgress, identify_run
from clairai.errors import ConfigError, StoreStoppedError, missing_extra, quote
from clairai.store.remote_disk import is_address
from clairai.store.shared_folder import SharedFolder, open_shared_folder

MAX_TASK_PROMPTS: Final = 256
TASKS_PER_ENGINE: Final = 4  # at least: so that a slow one, or one that dies, holds up little
MAX_RESTARTS: Final = 8  # of one actor, and of one task: prompts that kill an engine end the run
MAX_ENGINES: Final = 4096


@dataclass(frozen=True)
class RayOptions:
    """Which cluster, and how many engines; None: one for each GPU, or for each machine without."""

    address: str
    engines: int | None = None

    def __post_init__(self) -> None:
        if self.engines is not None and not 1 <= self.engines <= MAX_ENGINES:
            raise ConfigError(f"--engines is {self.engines}; give 1 to {MAX_ENGINES}")


def run_ray_job(job: CaptureJob, options: RayOptions) -> Iterator[JobProgress]:
    """Progress before the first task and after each commit."""
    prompts = read_prompts(job.prompts)
    points, identity = identify_run(job)
    if not is_address(job.folder):
        wait_for_writer(Path(job.folder))
    with open_shared_folder(job.folder) as folder:
        unfinished = leave_out_finished(folder.store(), prompts, identity, folder=job.folder)
        before = len(prompts) - len(unfinished)
        yield JobProgress(0, len(unfinished), before, 0, 0)
        if not unfinished:
            return
        for prompt in unfinished:
            identity.tags(prompt)  # refuses tags that are too long, before an engine starts
        capture = BatchCapture(points, job.positions, job.encoder, job.max_tokens, job.batch_mib)
        plan = ActorPlan(job.model, capture, job.arguments, identity, job.folder, folder.first_line)
        with connect(options) as cluster:
            tasks = cut_tasks(unfinished, cluster.num_engines(job))
            for done, tokens in commit_tasks(folder, tasks, cluster.run(tasks, plan, job)):
                yield JobProgress(done, len(unfinished), before, tokens, 0)


def commit_tasks(
    folder: SharedFolder, tasks: Sequence[Sequence[Prompt]], reports: Iterable[TaskReport]
) -> Iterator[tuple[int, int]]:
    """Prompts and tokens done, after each commit."""
    waiting = dict(enumerate(tasks))
    done = tokens = 0
    for report in reports:
        if report.error:
            raise ConfigError(f"{report.error}; what was committed stays")
        prompts = waiting.pop(report.task, None)
        if prompts is None:
            continue  # it was done twice: what came first is committed
        folder.commit(report.shards)
        done, tokens = done + len(prompts), tokens + report.tokens
        yield done, tokens
    if waiting:
        raise StoreStoppedError(
            f"Ray ended, and {len(waiting)} tasks are not done; start the command again"
        )


def cut_tasks(prompts: Sequence[Prompt], num_engines: int) -> list[list[Prompt]]:
    size = -(-len(prompts) // (TASKS_PER_ENGINE * num_engines))
    size = min(max(size, 1), MAX_TASK_PROMPTS)
    return [list(prompts[first : first + size]) for first in range(0, len(prompts), size)]


@contextmanager
def connect(options: RayOptions) -> Iterator[RayCluster]:
    try:
        import ray
        import ray.data
    except ImportError:
        raise missing_extra("Ray", "ray") from None
    try:
        ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # it has no exception of its own for this
        raise ConfigError(
            f"Ray cannot be reached at {quote(options.address)}, {type(error).__name__}: "
            f"{quote(str(error), 200)}; give the address of a running cluster, or `local`"
        ) from None
    try:
        yield RayCluster(ray, options)
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to."""

    ray: Any
    options: RayOptions

    def num_engines(self, job: CaptureJob) -> int:
        if self.options.engines is not None:
            return self.options.engines
        num_gpus = int(self.ray.cluster_resources().get("GPU", 0))
        if num_gpus:
            return max(num_gpus // _gpus_of_engine(job), 1)
        return sum(1 for node in self.ray.nodes() if node["Alive"])

    def run(
        self, tasks: Sequence[Sequence[Prompt]], plan: ActorPlan, job: CaptureJob
    ) -> Iterator[TaskReport]:
        """A report for each task, as they are done."""
        has_gpus = self.ray.cluster_resources().get("GPU", 0) > 0
        self.ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [
            {"task": number, "prompts": msgspec.json.encode(prompts)}
            for number, prompts in enumerate(tasks)
        ]
        # A block is a task: its report is here when it is done, and not when others are too.
        reports = self.ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            CaptureActor,
            fn_constructor_args=(plan,),
            batch_size=1,
            batch_format="numpy",
            concurrency=min(self.num_engines(job), len(rows)),
            num_cpus=1,
            num_gpus=_gpus_of_engine(job) if has_gpus else 0,
            scheduling_strategy="SPREAD",
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
        try:
            for row in reports.iter_rows():
                yield msgspec.json.decode(row["report"], type=TaskReport)
        except self.ray.exceptions.RayError as error:
            raise StoreStoppedError(
                f"Ray gave up, {quote(str(error), 400)}; what was committed stays: start the "
                "command again"
            ) from None


def _gpus_of_engine(job: CaptureJob) -> int:
    ranks = job.arguments.get("tensor_parallel_size", 1)
    return ranks if isinstance(ranks, int) and ranks > 0 else 1
