"""Takes a vLLM worker; tells its station of every change of the model's weights, whoever made it.

Worker.reload_weights          v1/worker/gpu_worker.py   0.26:444    0.32:629
Worker.update_weights          v1/worker/gpu_worker.py   0.26:1338   0.32:1550
Worker.finish_weight_update    v1/worker/gpu_worker.py   0.26:1365   0.32:1587
Worker.reset_weights           v1/worker/gpu_worker.py   -           0.32:380

One count of them: a version never stands for two sets of numbers.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from clairai.tap.station import Station
from clairai.weights.intake import Intake, Served

_BY_A_BACKEND: Final = ("update_weights", "finish_weight_update")
_BY_VLLM: Final = ("reload_weights", "reset_weights")


def watch(worker: Any, station: Station) -> None:
    for name in (*_BY_A_BACKEND, *_BY_VLLM):
        original = getattr(worker, name, None)
        if original is not None:
            setattr(worker, name, _followed(worker, station, original))


def _followed(worker: Any, station: Station, original: Any) -> Any:
    is_by_vllm = original.__name__ in _BY_VLLM

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        intake = _intake(worker)
        was_torn = intake is not None and intake.is_torn
        try:
            return original(*args, **kwargs)
        finally:  # also after a failure: nobody can say how far it came
            if intake is None:
                station.reweigh((station.weights or 0) + 1)
            else:
                if is_by_vllm or (intake.is_torn and not was_torn):
                    intake.served = Served(intake.served.version + 1)
                if intake.served.version != station.weights:
                    station.reweigh(intake.served.version)

    return wrapped


def _intake(worker: Any) -> Intake | None:
    """None without our backend; vLLM makes it after the model is loaded."""
    found = getattr(getattr(worker, "weight_transfer_engine", None), "intake", None)
    return found if isinstance(found, Intake) else None
