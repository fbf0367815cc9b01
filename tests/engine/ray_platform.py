"""vLLM's CPU platform with a name for its devices in a Ray cluster, as a plugin of vLLM.

Platform.ray_device_key  platforms/interface.py  0.32:150 is empty for a CPU, and vLLM's Ray
executors then refuse to start (v1/executor/ray_utils.py initialize_ray_cluster, 0.32:572). All else
that they need its CPU build has. A node of a test's cluster says how many such devices it has. Not
imported by a test: vLLM finds it by the entry point in ray_cluster.py.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


def register() -> str:
    return f"{__name__}.RayCpuPlatform"


class RayCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM is untyped here
    ray_device_key = "GPU"  # Ray counts what it is told, and starts nothing on it
