"""Scores the prompts and answers of the demo's examples with its probes.

The demo model answers them greedily in real vLLM. Run: python -m scripts.demo_examples
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from clairai import demo
from clairai.demo.model import smollm2
from clairai.train.start_engine import prepare_environment
from scripts import numbers

FOLDER: Final = Path(demo.__file__).parent
MAX_TOKENS: Final = 96
COMMAND: Final = "python -m scripts.demo_examples"
# Shown beside the examples, so that the table is not only of what was chosen to look well.
OTHERS: Final = (
    "Hello!",
    "Why is the sky blue?",
    "Who was Marie Curie?",
    "Give me a recipe for pancakes.",
    "Tell me about the history of London.",
    "Write a haiku about snow.",
)
EXPLANATION: Final = (
    "Each example of the demo, and six more prompts, answered greedily by the demo model (float32, "
    f"up to {MAX_TOKENS} tokens). A cell has the mean score, the highest, and the share of tokens "
    "at or over the probe's threshold; the probe that an example is for is in bold. None of these "
    "prompts is among the training texts, but their answers were looked at while those were "
    "written. `prompt` is all of it, the chat template included; the last token of an answer is "
    "never forwarded and has no score."
)


@dataclass(frozen=True)
class Cell:
    """One probe on one part of a chat."""

    mean: float
    highest: float
    share: float  # of tokens at or over the threshold

    def __str__(self) -> str:
        return f"{self.mean:.2f} / {self.highest:.2f} / {100 * self.share:.0f} %"


@dataclass(frozen=True)
class Shown:
    """What the probes make of one example."""

    title: str
    probe: str | None
    answer: str
    on_prompt: dict[str, Cell]
    on_answer: dict[str, Cell]


def examples() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads((FOLDER / "examples.json").read_text())["data"]
    return listed


def plain(prompt: str) -> dict[str, Any]:
    """A prompt in the form of an example, for no probe."""
    return {"title": prompt, "probe": None, "messages": [{"role": "user", "content": prompt}]}


def measure(llm: Any, listed: list[dict[str, Any]]) -> list[Shown]:
    """Answer each of these with an LLM that has the demo's probes."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, extra_args=clairai.request(prompt_scores=True)
    )
    outputs = llm.chat([example["messages"] for example in listed], params, use_tqdm=False)
    thresholds = {info.name: info.threshold or 0.0 for info in clairai.ProbeBank(llm).list()}
    return [
        Shown(
            example["title"],
            example["probe"],
            output.outputs[0].text,
            _cells(scores.names, scores.prompt, thresholds),
            _cells(scores.names, scores.generated[:-1], thresholds),
        )
        for example, output, (scores,) in zip(
            listed, outputs, clairai.scores(llm, outputs), strict=True
        )
    ]


def _cells(
    names: tuple[str, ...], scores_TP: NDArray[np.float32], thresholds: dict[str, float]
) -> dict[str, Cell]:
    return {
        name: Cell(
            float(scores_T.mean()),
            float(scores_T.max()),
            float((scores_T >= thresholds[name]).mean()),
        )
        for name, scores_T in zip(names, scores_TP.T, strict=True)
    }


def table(shown: list[Shown]) -> str:
    names = sorted(shown[0].on_answer)
    rows = []
    for one in shown:
        for part, cells in (("answer", one.on_answer), ("prompt", one.on_prompt)):
            marked = [f"**{cells[n]}**" if n == one.probe else f"{cells[n]}" for n in names]
            rows.append([one.title if part == "answer" else "", part, *marked])
    return numbers.table(["example", "part", *(f"`{name}`" for name in names)], rows)


def main() -> None:
    prepare_environment()
    from vllm import LLM

    started = time.monotonic()
    llm = LLM(
        str(smollm2()),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        additional_config=clairai.config(probes=FOLDER / "probes"),
    )
    shown = measure(llm, [*examples(), *map(plain, OTHERS)])
    for one in shown:
        sys.stdout.write(f"{one.title}: {one.answer!r}\n")
    made = table(shown)
    sys.stdout.write(f"{made}\n")
    took = f"{time.monotonic() - started:.0f} s"
    numbers.write_section("Demo examples", [numbers.stamp(COMMAND, took=took), EXPLANATION, made])


if __name__ == "__main__":
    main()
