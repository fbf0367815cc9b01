"""An engine whose ranks Ray starts is refused, or ends, where rows would be missing.

What it serves: tests/engine/test_tensor_parallel.py, layouts ray-2 and ray-graph-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import clairai
from tests.engine import models, ray_cluster, steering
from tests.engine.installed_plugin import InstalledPlugin
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Ask
from tests.engine.test_rank_faults import hide_a_tap_on_rank_1

pytestmark = [
    pytest.mark.engine,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: `make ray` has it"),
]


@contextmanager
def _engine(
    nodes: tuple[dict[str, Any], ...],
    tmp_path: Path,
    environment: dict[str, str],
    *,
    folder: Path | None = None,
) -> Iterator[EngineProcess]:
    """Two ranks on a cluster of these nodes, whose processes run in `folder`."""
    (tmp_path / "packages").mkdir()
    plugin = InstalledPlugin(tmp_path / "packages", ray_cluster.PLATFORM_ENTRY)
    with (
        ray_cluster.run_cluster(nodes, paths=(plugin.path,), folder=folder) as cluster,
        EngineProcess(
            plant=plugin,
            start_s=500,
            environment={
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to the ranks
                "PYTHONUNBUFFERED": "1",  # and read what they print
                **cluster.engine_variables,
                **environment,
            },
            runtime=tmp_path / "run",
            model=str(models.tiny("llama", tmp_path / "llama")),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
            additional_config=clairai.config(points=["post_block.1"]),
        ) as engine,
    ):
        yield engine


def test_a_node_without_clairai_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = ray_cluster.make_device_nodes(1, 1, variables={"VLLM_PLUGINS": "ray_cpu"})
    with pytest.raises(EngineFailed), _engine(nodes, tmp_path, {}):
        pass
    said = capfd.readouterr()
    assert "not every rank of this engine answers clairai" in said.out + said.err
    assert "install the same clairai on every node" in said.out + said.err


def test_a_ring_on_another_node_than_its_readers_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The devices are all on the second node, whose processes find another runtime folder."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    elsewhere = {"CLAIRAI_RUNTIME_DIR": "/proc/self/cwd/run"}
    nodes = ray_cluster.make_device_nodes(0, 2, variables=elsewhere)
    with (
        pytest.raises(EngineFailed),
        _engine(nodes, tmp_path, {}, folder=tmp_path / "there"),
    ):
        pass
    said = capfd.readouterr()
    assert "rank 0, which has the ring, is on another node" in said.out + said.err
    assert "start vLLM on a node with a free device" in said.out + said.err


def test_a_tap_that_stops_on_another_node_ends_the_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a compiled graph of Ray's, which reads the answer of one rank alone."""
    environment = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}
    with _engine(ray_cluster.make_device_nodes(1, 1), tmp_path, environment) as engine:
        assert engine.call(hide_a_tap_on_rank_1) == [0, 1]
        with pytest.raises(EngineFailed, match="EngineDeadError"):
            engine.call(steering.answer, [Ask(tuple(range(10, 30)), num_new=100)])
    said = capfd.readouterr()
    assert "rank 1 ends, and the engine with it" in said.out + said.err
