"""Verifies a tiny model with images, sounds or videos, held against Hugging Face in float64.

A step cuts an image in two, several media stand in one prompt, text and media share a batch, a
prompt comes again, and comes with another image in the same place. T = tokens, D = model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from tests.engine.hooked import vector_file
from tests.engine.process import ChildProcess, EngineProcess
from tests.engine.steering import Ask
from tests.fidelity import judge_rows, observe_model, tiny_media, tiny_models
from tests.fidelity.judge_rows import BOUND, LOGPROB_BOUND
from tests.fidelity.observe_model import MediaObserved, Streams
from tests.fidelity.oracle import Floats, HuggingFace
from tests.fidelity.scenarios import Tapped
from tests.fidelity.tiny_media import MediaPrompt, Recipe

STEP_TOKENS: Final = 96  # vLLM wants an image to fit into a step
# What an engine is started with, beside what every tiny model needs.
ENGINE: Final[Mapping[str, Any]] = {
    "language_model_only": False,
    "skip_tokenizer_init": False,
    "skip_mm_profiling": True,
    "mm_hasher_algorithm": "sha256",  # vLLM's own default asks for a package more
    "max_num_batched_tokens": STEP_TOKENS,
    "max_model_len": 256,
}


@dataclass(frozen=True)
class MediaVerdict:
    """What came of it. The error is the worst 99.9th percentile over points, prompt and decode."""

    kinds: tuple[str, ...] = ()
    reason: str = ""  # why it was not tried, or what is wrong
    error: float | None = None
    # vLLM's own error against Hugging Face, where it is so large that its blocks are the truth.
    engine_error: float | None = None
    num_media: int = 0  # positions with a mark
    is_cut: bool = False  # a step began inside an image
    steered: float | None = None  # worst logprob error of a vector at the positions of an image
    is_wrong: bool = False  # by the reason's fault, and not because it could not be tried


@dataclass(frozen=True)
class Prepared:
    """Prompts, the ids that Hugging Face's processor makes of them, and what these stand for."""

    prompts: tuple[MediaPrompt, ...]
    sequences: tuple[tuple[int, ...], ...]
    other: MediaPrompt  # the first with other media in the same places
    kinds: tuple[str, ...]
    stands_for: Mapping[int, int] = field(default_factory=dict)
    is_cut: bool = False

    def media_of(self, token_ids: Any) -> list[int]:
        return [self.stands_for.get(token, 0) for token in token_ids]


class MediaTruth:
    """Hugging Face's model and processor, in a process that vLLM has not touched."""

    def __init__(self, architecture: str, folder: Path, model: HuggingFace) -> None:
        import transformers

        self._recipe, self._model = tiny_media.RECIPES[architecture], model
        self._processor = transformers.AutoProcessor.from_pretrained(folder)

    def prepare(self, stands_for: Mapping[int, int]) -> Prepared:
        recipe = self._recipe
        kinds = tuple(recipe.placeholders)
        lengths = {kind: self._count(kind) for kind in kinds}
        prompts = tuple(dict.fromkeys(_prompts(recipe, lengths)))
        (first,) = (part for part in prompts[0].parts if not isinstance(part, int))
        parts = [(part[0], 9) if part == first else part for part in prompts[0].parts]
        sequences = tuple(
            tuple(self._process(prompt)["input_ids"][0].tolist()) for prompt in prompts
        )
        media = [at for at, token in enumerate(sequences[0]) if token in stands_for]
        is_cut = media[0] < STEP_TOKENS <= media[-1]
        other = MediaPrompt(tuple(parts))
        return Prepared(prompts, sequences, other, kinds, stands_for, is_cut)

    def _count(self, kind: str) -> int:
        """Tokens that one of them takes."""
        parts = ((kind, 1), 1) if self._recipe.is_first else (1, (kind, 1))
        return int(self._process(MediaPrompt(parts))["input_ids"].shape[1]) - 1

    def _process(self, prompt: MediaPrompt) -> dict[str, Any]:
        return tiny_media.process(self._processor, prompt, self._recipe)

    def streams(self, asked: list[tuple[MediaPrompt, list[int]]]) -> list[Streams]:
        """Of prompts and what was generated after them."""
        return [self._model.streams(sequence, self._media(prompt)) for prompt, sequence in asked]

    def logits(
        self, prompt: MediaPrompt, sequence: list[int], added: Mapping[str, Floats], where: slice
    ) -> Floats:
        return self._model.logits(sequence, added, self._media(prompt), where)

    def _media(self, prompt: MediaPrompt) -> dict[str, Any]:
        held = self._process(prompt)
        return {
            name: value
            for name, value in held.items()
            if name not in ("input_ids", "attention_mask")
        }


def _prompts(recipe: Recipe, lengths: Mapping[str, int]) -> list[MediaPrompt]:
    """The first is one whose media a step ends in, where text can stand before them."""
    found: list[tuple[int | tuple[str, int], ...]] = []
    for kind, length in lengths.items():
        one, two = (kind, 1), (kind, 2)
        if recipe.is_first:
            found += [(one, STEP_TOKENS), (one, 3)]
        else:
            found += [(STEP_TOKENS - (length + 1) // 2, one, 4), (4, one, 3)]
        if recipe.most > 1:
            found.append((2, one, 2, two, 3))
    return [MediaPrompt(parts) for parts in (*found, (40,))]


class HasMedia(Protocol):
    """What answers in the process of the truth."""

    media: MediaTruth


def media_streams(truth: HasMedia, asked: list[tuple[MediaPrompt, list[int]]]) -> list[Streams]:
    return truth.media.streams(asked)


def media_logits(truth: HasMedia, *given: Any) -> Floats:
    return truth.media.logits(*given)


def verify(
    engine: EngineProcess,
    truth: ChildProcess,
    prepared: Prepared,
    points: list[str],
    recipe: Recipe,
) -> MediaVerdict:
    given = [prompt.for_vllm(recipe) for prompt in prepared.prompts]
    other = prepared.other.for_vllm(recipe)
    observed: MediaObserved = engine.call(
        observe_model.observe_media, given, other, points, tiny_models.WIDTH
    )
    verdict = MediaVerdict(prepared.kinds, is_cut=prepared.is_cut)
    faults, verdict = _judge_tokens(observed, prepared, verdict)
    if faults:
        return replace(verdict, reason="; ".join(faults), is_wrong=True)
    error = _worst_error(truth, observed, prepared)
    verdict = replace(verdict, error=error)
    if error > BOUND:
        return _judge_blocks(engine, verdict, prepared, points, recipe)
    steered = _steer(engine, truth, prepared, observed.first, recipe)
    is_wrong = not steered <= LOGPROB_BOUND
    reason = f"steering at positions of media {steered:.1e}" if is_wrong else ""
    return replace(verdict, steered=steered, reason=reason, is_wrong=is_wrong)


def _worst_error(truth: ChildProcess, observed: MediaObserved, prepared: Prepared) -> float:
    found = [
        (prepared.prompts[:1], observed.first, 0),
        (prepared.prompts, observed.all.forwarded, 0),
        ((prepared.other,), observed.other, observed.num_cached),
    ]
    worst = 0.0
    for prompts, tapped, num_cached in found:
        asked = list(zip(prompts, judge_rows.sequences(tapped), strict=True))
        truths = truth.call(media_streams, asked)
        worst = max(worst, judge_rows.worst_error(tapped, truths, num_cached=num_cached))
    return worst


def _judge_tokens(
    observed: MediaObserved, prepared: Prepared, verdict: MediaVerdict
) -> tuple[list[str], MediaVerdict]:
    """Ids are those of Hugging Face's processor; rows of images, and no others, have the mark."""
    faults = []
    num_media = 0
    for point, answers in observed.all.forwarded.items():
        for scores, again, wanted in zip(
            answers, observed.all.again[point], prepared.sequences, strict=True
        ):
            if scores.token_ids[: scores.num_prompt].tolist() != list(wanted):
                faults.append(f"vLLM makes other tokens of a prompt: {wanted[:8]}")
            media = prepared.media_of(scores.token_ids.tolist())
            if not scores.media.tolist() == again.media.tolist() == media:
                faults.append(f"{point}: marks at other positions than those of media")
            num_media += sum(map(bool, media))
    first_media = list(map(bool, prepared.media_of(prepared.sequences[0]))).index(True)
    if observed.num_cached > first_media:
        faults.append(f"the cache served {observed.num_cached} tokens of another image")
    cache = judge_rows.judge_cache(observed.all)
    if cache not in ("right", "no hit"):
        faults.append(f"prefix cache: {cache}")
    num_media //= len(observed.all.forwarded)
    return list(dict.fromkeys(faults)), replace(verdict, num_media=num_media)


def _judge_blocks(
    engine: EngineProcess,
    verdict: MediaVerdict,
    prepared: Prepared,
    points: list[str],
    recipe: Recipe,
) -> MediaVerdict:
    """vLLM itself computes something else: hold the taps against its own blocks."""
    given = [prompt.for_vllm(recipe) for prompt in prepared.prompts]
    tapped, blocks = engine.call(observe_model.observe_blocks, given, points, tiny_models.WIDTH)
    error = judge_rows.worst_error(tapped, blocks)
    if error > BOUND:
        reason = f"rows {verdict.error:.1e}, against vLLM's blocks {error:.1e}"
        return replace(verdict, reason=reason, is_wrong=True)
    return replace(verdict, error=error, engine_error=verdict.error)


def _steer(
    engine: EngineProcess,
    truth: ChildProcess,
    prepared: Prepared,
    first: Tapped,
    recipe: Recipe,
) -> float:
    """A vector at the positions of the first prompt's media, at a point in the middle."""
    point = sorted(point for point in first if point.startswith("post_block"))[1]
    scores = first[point][0]
    where = np.flatnonzero(~scores.is_text)
    begin, end = int(where[0]), int(where[-1]) + 1
    size = np.sqrt(np.square(scores.prompt.astype(np.float64)).mean())
    row_D = np.random.default_rng(5).standard_normal(scores.scores_NP.shape[1]) * size
    row_D = row_D.astype(np.float32).astype(np.float64)
    entry = {"vector": point, "when": {"phase": "prompt", "positions": [[begin, end]]}}
    # Again, and with other media in the same places: one must not be served what is cached of the
    # other.
    prompts = (prepared.prompts[0], prepared.prompts[0], prepared.other)
    worst = 0.0
    for prompt in prompts:
        given = prompt.for_vllm(recipe)
        ask = Ask(prepared.sequences[0], (entry,), observe_model.NUM_NEW, given=given)
        (answer,) = engine.call(observe_model.steer, [ask], [vector_file(point, {point: row_D})])
        sequence = [*ask.prompt, *answer.token_ids]
        both = [
            truth.call(media_logits, prompt, sequence, added, slice(begin, end))
            for added in ({point: row_D}, {})
        ]
        worst = max(worst, judge_rows.logprob_error(answer, *both))
    return worst
