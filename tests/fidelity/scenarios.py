"""Every tapped value of a running engine, and how far each is from Hugging Face's.

The probes are the unit vectors, so that the scores at a point are the residual stream itself.
T = tokens, D = model width.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clairai
from clairai.probe.bank import MAX_PROBES
from tests.engine.process import EngineProcess
from tests.fidelity.oracle import HuggingFace, relative_error

Prompts = list[list[int]] | list[str]
Tapped = dict[str, list[clairai.Scores]]  # by point, one for each prompt


@dataclass(frozen=True)
class Fidelity:
    """Errors at one point over all rows of all requests."""

    point: str
    num_values: int
    num_decode_rows: int
    p999: float
    worst: float


def compare(
    engine: EngineProcess,
    folder: Path,
    prompts: Prompts,
    points: list[str],
    width: int,
    num_new: int,
) -> list[Fidelity]:
    """Hugging Face runs in this process: vLLM changes its classes in the engine's."""
    return judge(engine.call(tap_everything, prompts, points, width, num_new), folder)


def judge(tapped: Tapped, folder: Path, dtype: str = "float32") -> list[Fidelity]:
    """`dtype` is Hugging Face's."""
    sequences, truths = _truths(tapped, folder, dtype)
    return [_fidelity(point, sequences, rows, truths) for point, rows in tapped.items()]


def cosines(tapped: Tapped, folder: Path) -> dict[str, float]:
    """The worst row at each point, for engines whose dtype is coarser than Hugging Face's."""
    _, truths = _truths(tapped, folder)
    return {
        point: min(
            _worst_cosine(scores.scores_NP[:-1], truth[point][:-1])
            for scores, truth in zip(found, truths, strict=True)
        )
        for point, found in tapped.items()
    }


def bfloat16_cosines(tapped: Tapped, folder: Path) -> dict[str, float]:
    """How far Hugging Face in bfloat16 is from itself in float32, on the same tokens."""
    _, truths = _truths(tapped, folder)
    _, coarse = _truths(tapped, folder, "bfloat16")
    return {
        point: min(
            _worst_cosine(found[point][:-1], truth[point][:-1])
            for found, truth in zip(coarse, truths, strict=True)
        )
        for point in tapped
    }


def relative_errors(tapped: Tapped, folder: Path) -> dict[str, dict[str, float]]:
    """The 99.9th percentile at each point, in each sense of the word.

    Of values (each relative to its own size or its row's root mean square, the larger) and of rows
    (the length of the difference over that of the row), against Hugging Face in each precision;
    `floor` is Hugging Face in bfloat16 against itself in float32.
    """
    _, fine = _truths(tapped, folder)
    _, coarse = _truths(tapped, folder, "bfloat16")
    found: dict[str, dict[str, float]] = {}
    for point, scores in tapped.items():
        ours = np.concatenate([one.scores_NP[:-1] for one in scores])
        exact, rounded = (
            np.concatenate([truth[point][:-1] for truth in truths]) for truths in (fine, coarse)
        )
        pairs = {"float32": (ours, exact), "bfloat16": (ours, rounded), "floor": (rounded, exact)}
        found[point] = {
            f"{kind} {name}": float(np.quantile(error(*pair), 0.999))
            for name, pair in pairs.items()
            for kind, error in (("values", relative_error), ("rows", _row_error))
        }
    return found


def _row_error(found_TD: NDArray[np.float32], truth_TD: NDArray[np.float32]) -> NDArray[np.float64]:
    truth = truth_TD.astype(np.float64)
    size = np.linalg.norm(truth, axis=1)
    error: NDArray[np.float64] = np.linalg.norm(found_TD - truth, axis=1) / size
    return error


def _truths(
    tapped: Tapped, folder: Path, dtype: str = "float32"
) -> tuple[list[list[int]], list[dict[str, NDArray[np.float32]]]]:
    sequences = [scores.token_ids.tolist() for scores in next(iter(tapped.values()))]
    model = HuggingFace(str(folder), dtype)
    return sequences, [model.streams(sequence) for sequence in sequences]


def _worst_cosine(found_TD: NDArray[np.float32], truth_TD: NDArray[np.float32]) -> float:
    products = (found_TD * truth_TD).sum(axis=1)
    sizes = np.linalg.norm(found_TD, axis=1) * np.linalg.norm(truth_TD, axis=1)
    return float((products / sizes).min())


def tap_everything(
    llm: Any, prompts: Prompts, points: list[str], width: int, num_new: int
) -> Tapped:
    """Generate for as many points as a bank holds; swap the bank while the engine serves; go on."""
    from vllm import SamplingParams

    bank = clairai.ProbeBank(llm)
    params = SamplingParams(
        max_tokens=num_new,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args=clairai.request(prompt_scores=True),
    )
    inputs = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    tapped: Tapped = {}
    at_once = MAX_PROBES // width
    for first in range(0, len(points), at_once):
        group = points[first : first + at_once]
        bank.add(*(probe for point in group for probe in unit_probes(point, width)))
        outputs = llm.generate(inputs, params, use_tqdm=False)
        answers = [answers[0] for answers in clairai.scores(llm, outputs)]
        tapped |= {point: [keep_point(scores, point) for scores in answers] for point in group}
        bank.remove(*(info.name for info in bank.list()))
    return tapped


def keep_point(scores: clairai.Scores, point: str) -> clairai.Scores:
    """The columns of one point, in the order of its unit vectors."""
    columns = [scores.names.index(f"{point}:{i}") for i in range(_width(scores, point))]
    whole = copy(scores)  # in memory, wherever they are read from
    return replace(whole, names=(point,), scores_NP=whole.scores_NP[:, columns])


def _width(scores: clairai.Scores, point: str) -> int:
    return sum(name.startswith(f"{point}:") for name in scores.names)


def unit_probes(point: str, width: int) -> list[clairai.Probe]:
    eye = np.eye(width, dtype=np.float32)
    return [
        clairai.Probe(f"{point}:{index}", clairai.Point.parse(point), eye[index])
        for index in range(width)
    ]


def _fidelity(
    point: str,
    sequences: list[list[int]],
    found: list[clairai.Scores],
    truths: list[dict[str, NDArray[np.float32]]],
) -> Fidelity:
    errors = []
    for sequence, scores, truth in zip(sequences, found, truths, strict=True):
        assert scores.token_ids.tolist() == sequence, "a change of the bank changed the tokens"
        # All rows but the last: the last sampled token is never forwarded.
        errors.append(relative_error(scores.scores_NP[:-1], truth[point][:-1]).ravel())
    error = np.concatenate(errors)
    num_decode = sum(len(scores.token_ids) - scores.num_prompt - 1 for scores in found)
    p999 = float(np.quantile(error, 0.999))
    return Fidelity(point, error.size, num_decode, p999, float(error.max()))


def plant_one_layer_off() -> None:
    """The norm of layer L + 1 is taken for that of layer L."""
    from clairai.compat import model_sites

    find_right = model_sites.find_sites

    def find_wrong(model: Any, **given: Any) -> model_sites.Sites:
        sites = find_right(model, **given)
        norms = [*sites.modules.values()]
        shifted = dict(zip(sites.modules, [*norms[2:], *norms[:2]], strict=True))
        return replace(sites, modules=shifted, adding=frozenset())

    model_sites.find_sites = find_wrong


def plant_hidden_alone() -> None:
    """What the sublayer added is read instead of the stream it was added to."""
    import torch

    from clairai.compat import model_ops

    def forward(self: Any, x_TD: Any, residual_TD: Any = None) -> Any:
        torch.ops.clairai.tap(x_TD, self.clairai_token, self.clairai_name)
        base = super(model_ops.Tapped, self).forward
        return base(x_TD) if residual_TD is None else base(x_TD, residual_TD)

    model_ops.Tapped.forward = forward  # type: ignore[method-assign]
