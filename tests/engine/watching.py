"""What the plugin left in a running engine's process, and the engine's exact results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import clairai
from clairai import errors as clairai_errors
from clairai.library.engine_control import ask_engine
from clairai.wire import control_messages
from tests.engine.asks import generate, probe


def logprobs(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Every generated token with the exact bits of its five best logprobs."""
    outputs = generate(llm, prompts, max_tokens=8, temperature=0.0, logprobs=5)
    return [
        [
            (token, sorted((i, lp.logprob.hex()) for i, lp in best.items()))
            for token, best in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        for output in outputs
        for answer in output.outputs
    ]


def publishers(llm: Any) -> str:
    """What publishes the steps of a captured graph: the graph itself, and how, or the host."""
    (found,) = llm.collective_rpc(_publishers)
    return str(found)


def _publishers(worker: Any) -> str:
    from clairai.engine.side_stream import NoSideStream

    if not worker.clairai_step_publisher._publisher._graphs_publish:
        return "host"
    is_in_line = isinstance(worker.clairai_tables.tail._branch, NoSideStream)
    return "graph, in line" if is_in_line else "graph, beside"


def was_registered(_llm: Any) -> bool:
    return "clairai.plugin" in sys.modules


def traces(_llm: Any) -> list[str]:
    """Everything of clairai in vLLM's classes or among the loaded modules."""
    import torch
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    found = [
        name
        for name in sys.modules
        if name.startswith(("clairai.compat.install", "clairai.engine"))
    ]
    package = str(Path(clairai.__file__).parent)  # a clone's folder may be called clairai too
    for kind in (WorkerBase, EngineCore):
        for name, value in vars(kind).items():
            file = getattr(getattr(value, "__code__", None), "co_filename", "")
            if "clairai" in name or file.startswith(package):
                found.append(f"{kind.__name__}.{name}")
    if hasattr(torch.ops.clairai, "tap"):
        found.append("torch.ops.clairai.tap")
    return found


def fill_bank(llm: Any) -> None:
    points = clairai_points(llm)
    clairai.ProbeBank(llm).add(*(probe(f"p:{point}", point) for point in points))


def empty_bank(llm: Any) -> None:
    bank = clairai.ProbeBank(llm)
    bank.remove(*(info.name for info in bank.list()))


def clairai_points(llm: Any) -> tuple[str, ...]:
    return ask_engine(llm, control_messages.Describe(), control_messages.Description).points


def ask_for_scores(llm: Any) -> str:
    """The error of a user who asks an engine without taps."""
    try:
        clairai.scores(llm, generate(llm, [[1, 2]]))
    except clairai_errors.ClairaiError as error:
        return f"{error.code}: {error.reason}"
    return "accepted"


def published(llm: Any) -> int:
    """Records in the ring so far."""
    return ask_engine(llm, control_messages.Describe(), control_messages.Description).published
