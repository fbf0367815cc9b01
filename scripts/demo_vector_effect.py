"""Measures what each of the demo's vectors does to the model's answers, over a range of scales.

Run: python -m scripts.demo_vector_effect. Steering is Hugging Face hooks here: no part of ours is
between the vector and its effect. T = tokens, D = model width
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from clairai.demo.console import say
from clairai.demo.model import smollm2
from clairai.probe import files as probe_files
from clairai.probe.model import Probe
from clairai.vector.files import load
from clairai.vector.model import Vector
from scripts import numbers
from scripts.demo_questions import NUM_TOKENS, QUESTIONS
from scripts.make_demo_vectors import FOLDER

COMMAND: Final = "python -m scripts.demo_vector_effect"
STEPS: Final = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)  # of the suggested scale
SHOWN: Final = 110  # characters of an answer
WATCHED: Final = {"positive_sentiment": "negative_sentiment", "formal": None}
HEADINGS: Final = (
    *("vector", "scale", "mean score", "tokens over threshold", "mean score, read plainly"),
    *("letters per word", "answer to the first prompt"),
)
EXPLANATION: Final = (
    f"Greedy answers of {NUM_TOKENS} tokens to {len(QUESTIONS)} prompts, with the vector added to "
    "prompt and answer at its points by Hugging Face hooks, float32. The probe is "
    "`negative_sentiment`, for `positive_sentiment`; `formal` has none. "
    "`mean score` is over the answers' tokens as they are steered; `read plainly` is of the same "
    "answers, forwarded without steering: what the text itself shows. The vectors are made of the "
    "pairs in `scripts/demo_pairs/`, on none of which a probe was trained. Scale 0 is the model as "
    "it is."
)


@dataclass(frozen=True)
class Answers:
    """Token ids of prompts, padded on the left, and of what follows."""

    ids: Any
    mask: Any
    start: int

    def lengths(self, end: int) -> list[int]:
        """Of each answer, up to its end token."""
        answers = self.ids[:, self.start :].tolist()
        return [ids.index(end) if end in ids else len(ids) for ids in answers]


@dataclass(frozen=True)
class Model:
    """The demo model as Hugging Face runs it."""

    network: Any
    tokenizer: Any

    @classmethod
    def load(cls) -> Model:
        folder = str(smollm2())
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(network, AutoTokenizer.from_pretrained(folder, padding_side="left"))

    @contextmanager
    def steered(self, vector: Vector, scale: float) -> Iterator[None]:
        """While inside, `scale` times each row is added to the output of its block."""
        layers = self.network.model.layers
        hooks = [
            layers[point.layer].register_forward_hook(_adding(torch.tensor(row_D) * scale))
            for point, row_D in vector.rows.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def answer(self, prompts: Sequence[str]) -> Answers:
        chats = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        given = self.tokenizer(chats, add_special_tokens=False, return_tensors="pt", padding=True)
        with torch.no_grad():
            ids = self.network.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False)
        start = given.input_ids.shape[1]
        mask = torch.cat([given.attention_mask, torch.ones_like(ids[:, start:])], dim=1)
        return Answers(ids, mask, start)

    def scores(self, answers: Answers, probe: Probe) -> np.ndarray[Any, Any]:
        """Of every token of every answer."""
        with torch.no_grad():
            states = self.network(
                answers.ids, attention_mask=answers.mask, output_hidden_states=True
            ).hidden_states
        # hidden_states[0] is the embedding: the output of block L is at L + 1
        hidden = states[probe.point.layer + 1][:, answers.start :].numpy()
        lengths = answers.lengths(self.tokenizer.eos_token_id)
        return np.concatenate(
            [probe.apply(rows_TD[:length]) for rows_TD, length in zip(hidden, lengths, strict=True)]
        )

    def texts(self, answers: Answers) -> list[str]:
        found = self.tokenizer.batch_decode(
            answers.ids[:, answers.start :], skip_special_tokens=True
        )
        return [" ".join(text.split()) for text in found]


def _adding(row_D: Any) -> Any:
    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + row_D, *output[1:])
        return output + row_D

    return hook


def main() -> None:
    """Measure every vector, print the table and write it."""
    started = time.monotonic()
    model = Model.load()
    rows = [
        row for name in WATCHED for row in measured(model, load(FOLDER / f"{name}.safetensors"))
    ]
    table = numbers.table(HEADINGS, rows)
    sys.stdout.write(f"{table}\n")
    took = f"{time.monotonic() - started:.0f} s"
    say(took)
    numbers.write_section("Demo vectors", [numbers.stamp(COMMAND, took=took), EXPLANATION, table])


def measured(model: Model, vector: Vector) -> Iterator[tuple[str, ...]]:
    watched = WATCHED[vector.name]
    probe = None if watched is None else _probe(watched)
    for step in STEPS:
        scale = step * vector.scale
        with model.steered(vector, scale):
            answers = model.answer(QUESTIONS)
            inside = None if probe is None else model.scores(answers, probe)
        plain = None if probe is None else model.scores(answers, probe)
        texts = model.texts(answers)
        words = re.findall(r"\w+", " ".join(texts))
        say(f"{vector.name} {scale:g}: {texts[0][:SHOWN]}")
        yield (
            f"`{vector.name}`",
            f"{scale:g}",
            _mean(inside),
            _share(inside, probe),
            _mean(plain),
            f"{sum(map(len, words)) / max(len(words), 1):.2f}",
            texts[0][:SHOWN].replace("|", "/"),
        )


def _probe(name: str) -> Probe:
    return probe_files.load(FOLDER.parent / "probes" / f"{name}.safetensors")


def _mean(scores_T: np.ndarray[Any, Any] | None) -> str:
    return "" if scores_T is None else f"{scores_T.mean():.3f}"


def _share(scores_T: np.ndarray[Any, Any] | None, probe: Probe | None) -> str:
    if scores_T is None or probe is None or probe.threshold is None:
        return ""
    return f"{(scores_T >= probe.threshold).mean():.2f}"


if __name__ == "__main__":
    main()
