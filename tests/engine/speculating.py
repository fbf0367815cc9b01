"""Engines that speculate: a tiny target, drafters that it agrees with now and then, and scenarios.

The target's next token depends mostly on the last one, by way of its first block. So a drafter that
is made of that block is often right, and its later blocks and attention make it often wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

import clairai
from clairai.engine.capture.row_copier import RowCopier
from clairai.engine.publish.step_rows import StepRows
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from clairai.engine.step_guard import StepGuard
from tests.engine import attribution, capturing, models, steering
from tests.engine.steering import Answer, Ask

NUM_DRAFTS: Final = 3
NUM_STEERED: Final = 40  # tokens of an answer that is steered
VOCABULARY: Final = int(models.SHAPE["vocab_size"])
WIDTH: Final = int(models.SHAPE["hidden_size"])
Tensors = dict[str, NDArray[np.float32]]


def make_target(folder: Path, **changes: int) -> Path:
    """A tiny Llama; `changes` are of its shape."""
    models.tiny("llama", folder, **changes)
    tensors = _weaken_blocks(_load(folder))
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])
    return _save(folder, tensors)


def _weaken_blocks(tensors: Tensors) -> Tensors:
    """Attention, and all blocks but the first, change the stream little.

    What two random matrices make of a row grows with its width.
    """
    width = tensors["model.norm.weight"].shape[0]
    factor = np.float32(0.2 * WIDTH / width)
    for name, value in tensors.items():
        is_late = ".layers." in name and ".layers.0." not in name
        if name.endswith("o_proj.weight") or (is_late and name.endswith("down_proj.weight")):
            tensors[name] = value * factor
    return tensors


def make_draft_model(target: Path, folder: Path) -> Path:
    """The target's first block as a model of its own."""
    return models.cut(target, 1, folder)


def make_eagle(target: Path, folder: Path) -> Path:
    """An EAGLE head: the first block without attention; it looks at tokens alone.

    vLLM's has no norm behind the block; the target's leaves the most likely token as it is.
    """
    found = _load(target)
    prefix = "model.layers.0."
    head = {
        name.removeprefix("model."): value
        for name, value in found.items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    head["layers.0.self_attn.o_proj.weight"] *= np.float32(0)
    head["embed_tokens.weight"] = found["model.embed_tokens.weight"]
    width = found["model.norm.weight"].shape[0]
    head["fc.weight"] = np.eye(width, 2 * width, dtype=np.float32)
    folder.mkdir(parents=True)
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return _save(folder, head)


def make_mtp(folder: Path, **changes: int) -> Path:
    """A tiny MiMo: Qwen 2 with a block that predicts one token more."""
    models.tiny("qwen2", folder, **changes)
    tensors = _weaken_blocks(_load(folder))
    width = tensors["model.norm.weight"].shape[0]
    ones = np.ones(width, np.float32)
    tensors["model.norm.weight"] = ones
    tensors["model.embed_tokens.weight"] /= np.sqrt(  # as its norm would leave it
        np.mean(tensors["model.embed_tokens.weight"] ** 2, 1, keepdims=True)
    )
    block = {
        name.replace("model.layers.0.", "model.mtp_layers.0."): value.copy()
        for name, value in tensors.items()
        if name.startswith("model.layers.0.")
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        block[f"model.mtp_layers.0.{name}.weight"] = ones
    projection = np.eye(width, 2 * width, width, dtype=np.float32)
    block["model.mtp_layers.0.input_proj.weight"] = projection
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return _save(folder, tensors | block)


def leave_out_mtp(folder: Path) -> None:
    """Make of a tiny MiMo what Hugging Face knows, a Qwen 2; other models stay as they are."""
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["MiMoForCausalLM"]:
        return
    config["architectures"] = ["Qwen2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    _save(folder, {name: held for name, held in _load(folder).items() if "mtp" not in name})


def _load(folder: Path) -> Tensors:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def _save(folder: Path, tensors: Tensors) -> Path:
    from safetensors.numpy import save_file

    given = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(given, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Drafts:
    """What became of the tokens that were drafted."""

    proposed: int
    accepted: int

    def minus(self, earlier: Drafts) -> Drafts:
        return Drafts(self.proposed - earlier.proposed, self.accepted - earlier.accepted)


def count_drafts(llm: Any) -> Drafts:
    """All that this engine has drafted, by vLLM's own metrics: v1/spec_decode/metrics.py, 0.32:229.

    They count in the process of the LLM, wherever its engine core and ranks are.
    """
    found = {metric.name: metric for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return Drafts(*(int(found[name].value) if name in found else 0 for name in names))


def with_drafts(
    llm: Any, scenario: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Drafts]:
    """A scenario, and what became of the drafts in it."""
    before = count_drafts(llm)
    result = scenario(llm, *args, **kwargs)
    return result, count_drafts(llm).minus(before)


def answer_and_score_all(
    llm: Any, asks: Sequence[Ask]
) -> tuple[list[Answer], list[NDArray[np.float32]], list[int]]:
    """Answers, the scores of every token of each, and how many rows each one lacks."""
    outputs = steering.generate(llm, list(asks))
    found = [scores[0] for scores in clairai.scores(llm, outputs)]
    answers = [steering.read(output) for output in outputs]
    return answers, [one.scores_NP.copy() for one in found], [one.missing for one in found]


@dataclass(frozen=True)
class SteeringVerdict:
    """Which rows were steered, against the positions and tokens of the answers."""

    rows: int
    steered: int
    wrong: list[str]


def judge_steering(llm: Any, num_requests: int, seed: int) -> SteeringVerdict:
    """Steer answers at some of their positions, or from a certain token on; judge every row.

    At `pre_attn.0` a row is its token's embedding, so that its score says whether it was steered,
    and which tokens open the gate is known beforehand. A latch that a rejected draft had opened
    would steer rows before such a token.
    """
    vocabulary_VD = attribution.embeddings(llm)
    push_D, gate_D = np.linalg.qr(
        np.random.default_rng(1).standard_normal((vocabulary_VD.shape[1], 2))
    )[0].T.astype(np.float32)
    plain_V, opens_V = vocabulary_VD @ push_D, vocabulary_VD @ gate_D
    threshold = _find_gap(opens_V, share=0.97)
    length = 20 * float(plain_V.std())
    point = clairai.Point.parse(attribution.POINT)
    bank, vectors = clairai.ProbeBank(llm), clairai.VectorBank(llm)
    bank.add(clairai.Probe("push", point, push_D), clairai.Probe("opener", point, gate_D))
    vectors.add(clairai.Vector("shove", {point: length * push_D}))
    rng = np.random.default_rng(seed)
    asks = [_ask_steered(rng, len(vocabulary_VD), threshold) for _ in range(num_requests)]
    outputs = steering.generate(llm, [ask for ask, _ in asks])
    found = [one[0] for one in clairai.scores(llm, outputs)]
    vectors.remove("shove")
    bank.remove("push", "opener")
    rows, steered, wrong = 0, 0, list[str]()
    for number, ((ask, ranges), one) in enumerate(zip(asks, found, strict=True)):
        token_ids, score_N = one.token_ids, one["push"]
        is_open_N = np.zeros(len(token_ids), bool)
        for start, end in ranges or ():
            is_open_N[start:end] = True
        if ranges is None:
            num_prompt = len(ask.prompt)
            is_open_N[num_prompt:] = np.logical_or.accumulate(
                opens_V[token_ids[num_prompt:]] >= threshold
            )
        is_steered_N = score_N - plain_V[token_ids] > length / 2
        is_known_N = ~np.isnan(score_N)
        rows += int(is_known_N.sum())
        steered += int(is_steered_N.sum())
        at = np.flatnonzero(is_known_N & (is_steered_N != is_open_N))
        kind = "latch" if ranges is None else f"positions {ranges}"
        wrong += [f"{number}@{position} by {kind}" for position in at.tolist()]
    return SteeringVerdict(rows, steered, wrong)


def judge_steering_with(
    llm: Any, mutant: Callable[[], Any], num_requests: int, seed: int
) -> SteeringVerdict:
    with mutant():
        return judge_steering(llm, num_requests, seed)


def _find_gap(values_N: NDArray[np.float32], share: float) -> float:
    """A number that about this share of the values lies below, and none lies at."""
    sorted_N = np.sort(values_N)
    middle = int(share * len(sorted_N))
    near_M = sorted_N[middle - 8 : middle + 8]
    widest = int(np.diff(near_M).argmax())
    return float(near_M[widest : widest + 2].mean())


def _ask_steered(
    rng: np.random.Generator, vocabulary: int, threshold: float
) -> tuple[Ask, list[tuple[int, int]] | None]:
    """A request, and where it is steered; None: from the token on that opens its gate."""
    prompt = tuple(rng.integers(3, vocabulary, int(rng.integers(1, 60))).tolist())
    entry: dict[str, Any] = {"vector": "shove", "scale": 1.0}
    if rng.random() < 0.5:
        gate = {"probe": "opener", "threshold": threshold, "latch": True}
        return Ask(prompt, (entry | {"when": "generation", "gate": gate},), NUM_STEERED), None
    edges = np.sort(rng.choice(np.arange(1, NUM_STEERED), 6, replace=False)) + len(prompt)
    ranges = [(int(start), int(end)) for start, end in edges.reshape(3, 2)]
    entry["when"] = {"positions": [list(one) for one in ranges]}
    return Ask(prompt, (entry,), NUM_STEERED), ranges


@dataclass(frozen=True)
class CaptureVerdict:
    """What was captured, against the tokens of the answers."""

    rows: int
    wrong: list[str]
    extra: int  # rows that were stored besides: of rejected drafts, or of preempted requests


def judge_captures(llm: Any, num_requests: int, seed: int) -> CaptureVerdict:
    """Capture some positions of answers, or all; judge every row.

    At `pre_attn.0` a row is its token's embedding. The last token of an answer is not forwarded.
    """
    vocabulary_VD = attribution.embeddings(llm)
    rng = np.random.default_rng(seed)
    asks, wanted = [], []
    for _ in range(num_requests):
        prompt = tuple(rng.integers(3, len(vocabulary_VD), int(rng.integers(1, 60))).tolist())
        num_all = len(prompt) + NUM_STEERED - 1
        edges = np.sort(rng.choice(np.arange(1, NUM_STEERED - 1), 6, replace=False)) + len(prompt)
        ranges = edges.reshape(3, 2).tolist() if rng.random() < 0.7 else [[0, num_all]]
        positions = [{"from": start, "to": end} for start, end in ranges]
        fields = {"points": [attribution.POINT], "positions": positions}
        asks.append(capturing.Ask(prompt, fields, num_new=NUM_STEERED))
        wanted.append([position for start, end in ranges for position in range(start, end)])
    rows, extra, wrong = 0, 0, list[str]()
    found = [one for (one,) in capturing.capture(llm, asks)]
    for number, (ask, at_N, one) in enumerate(zip(asks, wanted, found, strict=True)):
        token_ids = np.array([*ask.prompt, *one.token_ids])
        if (one.state, one.lost) != ("kept", 0):
            wrong.append(f"{number} is {one.state}, {one.lost} lost: {one.reason}")
            continue
        if [*one.positions] != at_N or [*one.tokens] != token_ids[at_N].tolist():
            wrong.append(f"{number} has {one.positions}, not {at_N}, of {one.tokens}")
            continue
        rows += len(at_N)
        extra += one.told - len(at_N)
        errors_N = np.abs(one.rows[attribution.POINT] - vocabulary_VD[one.tokens, :]).max(1)
        wrong += [f"{number}@{at_N[at]} is another's" for at in np.flatnonzero(errors_N)]
    return CaptureVerdict(rows, wrong, extra)


def judge_captures_with(
    llm: Any, mutant: Callable[[], Any], num_requests: int, seed: int
) -> CaptureVerdict:
    with mutant():
        return judge_captures(llm, num_requests, seed)


@contextmanager
def capture_rejected() -> Iterator[None]:
    """Plant the bug that rows of rejected drafts are captured."""

    def keep(self: RowCopier, rejected_R: Any) -> None:
        original(self, rejected_R * 0)

    original = RowCopier._keep_rejected
    with mock.patch.object(RowCopier, "_keep_rejected", keep):
        yield


@contextmanager
def remember_rejected() -> Iterator[None]:
    """Plant the bug that gates remember drafts that were rejected."""
    with mock.patch.object(WorkerSteering, "_forget", return_value=None):
        yield


@contextmanager
def trust_the_host() -> Iterator[None]:
    """Plant the bug that rows are steered where the host expects them."""
    original = WorkerSteering.place

    def place(self: WorkerSteering, batch: StepBatch) -> None:
        original(self, structs.replace(batch, lowest_R=None))

    with mock.patch.object(WorkerSteering, "place", place):
        yield


@contextmanager
def keep_rejected() -> Iterator[None]:
    """Plant the bug that all drafts count as accepted, on either runner."""
    with (
        mock.patch.object(StepGuard, "reject", return_value=None),
        mock.patch.object(StepRows, "leave_out", lambda rows, _: rows),
    ):
        yield


# What `use_v2_on_cpu` needs from the start of a process on.
V2_ON_CPU: Final = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def use_v2_on_cpu() -> None:
    """Have vLLM's CPU build run the V2 model runner, and schedule ahead, as on a GPU.

    Its kernels run in Triton's interpreter. vLLM looks for Triton's CPU backend
    (triton_utils/importing.py, 0.32:39), and schedules nothing ahead on a CPU (platforms/cpu.py,
    0.32:331); methods that it cannot schedule ahead for it refuses later (config/vllm.py, 0.32).
    """
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def update(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = config.speculative_config.method != "ngram"

    CpuPlatform.check_and_update_config = classmethod(update)


@contextmanager
def mark_nothing() -> Iterator[None]:
    """Plant the bug that the device marks no rejected draft."""
    from clairai.engine.publish.gpu_launcher import GpuLauncher

    with mock.patch.object(GpuLauncher, "_mark_rejected", return_value=None):
        yield
