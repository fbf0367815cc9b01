"""Sends new weights to a real Ray actor, twice, and writes what it then serves to a folder.

A process of its own: Ray starts servers and threads, and warns freely. The engine in the actor is
real but for vLLM and the model. Run: python -m tests.process.ray_actor FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray

from clairai.weights import Sender
from tests.support.weights import ToyLlm, weights


class Plain:
    """As vLLM's LLM: one call after the other."""

    def __init__(self, folder: str) -> None:
        self.llm = ToyLlm(Path(folder))

    def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        return self.llm.collective_rpc(method, args)

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def told(self) -> dict[str, Any]:
        return {
            "version": self.llm.updater.served.version,
            "sums": {name: float(each.sum()) for name, each in self.llm.model.items()},
            "resets": self.llm.resets,
            "pid": os.getpid(),
        }


class Serving:
    """As vLLM's AsyncLLM: its methods are coroutines, and requests may run."""

    def __init__(self, folder: str) -> None:
        self.plain = Plain(folder)
        self.paused: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        return await asyncio.to_thread(self.plain.collective_rpc, method, args)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.paused.append(f"{mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self.paused.append("resume")

    async def told(self) -> dict[str, Any]:
        return self.plain.told() | {"paused": self.paused}


def main(folder: str) -> None:
    own = {"_temp_dir": f"{folder}/r"}  # else it leaves its logs in /tmp
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, **own)
    found = {}
    for kind in (Plain, Serving):
        actor = ray.remote(num_cpus=0)(kind).remote(folder)
        sender = Sender(actor, runtime_dir=folder)
        sent = [sender.send(weights(seed)) for seed in (1, 2)]
        answer = ray.get(actor.told.remote())
        homes, versions = [one.home for one in sent], [one.version for one in sent]
        found[kind.__name__] = {**answer, "homes": homes, "versions": versions}
        ray.kill(actor)
    ray.shutdown()
    expected = {name: float(each.sum()) for name, each in weights(2).items()}
    sys.stdout.write(json.dumps({"pid": os.getpid(), "expected": expected, **found}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
