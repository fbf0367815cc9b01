"""Verifies one architecture: a tiny model on real vLLM, held against Hugging Face in float64.

Where vLLM itself computes something else than Hugging Face, the taps are held against vLLM's own
blocks, read by plain hooks. T = tokens, D = model width, V = vocabulary.
"""

from __future__ import annotations

import gc
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import clairai
from clairai.points import Point
from tests.engine import models
from tests.engine.hooked import vector_file
from tests.engine.process import (
    ALLOW_UNTESTED,
    ENVIRONMENT,
    ChildProcess,
    EngineFailed,
    EngineProcess,
)
from tests.engine.process import choose_context as choose_engine_context
from tests.engine.steering import Answer, Ask
from tests.fidelity import (
    cpu_router,
    judge_rows,
    observe_model,
    tiny_media,
    tiny_models,
    verify_media,
)
from tests.fidelity.judge_rows import BOUND, LOGPROB_BOUND
from tests.fidelity.observe_model import Observed, Streams
from tests.fidelity.oracle import Floats, HuggingFace
from tests.fidelity.tiny_models import TinyModel
from tests.fidelity.verify_media import MediaTruth, MediaVerdict

START_S: Final = 600.0
CALL_S: Final = 300.0
PROMPTS: Final = models.random_prompts(3, (1, 7, 50, 40), tiny_models.NUM_ORDINARY)
# vLLM itself too: an engine is then forked in less than a second. Bugs are still planted in time,
# since clairai is not among them.
PRELOADED: Final = (
    *("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core"),
    *("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.layers.fused_moe"),
)
# Of so small a model two threads wait for each other longer than they compute.
ONE_THREAD: Final = {"VLLM_CPU_OMP_THREADS_BIND": "1"}

# What may come of it.
VERIFIED: Final = "verified"
VERIFIED_BLOCKS: Final = "verified against vLLM's blocks"
WRONG: Final = "wrong values"
AS_ALONE: Final = "as vLLM alone"
CRASHED: Final = "crashes with clairai"
REFUSED: Final = "refused"
NO_ENGINE: Final = "vLLM cannot serve it here"
NO_MODEL: Final = "transformers cannot make it"
NOT_TRIED: Final = "not tried"
OUTCOMES: Final = (
    *(VERIFIED, VERIFIED_BLOCKS, WRONG, CRASHED, REFUSED, NO_ENGINE, NO_MODEL, NOT_TRIED),
)


@dataclass(frozen=True)
class Verdict:
    """What one architecture gave. Errors are the worst 99.9th percentile over its points."""

    architecture: str
    outcome: str
    reason: str = ""
    served: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)  # reasons of `clairai doctor`
    num_layers: int = 0
    prompt_error: float | None = None
    decode_error: float | None = None
    engine_error: float | None = None  # vLLM's own blocks against Hugging Face
    unjudged: tuple[str, ...] = ()  # points that the truth has not
    is_chunked: bool = False
    num_cached: int = 0
    prefix_cache: str = ""
    steered: Mapping[str, float] = field(default_factory=dict)  # worst logprob error, by point
    media: MediaVerdict = field(default_factory=MediaVerdict)  # with images, sounds or videos
    checkpoint: str = ""  # a model that Hugging Face names as one of this architecture
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.outcome not in (WRONG, CRASHED) and not self.media.is_wrong


class Truth:
    """Hugging Face, in a process that vLLM has not touched."""

    def make(self, architecture: str, folder: Path) -> TinyModel:
        return tiny_models.make(architecture, folder)

    def load(self, folder: Path, kind: str) -> None:
        import torch

        if not kind:
            raise tiny_models.NoTinyModel("no such class")

        torch.set_num_threads(1)
        self._model = HuggingFace(str(folder), "float64", kind)

    def load_media(self, architecture: str, folder: Path) -> verify_media.Prepared:
        stands_for = tiny_media.make_processor(architecture, folder)
        self.media = MediaTruth(architecture, folder, self._model)
        return self.media.prepare(stands_for)

    def streams(self, sequences: list[list[int]]) -> list[Streams]:
        return [self._model.streams(sequence) for sequence in sequences]

    def logits(self, asked: list[tuple[list[int], Mapping[str, Floats]]]) -> list[Floats]:
        return [self._model.logits(sequence, added) for sequence, added in asked]


def verify(architecture: str, runtime: Path, plant: Callable[[], None] | None = None) -> Verdict:
    """`plant` runs in the engine's process before the engine starts: bugs are planted there."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tiny-") as scratch:
        verdict = _Verification(architecture, Path(scratch) / "model", runtime, plant).run()
    return replace(verdict, seconds=round(time.monotonic() - started, 1))


class _Verification:
    def __init__(
        self, architecture: str, folder: Path, runtime: Path, plant: Callable[[], None] | None
    ) -> None:
        self._folder, self._runtime, self._plant = folder, runtime, plant
        self._verdict = Verdict(architecture, VERIFIED)
        self._has_weights = True

    def run(self) -> Verdict:
        with truth_process() as truth:
            try:
                tiny = truth.call(Truth.make, self._verdict.architecture, self._folder)
            except EngineFailed as failed:
                return replace(self._verdict, outcome=NO_MODEL, reason=_last_line(failed))
            self._verdict = replace(self._verdict, checkpoint=tiny.checkpoint)
            self._has_weights = bool(tiny.kind)
            if self._diagnose():
                self._serve(truth, tiny.kind)
            if self._verdict.outcome in (VERIFIED, VERIFIED_BLOCKS):
                media = self._try_media(truth, tiny.kind)
                self._verdict = replace(self._verdict, media=media)
            if not tiny.kind and self._verdict.outcome == NO_ENGINE:
                reason = f"Hugging Face has no such class, and a config: {self._verdict.reason}"
                return replace(self._verdict, outcome=NO_MODEL, reason=reason)
            return self._verdict

    def _diagnose(self) -> bool:
        """Ask `clairai doctor`; False if there is no point to verify."""
        try:
            with _doctor_process() as process:
                verdicts, problems = process.call(_diagnose, str(self._folder))
        except EngineFailed as failed:
            return self._explain(_last_line(failed), REFUSED)
        if not verdicts:  # it could not look at the model
            return self._explain("; ".join(problems), REFUSED)
        refused = {str(point): reason for point, reason in verdicts if reason}
        served = tuple(str(point) for point, reason in verdicts if not reason)
        num_layers = 1 + max(point.layer for point, _ in verdicts)
        self._verdict = replace(
            self._verdict, served=served, refused=refused, num_layers=num_layers
        )
        if problems or not served:
            reasons = dict.fromkeys([*problems, *refused.values()])
            reason = next((one for one in reasons if not one.startswith("no point")), "")
            self._verdict = replace(self._verdict, outcome=REFUSED, reason=reason)
            return False
        return True

    def _explain(self, reason: str, outcome: str) -> bool:
        """Tell what clairai cannot do from what vLLM cannot do either."""
        try:
            with self._start(additional_config={}) as engine:
                engine.call(observe_model.generate, PROMPTS)
                self._verdict = replace(self._verdict, outcome=outcome, reason=reason)
        except EngineFailed as alone:
            self._verdict = replace(self._verdict, outcome=NO_ENGINE, reason=_last_line(alone))
        return False

    def _start(self, **changes: Any) -> EngineProcess:
        arguments: dict[str, Any] = {
            "model": str(self._folder),
            "skip_tokenizer_init": True,
            "dtype": tiny_models.DTYPES.get(self._verdict.architecture, "float32"),
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "block_size": 32,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": 64,
            "language_model_only": True,
            "load_format": "auto" if self._has_weights else "dummy",
        }
        return EngineProcess(
            runtime=self._runtime,
            environment=ONE_THREAD,
            plant=partial(_prepare_engine, self._plant),
            start_s=START_S,
            call_s=CALL_S,
            **(arguments | changes),
        )

    def _serve(self, truth: ChildProcess, kind: str) -> None:
        points = list(self._verdict.served)
        settings = clairai.config(points=points, capacity=2 * tiny_models.WIDTH, steering=True)
        try:
            with self._start(additional_config=settings) as engine:
                self._verdict = self._judge(engine, truth, kind)
        except EngineFailed as failed:
            self._explain(_last_line(failed), CRASHED)

    def _try_media(self, truth: ChildProcess, kind: str) -> MediaVerdict:
        recipe = tiny_media.RECIPES.get(self._verdict.architecture)
        if recipe is None:
            return MediaVerdict()
        points = list(self._verdict.served)
        settings = clairai.config(points=points, capacity=2 * tiny_models.WIDTH, steering=True)
        changes: dict[str, Any] = {
            **verify_media.ENGINE,
            "limit_mm_per_prompt": dict.fromkeys(recipe.placeholders, recipe.most),
        }
        try:
            truth.call(Truth.load, self._folder, kind)
            prepared = truth.call(Truth.load_media, self._verdict.architecture, self._folder)
            with self._start(additional_config=settings, **changes) as engine:
                return verify_media.verify(engine, truth, prepared, points, recipe)
        except EngineFailed as failed:
            reason = _last_line(failed)
        try:  # is it vLLM, or clairai?
            with self._start(additional_config={}, **changes) as engine:
                inputs = [prompt.for_vllm(recipe) for prompt in prepared.prompts]
                engine.call(observe_model.generate, inputs)
        except (EngineFailed, UnboundLocalError):
            return MediaVerdict(tuple(recipe.placeholders), reason=f"{NOT_TRIED}: {reason}")
        return MediaVerdict(tuple(recipe.placeholders), reason=f"{CRASHED}: {reason}")

    def _judge(self, engine: EngineProcess, truth: ChildProcess, kind: str) -> Verdict:
        points = list(self._verdict.served)
        observed: Observed = engine.call(observe_model.observe, PROMPTS, points, tiny_models.WIDTH)
        verdict = replace(
            self._verdict,
            is_chunked=observed.is_chunked,
            num_cached=sum(observed.num_cached),
            prefix_cache=judge_rows.judge_cache(observed),
        )
        if verdict.prefix_cache.endswith(judge_rows.OTHER_TOKENS) and self._answers_alone(observed):
            verdict = replace(verdict, prefix_cache=AS_ALONE)
        steered = _steer(engine, _choose_vectors(observed, verdict.num_layers))
        truths: list[Streams] | None = None
        try:
            truth.call(Truth.load, self._folder, kind)
            truths = truth.call(Truth.streams, judge_rows.sequences(observed.forwarded))
            errors = _steering_errors(truth, steered)
        except EngineFailed as failed:
            verdict = replace(verdict, reason=f"Hugging Face: {_last_line(failed)}")
        else:
            verdict = replace(
                verdict, **judge_rows.errors(observed.forwarded, truths), steered=errors
            )
            if not _faults(verdict):
                return verdict
        return _judge_blocks(engine, verdict, truths, steered)

    def _answers_alone(self, observed: Observed) -> bool:
        """True if vLLM without clairai gives the same tokens, and as different ones when cached."""
        with self._start(additional_config={}) as engine:
            whole, cached = engine.call(observe_model.answer_twice, PROMPTS)
        first, again = (next(iter(each.values())) for each in (observed.forwarded, observed.again))
        tokens = [[one.token_ids.tolist() for one in each] for each in (first, again)]
        return tokens == [whole, cached]


def _judge_blocks(
    engine: EngineProcess, verdict: Verdict, truths: list[Streams] | None, steered: _Steered
) -> Verdict:
    """Hold the taps against vLLM's own tensors, and those against Hugging Face's."""
    points = list(verdict.served)
    # vLLM's CPU kernels in bfloat16 take no prompt of one token alone.
    prompts = PROMPTS[1:] if verdict.architecture in tiny_models.DTYPES else PROMPTS
    tapped, blocks = engine.call(observe_model.observe_blocks, prompts, points, tiny_models.WIDTH)
    if any(np.isnan(rows_TD).any() for streams in blocks for rows_TD in streams.values()):
        return replace(verdict, outcome=NO_ENGINE, reason="vLLM's own blocks give NaN here")
    added = [{point: row} for point, row in steered.vectors.items()]
    pairs = engine.call(observe_model.steer_blocks, steered.asks, steered.files, added)
    against = replace(
        verdict,
        **judge_rows.errors(tapped, blocks),
        outcome=VERIFIED_BLOCKS,
        steered={p: _answer_error(*pair) for p, pair in zip(steered.vectors, pairs, strict=True)},
        engine_error=None
        if truths is None
        else judge_rows.stream_error(blocks, truths[-len(prompts) :]),
    )
    if not _faults(against):
        return against
    nearer = min(verdict, against, key=lambda one: len(_faults(one)))
    reason = "; ".join(filter(None, (verdict.reason, *_faults(nearer))))
    return replace(nearer, outcome=WRONG, reason=reason, engine_error=against.engine_error)


# --- steering ---


@dataclass(frozen=True)
class _Steered:
    """Vectors by the point they are added at, and what each request was answered."""

    vectors: dict[str, Floats]
    files: list[bytes]
    asks: list[Ask]
    answers: list[Answer]


def _choose_vectors(observed: Observed, num_layers: int) -> dict[str, Floats]:
    """A middle point of each kind, and the last: a vector as long as the rows there."""
    middle, last = num_layers // 2 - 1, num_layers - 1
    wanted = [f"{kind}.{middle}" for kind in ("pre_attn", "post_attn", "post_block")]
    rng = np.random.default_rng(5)
    chosen: dict[str, Floats] = {}
    for point in (*wanted, f"post_block.{last}"):
        if point in observed.forwarded:
            rows_TD = observed.forwarded[point][2].scores_NP[:-1].astype(np.float64)
            size = np.sqrt(np.square(np.nan_to_num(rows_TD, nan=1.0)).mean())
            row_D = rng.standard_normal(rows_TD.shape[1]) * size
            chosen[point] = row_D.astype(np.float32).astype(np.float64)
    return chosen


def _steer(engine: EngineProcess, vectors: dict[str, Floats]) -> _Steered:
    """All in one batch, each with a vector of its own."""
    asks = [
        Ask(tuple(PROMPTS[3]), ({"vector": point},), num_new=observe_model.NUM_NEW, salt=point)
        for point in vectors
    ]
    files = [vector_file(point, {point: row}) for point, row in vectors.items()]
    return _Steered(vectors, files, asks, engine.call(observe_model.steer, asks, files))


def _steering_errors(truth: ChildProcess, steered: _Steered) -> dict[str, float]:
    """By point, how far the answers are from those of Hugging Face's model with a hook."""
    asked = [
        ([*ask.prompt, *answer.token_ids], {point: row})
        for ask, answer, (point, row) in zip(
            steered.asks, steered.answers, steered.vectors.items(), strict=True
        )
    ]
    logits = truth.call(Truth.logits, asked)
    plain = truth.call(Truth.logits, [(sequence, {}) for sequence, _ in asked])
    found = zip(steered.vectors, steered.answers, logits, plain, strict=True)
    return {point: judge_rows.logprob_error(answer, *both) for point, answer, *both in found}


def _answer_error(answer: Answer, other: Answer) -> float:
    """The largest difference of a logprob between two answers."""
    if answer.token_ids != other.token_ids:
        return float("inf")
    pairs = zip(answer.logprobs, other.logprobs, strict=True)
    return max(
        abs(one[token] - two[token]) for one, two in pairs for token in one.keys() & two.keys()
    )


# --- processes ---


def truth_process() -> ChildProcess:
    # Forked from here, where nothing has imported vLLM: it changes Hugging Face's classes.
    context = multiprocessing.get_context("fork")
    return ChildProcess(context, partial(nullcontext, Truth()), start_s=START_S, call_s=CALL_S)


def _doctor_process() -> ChildProcess:
    context = choose_engine_context({}, preloaded=PRELOADED)
    return ChildProcess(context, _doctor, start_s=START_S, call_s=CALL_S)


@contextmanager
def _doctor() -> Iterator[None]:
    import os

    os.environ.update(ENVIRONMENT)
    _prepare_engine(None)
    yield


def _prepare_engine(plant: Callable[[], None] | None) -> None:
    """Look at a model's class in this process: a process more for each would take ten seconds."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.models import registry

    torch._dynamo.config.disable = True  # the sampler of an eager engine compiles a part for 3 s
    gc.freeze()  # vLLM collects five times at start, and all that it imports was there before
    registry._run_in_subprocess = lambda look: look()
    make_up = dummy_loader.initialize_single_dummy_weight
    # As large as those of other tiny models; vLLM's would make every layer nearly the identity.
    dummy_loader.initialize_single_dummy_weight = partial(make_up, low=-0.25, high=0.25)
    cpu_router.install()
    if plant is not None:
        plant()


def _diagnose(_: None, folder: str) -> tuple[list[tuple[Point, str]], list[str]]:
    from clairai.compat.doctor import diagnose

    report = diagnose(folder, allow_untested=ALLOW_UNTESTED)
    return list(report.verdicts), list(report.problems)


def _last_line(failed: EngineFailed) -> str:
    """Of a traceback: the error, in one line."""
    found = re.findall(
        r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Model)\b.*(?:\n  .*)?)", str(failed), re.M
    )
    text = re.sub(r"/\S*/tiny-\w+/model", "MODEL", (found or [str(failed)])[-1])
    return re.sub(r"\s+", " ", text).removeprefix("NoTinyModel: ").strip()[:300]


# --- judging ---


def _faults(verdict: Verdict) -> list[str]:
    """What of a verdict is beyond its bound."""
    errors = {"prompt rows": verdict.prompt_error, "decode rows": verdict.decode_error}
    found = [f"{name} {e}" for name, e in errors.items() if e is None or e > BOUND]
    found += [f"nothing to hold {point} against" for point in verdict.unjudged]
    if verdict.prefix_cache not in ("right", "no hit", AS_ALONE):
        found.append(f"prefix cache: {verdict.prefix_cache}")
    steered = verdict.steered.items()
    found += [f"steering at {point} {e:.1e}" for point, e in steered if not e <= LOGPROB_BOUND]
    return found
