"""A Ray cluster of several machines, as raylets of this one, in a process of its own.

Run: python -m tests.engine.ray_cluster '[{"num_gpus": 1}, {}]'
The nodes, the first with the head of the cluster. It prints its address, and ends when its standard
input does. For a line `actor` it kills an actor that captures, for a line `machine` the last node
with all its processes; then it prints the line again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.engine.process import ENVIRONMENT

ROOT: Final = Path(__file__).parents[2]
NODE: Final = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}
TWO_NODES: Final[tuple[dict[str, Any], ...]] = ({}, {})
# Gives vLLM's CPU build devices that Ray can count.
PLATFORM_ENTRY: Final = "[vllm.platform_plugins]\nray_cpu = tests.engine.ray_platform:register\n"


@dataclass(frozen=True)
class RayCluster:
    """The process that holds a cluster."""

    process: subprocess.Popen[str]
    address: str

    @property
    def engine_variables(self) -> dict[str, str]:
        """By which an engine on the first node finds the cluster, and has that node's address."""
        return {"RAY_ADDRESS": self.address, "VLLM_HOST_IP": self.address.partition(":")[0]}

    def kill(self, what: str) -> None:
        """`actor` or `machine`; returns when it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{what}\n"


def make_device_nodes(
    *numbers: int, variables: dict[str, str] | None = None
) -> tuple[dict[str, Any], ...]:
    """Nodes with so many devices each, and addresses of their own; `variables` are the last one's.

    vLLM's older Ray executor tells nodes by their addresses, and one machine has many of its own.
    """
    nodes: list[dict[str, Any]] = [{"num_gpus": number} for number in numbers]
    for index, node in enumerate(nodes[1:], start=2):
        address = f"127.0.0.{index}"
        node |= {"node_ip_address": address, "env_vars": {"VLLM_HOST_IP": address}}
    nodes[-1]["env_vars"] |= variables or {}
    return tuple(nodes)


@contextmanager
def run_cluster(
    nodes: tuple[dict[str, Any], ...] = TWO_NODES,
    *,
    paths: tuple[Path, ...] = (),
    folder: Path | None = None,
) -> Iterator[RayCluster]:
    """Processes of its nodes find modules in `paths`, too, and run in `folder`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.ray_cluster", json.dumps(nodes)]
    found = [str(ROOT / "src"), str(ROOT), *map(str, paths)]
    with subprocess.Popen(
        command,
        cwd=folder or ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(found)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield RayCluster(process, process.stdout.readline().strip())
        process.stdin.close()  # ends it


def main() -> None:
    from ray.cluster_utils import Cluster

    first, *others = [NODE | node for node in json.loads(sys.argv[1])]
    cluster = Cluster(initialize_head=True, head_node_args={**first, "include_dashboard": False})
    try:
        added = [cluster.add_node(**node) for node in others]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line == "machine\n":
                cluster.remove_node(added.pop(), allow_graceful=False)
            else:
                _kill_an_actor()
            print(line, end="", flush=True)
    finally:
        cluster.shutdown()


def _kill_an_actor() -> None:
    actors = [one for one in psutil.Process().children(recursive=True) if _captures(one)]
    os.kill(actors[0].pid, signal.SIGKILL)


def _captures(process: psutil.Process) -> bool:
    """By the title that Ray gives a process while it runs a batch."""
    try:
        title = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return title.startswith("ray::") and "CaptureActor" in title


if __name__ == "__main__":
    main()
