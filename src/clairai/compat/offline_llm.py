"""Runs vLLM's own LLM over many prompts, for training probes and for capture jobs.

EngineArgs.create_model_config   engine/arg_utils.py      0.26:1629  0.32:1943
LLM                              entrypoints/llm.py       0.26:66    0.32:63
LLMEngine.engine_core            v1/engine/llm_engine.py  0.26:105   0.32:116

Runs in: the process of the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clairai.compat.count_layers import count_layers
from clairai.fields.request_fields import request


@dataclass(frozen=True)
class ModelShape:
    """What must be known about a model before an engine is built for it."""

    num_layers: int
    width: int
    max_len: int  # tokens of a prompt and its answer


def read_model_shape(model: str, arguments: Mapping[str, Any]) -> ModelShape:
    """Read the model's config, and none of its weights."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=model, **arguments).create_model_config()
    return ModelShape(count_layers(config), config.get_hidden_size(), config.max_model_len)


def start_llm(
    model: str, additional_config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        additional_config=dict(additional_config),
        # A few thousand prompts are forwarded before a compiler would be done.
        **({"enforce_eager": True, "enable_prefix_caching": False} | dict(arguments)),
    )


def forward_prompts(llm: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Forward every token of every prompt once; vLLM's outputs."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, detokenize=False, extra_args=request(prompt_scores=True))
    return _generate(llm, prompts, params)


def generate_answers(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    extra_args: Sequence[Mapping[str, Any]],
) -> list[Any]:
    """Answer each prompt greedily, with its own extra arguments; vLLM's outputs."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=max_tokens, temperature=0.0, detokenize=False, extra_args=dict(extra)
        )
        for extra in extra_args
    ]
    return _generate(llm, prompts, params)


def _generate(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return list(llm.generate(inputs, params, use_tqdm=False))


def stop_llm(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()
