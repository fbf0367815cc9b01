"""See inside a language model while stock vLLM serves it at full speed.

    import clairai
    from vllm import LLM, SamplingParams

    llm = LLM(model, additional_config=clairai.config(probes=["probes/"]))
    outputs = llm.generate(prompts, SamplingParams(extra_args=clairai.request()))
    for output, (scores,) in zip(outputs, clairai.scores(llm, outputs)):
        print(scores["my_probe"])

Importing this imports neither torch nor vllm. Names are loaded when first used, because every vLLM
process imports this package to find the plugin, used or not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from clairai import weights as weights
    from clairai.fields.request_fields import request as request
    from clairai.library.captures import Capture as Capture
    from clairai.library.captures import captures as captures
    from clairai.library.config import config as config
    from clairai.library.message_range import message_range as message_range
    from clairai.library.probe_bank import ProbeBank as ProbeBank
    from clairai.library.scores import async_scores as async_scores
    from clairai.library.scores import scores as scores
    from clairai.library.vector_bank import VectorBank as VectorBank
    from clairai.match.align import Scores as Scores
    from clairai.match.reduce import ReducedScores as ReducedScores
    from clairai.points import Point as Point
    from clairai.probe.files import load as load
    from clairai.probe.files import save as save
    from clairai.probe.model import Probe as Probe
    from clairai.store.read import open as open
    from clairai.vector.model import Vector as Vector

__version__ = "0.1.0"

_HOME: Final = {
    "Capture": "clairai.library.captures",
    "Point": "clairai.points",
    "Probe": "clairai.probe.model",
    "ProbeBank": "clairai.library.probe_bank",
    "ReducedScores": "clairai.match.reduce",
    "Scores": "clairai.match.align",
    "Vector": "clairai.vector.model",
    "VectorBank": "clairai.library.vector_bank",
    "async_scores": "clairai.library.scores",
    "captures": "clairai.library.captures",
    "config": "clairai.library.config",
    "load": "clairai.probe.files",
    "message_range": "clairai.library.message_range",
    "open": "clairai.store.read",
    "request": "clairai.fields.request_fields",
    "save": "clairai.probe.files",
    "scores": "clairai.library.scores",
}
_PARTS: Final = ("weights",)
__all__ = [*_HOME, *_PARTS]


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return importlib.import_module(f"clairai.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'clairai' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
