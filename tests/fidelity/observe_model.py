"""Scenarios of `make models`: what a running engine gives at every point that it serves.

They run in the engine's process. T = tokens, D = model width, V = vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from clairai.probe.bank import MAX_PROBES
from tests.engine import steering
from tests.engine.steering import Answer, Ask
from tests.fidelity.oracle import Floats, StreamHooks, count_layers, find_layers
from tests.fidelity.scenarios import Tapped, keep_point, unit_probes

NUM_NEW: Final = 6
Streams = dict[str, NDArray[np.float32]]  # by point, T x D
Prompt = list[int] | dict[str, Any]  # token ids, or what vLLM makes them of


@dataclass(frozen=True)
class Observed:
    """Rows of every prompt: forwarded, and when the same prompts came again."""

    forwarded: Tapped
    again: Tapped
    num_cached: tuple[int, ...]  # tokens of each prompt that the prefix cache served
    is_chunked: bool


def observe(llm: Any, prompts: list[Prompt], points: list[str], width: int) -> Observed:
    forwarded: Tapped = {}
    again: Tapped = {}
    num_cached: tuple[int, ...] = ()
    for group in _groups(points, width):
        with unit_bank(llm, group, width):
            forwarded |= tap(llm, prompts, group, prompt_scores=True)[0]
            found, outputs = tap(llm, prompts, group, prompt_scores=False)
        again |= found
        num_cached = tuple(output.num_cached_tokens or 0 for output in outputs)
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    longest = max(scores.num_prompt for scores in next(iter(forwarded.values())))
    is_chunked = scheduler.max_num_batched_tokens < longest
    return Observed(forwarded, again, num_cached, is_chunked)


def _input(prompt: Prompt) -> dict[str, Any]:
    return prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}


def generate(llm: Any, prompts: list[Prompt]) -> None:
    """As above, in an engine without clairai."""
    from vllm import SamplingParams

    inputs = list(map(_input, prompts))
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    llm.generate(inputs, params, use_tqdm=False)


def answer_twice(llm: Any, prompts: list[Prompt]) -> list[list[list[int]]]:
    """Tokens in an engine without clairai: the prompts forwarded whole, then with cached tokens."""
    from vllm import SamplingParams

    inputs = list(map(_input, prompts))
    found = []
    for is_whole in (True, False):
        params = SamplingParams(
            max_tokens=NUM_NEW,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=is_whole,
        )
        outputs = llm.generate(inputs, params, use_tqdm=False)
        found.append([[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs])
    return found


def _groups(points: list[str], width: int) -> list[list[str]]:
    """As many points at a time as a bank holds unit vectors of."""
    at_once = MAX_PROBES // width
    return [points[first : first + at_once] for first in range(0, len(points), at_once)]


@contextmanager
def unit_bank(llm: Any, points: list[str], width: int) -> Iterator[None]:
    bank = clairai.ProbeBank(llm)
    bank.add(*(probe for point in points for probe in unit_probes(point, width)))
    yield
    bank.remove(*(info.name for info in bank.list()))


def tap(
    llm: Any,
    prompts: list[Prompt],
    points: list[str],
    *,
    prompt_scores: bool,
    num_new: int = NUM_NEW,
) -> tuple[Tapped, list[Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=num_new,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args=clairai.request(prompt_scores=prompt_scores),
    )
    inputs = list(map(_input, prompts))
    outputs = llm.generate(inputs, params, use_tqdm=False)
    answers = [found[0] for found in clairai.scores(llm, outputs)]
    return {point: [keep_point(one, point) for one in answers] for point in points}, outputs


@dataclass(frozen=True)
class MediaObserved:
    """Rows of prompts with images or the like."""

    first: Tapped  # of the first prompt, alone in its steps
    all: Observed  # of all prompts, in one batch
    other: Tapped  # of the first prompt with other media in the same places
    num_cached: int  # tokens of that one that the prefix cache served


def observe_media(
    llm: Any, prompts: list[Prompt], other: Prompt, points: list[str], width: int
) -> MediaObserved:
    first: Tapped = {}
    others: Tapped = {}
    num_cached = 0
    for group in _groups(points, width):
        with unit_bank(llm, group, width):
            first |= tap(llm, prompts[:1], group, prompt_scores=True)[0]
            found, (output,) = tap(llm, [other], group, prompt_scores=False)
            others |= found
            num_cached = max(num_cached, output.num_cached_tokens or 0)
            assert llm.reset_prefix_cache()
    return MediaObserved(first, observe(llm, prompts, points, width), others, num_cached)


def steer(llm: Any, asks: list[Ask], vectors: list[bytes]) -> list[Answer]:
    """All in one batch."""
    steering.put(llm, vectors)
    answers = steering.answer(llm, asks)
    steering.remove_all(llm)
    return answers


# --- vLLM's own tensors, by plain hooks on its modules ---


def observe_blocks(
    llm: Any, prompts: list[Prompt], points: list[str], width: int
) -> tuple[Tapped, list[Streams]]:
    """Rows of each prompt, alone in its steps, and what vLLM's blocks were given and gave there."""
    hooks = _block_hooks(llm, width)
    tapped: Tapped = defaultdict(list)
    streams: list[Streams] = []
    for prompt in prompts:
        given: Streams = {}
        for group in _groups(points, width):
            seen: list[tuple[str, NDArray[np.float32]]] = []
            with unit_bank(llm, group, width), hooks.reading(partial(_append, seen)):
                found, _ = tap(llm, [prompt], group, prompt_scores=True)
            tapped |= {point: tapped[point] + scores for point, scores in found.items()}
            # Of the same forward: vLLM does not give the same values every time.
            given |= {point: rows for point, rows in _join(seen).items() if point in group}
        streams.append(given)
    return dict(tapped), streams


def _join(seen: list[tuple[str, NDArray[np.float32]]]) -> Streams:
    """The rows of all steps at each point."""
    names = dict.fromkeys(point for point, _ in seen)
    return {name: np.concatenate([r for point, r in seen if point == name]) for name in names}


def _append(seen: list[Any], point: str, rows_TD: NDArray[np.float32]) -> None:
    seen.append((point, rows_TD))


def steer_blocks(
    llm: Any, asks: list[Ask], vectors: list[bytes], added: list[Mapping[str, Floats]]
) -> list[tuple[Answer, Answer]]:
    """Each alone: steered, and with rows added by hooks on vLLM's blocks and nothing of clairai's.

    Alone, because some of vLLM's CPU kernels give a request other values in another batch.
    """
    hooks = _block_hooks(llm, len(next(iter(added[0].values()))))
    steering.put(llm, vectors)
    pairs = []
    for ask, rows in zip(asks, added, strict=True):
        (steered,) = steering.answer(llm, [replace(ask, salt=f"{ask.salt} alone")])
        with hooks.adding(rows):
            (hooked,) = steering.answer(llm, [replace(ask, steer=())])
        pairs.append((steered, hooked))
    steering.remove_all(llm)
    return pairs


def _block_hooks(llm: Any, width: int) -> StreamHooks:
    """vLLM's blocks give the stream as one tensor, or as two that the next norm adds up.

    Some take a second one and do nothing with it: adding to it changes no answer.
    """
    (model,) = llm.apply_model(lambda model: model)
    config = llm.llm_engine.vllm_config.model_config.hf_text_config
    layers = find_layers(model, count_layers(config))
    active = getattr(config, "altup_active_idx", None)
    hooks = StreamHooks(layers, width, num_parts=2, active=active)
    ask = Ask(tuple(range(3, 14)), num_new=1)
    plain = steering.answer(llm, [replace(ask, salt="plain")])
    with hooks.adding({"pre_attn.1": np.ones(width, np.float64)}, part=1):
        changed = steering.answer(llm, [replace(ask, salt="changed")])
    if changed[0].logprobs == plain[0].logprobs:
        hooks = StreamHooks(layers, width, num_parts=1, active=active)
    with hooks.learning():
        steering.answer(llm, [replace(ask, salt="learning")])
    return hooks
