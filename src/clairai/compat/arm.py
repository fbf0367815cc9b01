"""Takes a vLLM process that will hold an engine with taps; gives it the two class-level wraps.

WorkerBase.__init__                    v1/worker/worker_base.py   0.26:44    0.32:44
EngineCore.preprocess_add_request      v1/engine/core.py          0.26:954   0.32:1089

Both look for the key in their own engine's config and pass straight through without it.
"""

from __future__ import annotations

import functools
from typing import Any

from clairai.compat.sight import KEY


def arm() -> None:
    """Install the wraps; a second call, or a child that inherited them, changes nothing."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, "clairai_control"):
        return
    from clairai.compat import worker

    WorkerBase.clairai_control = worker.control
    WorkerBase.__init__ = _with_taps(WorkerBase.__init__)
    EngineCore.preprocess_add_request = _with_marks(EngineCore.preprocess_add_request)


def is_armed_for(vllm_config: Any) -> bool:
    given = vllm_config.additional_config
    return isinstance(given, dict) and KEY in given


def _with_taps(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_armed_for(self.vllm_config):
            from clairai.compat import worker

            worker.prepare(self)

    return init


def _with_marks(original: Any) -> Any:
    from clairai.compat.requests import Reception

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if request.sampling_params is None or not is_armed_for(self.vllm_config):
            return original(self, request)
        if not hasattr(self, "clairai_reception"):
            self.clairai_reception = Reception()
        ticket = self.clairai_reception.mark(request)
        admitted = original(self, request)
        self.clairai_reception.admit(ticket, admitted[0])
        return admitted

    return preprocess_add_request
