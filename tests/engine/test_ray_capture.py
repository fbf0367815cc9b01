"""Engines on a Ray cluster capture many prompts: each prompt's rows are there once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

import pytest

from clairai.errors import StoreError
from clairai.store.disk import LocalDisk
from clairai.store.read import Store
from clairai.store.read import open as open_store
from clairai.store.recover import verify
from clairai.store.repair import plan_repair
from tests.engine.process import ENVIRONMENT
from tests.engine.ray_cluster import RayCluster, run_cluster
from tests.support.ring_engine import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: `make ray` has it"),
]

ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 48
START_S = 400.0


def _prompts(path: Path) -> list[list[int]]:
    given = [[3 + 7 * line + at for at in range(12 + line % 9)] for line in range(NUM_PROMPTS)]
    lines = [{"prompt_token_ids": ids, "tags": {"half": ids[0] % 2}} for ids in given]
    path.write_text("\n".join(map(json.dumps, lines)))
    return given


def _command(model: Path, prompts: Path, where: str, cluster: RayCluster) -> list[str]:
    engine = '{"dtype": "float32", "enforce_eager": true, "max_model_len": 128}'
    return [
        *(sys.executable, "-W", "ignore", "-m", "clairai.cli", "capture", "run", str(model)),
        *("--prompts", str(prompts), "--to", where, "--points", "post_block.*"),
        *("--max-tokens", "2", "--batch-mib", "1", "--engine", engine),
        *("--ray", cluster.address, "--engines", "2"),
    ]


def _num_done(where: str) -> int:
    try:
        return len(open_store(where).requests())
    except StoreError:
        return 0


def _check_every_prompt_is_there_once(store: Store, given: list[list[int]]) -> None:
    lines = [one.tags["prompt"]["line"] for one in store.requests()]
    assert sorted(lines) == list(range(1, NUM_PROMPTS + 1))
    for request in store.requests():
        ids = given[request.tags["prompt"]["line"] - 1]
        for point in ("post_block.0", "post_block.3"):
            rows = store.rows(request.stream, point=point)
            assert rows.token_id[: len(ids)].tolist() == ids
            assert rows.position[: len(ids)].tolist() == [*range(len(ids))]
        assert request.tags["half"] == ids[0] % 2


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        yield running


def _wait_for_more(where: str, num_done: int, running: subprocess.Popen[str]) -> int:
    """How many prompts are done when it is more than so many; and there are others left."""
    until(
        lambda: _num_done(where) > num_done or running.poll() is not None,
        timeout_s=START_S,
    )
    assert running.poll() is None, running.stderr and running.stderr.read()[-4000:]
    found = _num_done(where)
    assert found < NUM_PROMPTS, "all is done: nothing was interrupted"
    return found


def test_an_actor_that_is_killed_is_replaced_and_every_prompt_is_done_once(
    cut_model: Path, tmp_path: Path
) -> None:
    given, folder = _prompts(tmp_path / "p.jsonl"), str(tmp_path / "captures")
    with run_cluster() as cluster:
        command = _command(cut_model, tmp_path / "p.jsonl", folder, cluster)
        with _running(command) as running:
            _wait_for_more(folder, 0, running)
            cluster.kill("actor")
            said, errors = running.communicate()
        assert running.returncode == 0, errors[-4000:]
        assert f"{NUM_PROMPTS} prompts done in {folder}" in said
        _check_every_prompt_is_there_once(open_store(folder), given)
        assert [one.fault for one in verify(LocalDisk(folder)) if one.fault] == []
        assert not plan_repair(LocalDisk(folder)).is_needed
        with _running(command) as again:
            said, errors = again.communicate()
        assert f"0 prompts done, {NUM_PROMPTS} were done before" in said, errors[-4000:]


@pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None,
    reason="moto or s3fs is not installed: `make ray` has them",
)
def test_a_run_into_a_bucket_goes_on_after_a_machine_and_then_its_command_were_killed(
    cut_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _prompts(tmp_path / "p.jsonl")
    with _bucket(monkeypatch) as where, run_cluster() as cluster:
        command = _command(cut_model, tmp_path / "p.jsonl", where, cluster)
        with _running(command) as running:
            num_done = _wait_for_more(where, 0, running)
            cluster.kill("machine")
            _wait_for_more(where, num_done, running)
            running.kill()
        num_done = _num_done(where)
        assert 0 < num_done < NUM_PROMPTS
        with _running(command) as again:
            said, errors = again.communicate()
        assert again.returncode == 0, errors[-4000:]
        assert f"{NUM_PROMPTS - num_done} prompts done, {num_done} were done before" in said
        store = open_store(where)
        _check_every_prompt_is_there_once(store, given)


def test_the_recipe_scores_prompts_and_writes_a_column_for_each_probe(tmp_path: Path) -> None:
    import pyarrow.parquet

    code, prose = "def add(a, b):\n    return", "The old house stood on a hill, and"
    (tmp_path / "p.txt").write_text("\n".join([code.replace("\n", " "), prose]))
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "score_with_ray.py")]
    with _running([*command, str(tmp_path / "p.txt"), str(tmp_path / "out"), "local"]) as running:
        _, errors = running.communicate()
    assert running.returncode == 0, errors[-4000:]
    found = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
    by_prompt = {one["text"]: one for one in found}
    assert len(found) == len(by_prompt) == 2
    assert by_prompt[prose]["code"] < 0.5 < by_prompt[code.replace("\n", " ")]["code"]


@contextmanager
def _bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a folder in a bucket of moto's S3 server."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    server = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    output = subprocess.DEVNULL
    with subprocess.Popen([*server, "-p", str(port)], stdout=output, stderr=output) as process:
        try:
            until(lambda: _makes_bucket(port), timeout_s=60)
            yield "s3://rows/run"
        finally:
            process.terminate()


def _makes_bucket(port: int) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/rows", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False
