"""Errors planted in the worker of a running engine, on behalf of one request.

Scenarios: they run in the engine's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import clairai
from tests.engine import steering
from tests.engine.steering import Answer, Ask

BAD_SCALE: Final = 0.0078125  # marks the request that an error is planted for


def _is_bad(plan: Any) -> bool:
    return plan is not None and any(action.scale == BAD_SCALE for action in plan.actions)


def _raises_if(original: Callable[..., Any], is_bad: Callable[..., Any]) -> Callable[..., Any]:
    def planted(*given: Any) -> Any:
        if is_bad(*given):
            raise ValueError("planted")
        return original(*given)

    return planted


def answer_while_failing(llm: Any, asks: list[Ask], stage: str) -> list[Answer]:
    """The answers, with an error planted for the requests of BAD_SCALE at this stage."""
    from clairai.compat import step_hooks
    from clairai.compat.extra_args import read_steering_plan
    from clairai.engine.steer.worker_steering import WorkerSteering

    read, add, write = (
        read_steering_plan,
        WorkerSteering.add,
        WorkerSteering._write_map,
    )
    plants: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "read": (
            step_hooks,
            "read_steering_plan",
            _raises_if(read, lambda params: _is_bad(read(params))),
        ),
        "load": (WorkerSteering, "add", _raises_if(add, lambda _, __, plan: _is_bad(plan))),
        "place": (WorkerSteering, "_write_map", _raises_if(write, lambda one, *_: one._slots)),
    }
    with mock.patch.object(*plants[stage]):
        return steering.answer(llm, asks)


def capture_while_failing(llm: Any, prompts: list[list[int]]) -> list[tuple[str, int, str]]:
    """Of each request its finish reason, its number of tokens and the reason; the first fails."""
    from vllm import SamplingParams

    from clairai.engine.capture.worker_capture import WorkerCapture

    tags = [{"bad": number == 0} for number in range(len(prompts))]
    params = [
        SamplingParams(
            max_tokens=4,
            ignore_eos=True,
            detokenize=False,
            extra_args=clairai.request(capture={"tags": tag}),
        )
        for tag in tags
    ]
    add = WorkerCapture._add

    def is_bad(_: Any, request: Any) -> bool:
        plan = request.capture_plan
        return plan is not None and '"bad":true' in plan.tags.replace(" ", "")

    with mock.patch.object(WorkerCapture, "_add", _raises_if(add, is_bad)):
        outputs = llm.generate(
            [{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False
        )
    return [
        (str(one.finish_reason), len(one.token_ids), str(one.stop_reason))
        for output in outputs
        for one in output.outputs
    ]


def put_unchecked(llm: Any, data: bytes) -> None:
    """As PUT does it: the engine core is the first to read the file."""
    from clairai.library.engine_control import ask_engine
    from clairai.wire.steering_messages import PutVectors, VectorState

    ask_engine(llm, PutVectors((data,), "put"), VectorState)
