"""The cost of captures on the engine's thread does not grow with requests, points or tokens."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import numpy as np
import torch

from clairai.engine.step import ForwardInputs, StepBatch
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import ROWS, SITE_NAMES, rig

NUM_WARM = 4


def calls_of(num_requests: int, num_points: int) -> int:
    """Python calls, of built-ins too, in one decode step."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with rig() as made:
        ids = [f"r{index}" for index in range(num_requests)]
        for index, req_id in enumerate(ids):
            made.enter(req_id, index + 1, capture_plan(points=SITE_NAMES[:num_points]))
        ones_R = np.ones(num_requests, np.int32)
        for step in range(NUM_WARM + 1):
            inputs = ForwardInputs(torch.full((ROWS,), step), torch.zeros(ROWS, dtype=torch.int32))
            batch = StepBatch(ids, ones_R, step * ones_R)
            gc.disable()  # garbage of other tests is not counted
            sys.setprofile(count if step == NUM_WARM else None)
            try:
                made.capture.begin([], [])
                made.capture.place(batch)
                made.capture.end(lambda inputs=inputs: inputs)  # type: ignore[misc]
            finally:
                sys.setprofile(None)
                gc.enable()
        assert made.found(1).rows == (NUM_WARM + 1) * num_points
    return calls


def test_capturing_many_requests_takes_no_more_python_calls_than_one() -> None:
    one = calls_of(1, 1)
    assert calls_of(ROWS, 1) == calls_of(ROWS, len(SITE_NAMES)) == one
    assert 0 < one < 160
