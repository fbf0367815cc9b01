"""A Ray cluster of two machines, as raylets of this one; ends when its standard input does.

Run: python -m tests.engine.ray_cluster
It prints its address, and for every line that it reads kills one actor that captures and prints
its process id.
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
        cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        for _ in sys.stdin:
            actors = [one for one in psutil.Process().children(recursive=True) if _captures(one)]
            print(actors[0].pid, flush=True)
            os.kill(actors[0].pid, signal.SIGKILL)
    finally:
        cluster.shutdown()


def _captures(process: psutil.Process) -> bool:
    """By the title that Ray gives a process while it runs a batch."""
    try:
        title = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return title.startswith("ray::") and "CaptureActor" in title


if __name__ == "__main__":
    main()
