"""A run on many machines commits each prompt once, whatever machines and the command do.

Here tasks are run by this process, in any order, twice or not at all; `tests/engine` has real ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from clairai.batch import ray_job
from clairai.batch.prompts import Prompt
from clairai.batch.ray_actor import ActorPlan, TaskReport
from clairai.batch.ray_job import MAX_TASK_PROMPTS, RayOptions, cut_tasks, run_ray_job
from clairai.batch.resume import RunIdentity
from clairai.batch.run_job import CaptureJob, parse_job, run_job
from clairai.cli.commands import app
from clairai.errors import ConfigError, StoreStoppedError
from clairai.points import Point
from clairai.store.disk import LocalDisk
from clairai.store.read import Store
from clairai.store.read import open as open_store
from clairai.store.shared_folder import open_place
from clairai.store.write import Writer
from tests.support.row_blocks import block

RUN = RunIdentity("tiny", ("post_block.3",), '"all"', '{"name":"raw"}', 1)
NUM_PROMPTS = 17


@dataclass
class Machines:
    """Runs tasks as `source` says: reordered, repeated, and cut off."""

    scratch: Path
    source: random.Random

    def num_engines(self, _job: CaptureJob) -> int:
        return 2

    def run(
        self, tasks: Sequence[Sequence[Prompt]], plan: ActorPlan, _job: CaptureJob
    ) -> Iterator[TaskReport]:
        left = [task for number in range(len(tasks)) for task in [number] * self._times()]
        self.source.shuffle(left)
        for number in left:
            report = self._capture(number, tasks[number], plan)
            fate = self.source.random()
            if fate < 0.1:
                raise KeyboardInterrupt  # the command is stopped
            if fate > 0.2:  # else it dies with its report
                yield report

    def _times(self) -> int:
        return self.source.choice((1, 1, 2))

    def _capture(self, number: int, prompts: Sequence[Prompt], plan: ActorPlan) -> TaskReport:
        place = open_place(plan.where, plan.first_line)
        scratch = self.scratch / uuid4().hex
        with Writer(scratch, commits="on_flush") as writer:
            for prompt in prompts:
                stream = self.source.getrandbits(40)
                writer.begin(stream, tags=plan.identity.tags(prompt))
                writer.offer(block(stream))
                writer.finish(stream)
            writer.flush()
        disk = LocalDisk(scratch)
        shards = Store(disk).shards
        for one in shards:
            place.put(one.name, disk.view(one.name))
        return TaskReport(number, len(prompts), shards)


def _job(tmp_path: Path, where: str, num_prompts: int = NUM_PROMPTS) -> CaptureJob:
    file = tmp_path / "p.txt"
    file.write_text("".join(f"prompt {number % 11}\n" for number in range(num_prompts)))
    return parse_job(
        "tiny",
        prompts=file,
        folder=where,
        points=["post_block.3"],
        positions="all",
        encoder="raw",
        max_tokens=1,
        batch_mib=1,
        engine="{}",
    )


def _lines(where: str) -> list[int]:
    return sorted(one.tags["prompt"]["line"] for one in open_store(where).requests())


@pytest.mark.parametrize("kind", ["disk", "address"])
@pytest.mark.parametrize("seed", range(12))
def test_every_prompt_is_there_once_however_often_tasks_are_done_or_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    where = f"memory://{uuid4().hex}/run" if kind == "address" else str(tmp_path / "run")
    source = random.Random(seed)  # noqa: S311
    _use(monkeypatch, Machines(tmp_path, source))
    for _ in range(100):
        with suppress(KeyboardInterrupt, StoreStoppedError):
            last = list(run_ray_job(_job(tmp_path, where), RayOptions("local")))[-1]
            break
    assert last.done + last.before == NUM_PROMPTS
    assert _lines(where) == list(range(1, NUM_PROMPTS + 1))
    # Lines that are added are done, and nothing else.
    for _ in range(100):
        with suppress(KeyboardInterrupt, StoreStoppedError):
            list(run_ray_job(_job(tmp_path, where, NUM_PROMPTS + 4), RayOptions("local")))
            break
    assert _lines(where) == list(range(1, NUM_PROMPTS + 5))


def _use(monkeypatch: pytest.MonkeyPatch, machines: Any) -> None:
    @contextmanager
    def connect(_options: RayOptions) -> Iterator[Any]:
        yield machines

    monkeypatch.setattr(ray_job, "connect", connect)
    monkeypatch.setattr(ray_job, "identify_run", lambda _: ((Point.parse("post_block.3"),), RUN))


def test_what_an_engine_refuses_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Machines):
        def _capture(self, number: int, *_: object) -> TaskReport:
            return TaskReport(number, error="line 3 has 900 tokens; give 1 to 128")

    _use(monkeypatch, Refusing(tmp_path, random.Random(1)))  # noqa: S311
    with pytest.raises(ConfigError, match="line 3 has 900 tokens"):
        list(run_ray_job(_job(tmp_path, str(tmp_path / "run")), RayOptions("local")))
    assert _lines(str(tmp_path / "run")) == []


@pytest.mark.parametrize(("num_prompts", "num_engines"), [(1, 8), (7, 2), (5000, 2), (40000, 8)])
def test_tasks_hold_every_prompt_once_and_are_enough_for_all(
    num_prompts: int, num_engines: int
) -> None:
    prompts: list[Any] = list(range(num_prompts))
    tasks = cut_tasks(prompts, num_engines)
    assert [one for task in tasks for one in task] == prompts
    assert max(map(len, tasks)) <= MAX_TASK_PROMPTS
    assert len(tasks) >= min(num_prompts, 3 * num_engines)


def test_an_address_without_a_cluster_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"add --ray, or give a folder.*capture send"):
        list(run_job(_job(tmp_path, "s3://bucket/run")))


@pytest.mark.parametrize("number", [0, -1, 5000])
def test_a_number_of_engines_out_of_bounds_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match="--engines is"):
        RayOptions("local", number)


def test_engines_without_a_cluster_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Hi\n")
    arguments = ["--prompts", str(tmp_path / "p.txt"), "--points", "post_block.0"]
    said = CliRunner().invoke(app, ["capture", "run", "tiny", *arguments, "--engines", "2"])
    assert said.exit_code == 2
    assert "--engines is for --ray" in said.output


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_way_to_it_is_named() -> None:
    with pytest.raises(ConfigError, match=r"clairai\[ray\]"), ray_job.connect(RayOptions("local")):
        pass
