"""A Ray cluster of two machines, as raylets of this one; ends when its standard input does.

Run: python -m tests.engine.ray_cluster
It prints its address. For a line `actor` it kills an actor that captures, for a line `machine` the
second machine with all its processes; then it prints the line again.
"""

from __future__ import annotations

import os
import signal
import sys

import psutil
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        second = cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line == "machine\n":
                cluster.remove_node(second, allow_graceful=False)
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
