"""Requests sampled in every way that vLLM has, in one mixed batch: is every row right?

The probes are those of attribution.py: the scores of a row name the token it was computed for.
Scenarios: they run in the engine's process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from clairai.fields.request_fields import new_stream_id
from clairai.library.engine_control import ask_engine
from clairai.ring.attach import RingReader
from clairai.wire import control_messages
from tests.engine import attribution, preempting
from tests.engine.attribution import Sent, Verdict
from tests.engine.steering import lora_request

AT_ONCE: Final = 20
LOGITS_PROCESSOR: Final = "tests.engine.forcing:ForceToken"  # as vLLM is given it
FORCED_KEY: Final = "forced"  # of extra_args
FORCED: Final = 4321
ALLOWED: Final = [100, 2000, 30_000]
BAD_WORDS: Final = [" the", " and"]
DIGITS: Final = "[0-9]{3}-[0-9]{2}"
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WORDS: Final = ["yes", "no", "perhaps"]
TEXT: Final = "Count with me, slowly: one, two, three, four, five, six, seven, eight, nine,"

# What is asked of SamplingParams, by the name under which the test counts it.
WAYS: Final[Mapping[str, dict[str, Any]]] = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "several answers": {"n": 3, "temperature": 1.0},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "cut tails": {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    "regex": {"structured_outputs": {"regex": DIGITS}, "ignore_eos": False},
    "JSON schema": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    "choice": {"structured_outputs": {"choice": WORDS}, "ignore_eos": False, "n": 2},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": ALLOWED, "ignore_eos": False},
    "prompt_logprobs": {"prompt_logprobs": 3, "logprobs": 5},
    "logits processor": {"extra_args": {FORCED_KEY: FORCED}},
    "allowed_token_ids": {"allowed_token_ids": ALLOWED},
    "logit_bias": {"logit_bias": {FORCED: 100.0}},
    "bad_words": {"bad_words": BAD_WORDS, "temperature": 0.0},
    "stop string": {"stop": [","], "temperature": 0.0, "detokenize": True},
    "stop token": {"stop_token_ids": [FORCED], "logit_bias": {FORCED: 6.0}, "ignore_eos": False},
}
# Apart from the others on a CPU: there vLLM 0.32 ends with "CPU Generator does not use offset" when
# a prompt with a seed comes in parts (v1/worker/gpu_model_runner.py `_bookkeeping_sync`, :3502).
SEEDED: Final[Mapping[str, dict[str, Any]]] = {
    "several answers of a seed": {"n": 2, "temperature": 1.0, "seed": 5},
    "seed": {"temperature": 1.0, "seed": 17},
    "the same seed": {"temperature": 1.0, "seed": 17},
    "no seed": {"temperature": 1.0},
}
ALL: Final = {**WAYS, **SEEDED}


@dataclass
class Asked:
    """One request: how it was sampled, and what came of each of its answers."""

    way: str
    stream: int
    prompt: list[int]
    answers: dict[int, Any] = field(default_factory=dict)  # vLLM's CompletionOutput
    adapter: str | None = None
    wants_prompt_scores: bool = False
    prompt_logprobs: Any = None
    is_aborted: bool = False


@dataclass(frozen=True)
class Mixed:
    """What the rows said, and what each way of sampling gave."""

    verdict: Verdict
    asked: Counter[str]
    broken: list[str]  # promises of vLLM's that an answer does not keep
    num_preempted: int


def run(
    llm: Any,
    *,
    rounds: int,
    seed: int,
    adapters: tuple[Path, ...] = (),
    without: tuple[str, ...] = (),
) -> Mixed:
    """Every way `rounds` times, with adapters and without them by turns."""
    vocabulary_VD = attribution.embeddings(llm)
    directions_DP = attribution.projections(vocabulary_VD)
    bank = clairai.ProbeBank(llm)
    bank.add(*attribution.probes(directions_DP))
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    with RingReader.attach(Path(described.socket), start="newest") as reader:
        with preempting.counted(llm) as preempted:
            batches = [
                _drive(
                    llm,
                    reader,
                    [way for way in ways if way not in without] * rounds,
                    seed,
                    adapters,
                )
                for ways in (WAYS, SEEDED)
            ]
        lost = reader.statistics().lost
    bank.remove(*(info.name for info in bank.list()))
    rows, scores_RP = (np.concatenate([batch[part] for batch in batches]) for part in (0, 1))
    asked = [one for batch in batches for one in batch[2]]
    sent, numbered = _by_choice(rows, asked)
    verdict = attribution.judge(numbered, scores_RP, sent, vocabulary_VD @ directions_DP, lost)
    broken = list(_broken(llm, asked))
    return Mixed(verdict, Counter(one.way for one in asked), broken, len(preempted))


def _drive(
    llm: Any, reader: RingReader, ways: list[str], seed: int, adapters: tuple[Path, ...]
) -> tuple[NDArray[np.void], NDArray[np.float32], list[Asked]]:
    engine, rng = llm.llm_engine, np.random.default_rng(seed)
    first = new_stream_id() // 2
    waiting = [Asked(way, first + at, []) for at, way in enumerate(ways)]
    last = first + len(waiting)
    asked, live, records = list(waiting), dict[str, Asked](), list[Any]()
    num_steps = 0
    while waiting or live:
        while waiting and len(live) < AT_ONCE:
            one = waiting.pop(0)
            one.prompt = _prompt(llm, one.way, rng)
            one.wants_prompt_scores = bool(rng.random() < 0.2)
            live[str(one.stream)] = one
            adapter = (None, *adapters)[(one.stream - first) % (len(adapters) + 1)]
            one.adapter = None if adapter is None else adapter.name
            engine.add_request(
                str(one.stream),
                {"prompt_token_ids": one.prompt},
                _params(one, rng),
                lora_request=adapter and lora_request(adapter),
            )
        num_steps += 1
        # One at least: how many steps there are depends on when grammars are compiled.
        if live and (num_steps == 20 or rng.random() < 0.02):
            victim = [*live][int(rng.integers(len(live)))]
            engine.abort_request([victim])
            live.pop(victim).is_aborted = True
        for output in engine.step():
            one = live[output.request_id]
            one.answers |= {answer.index: answer for answer in output.outputs}
            one.prompt_logprobs = output.prompt_logprobs or one.prompt_logprobs
            if output.finished:
                live.pop(output.request_id)
        records += reader.poll()
    attribution.finish(llm, last)
    while more := reader.poll():
        records += more
    rows = np.concatenate([record.rows for record in records])
    scores_RP = np.concatenate([record.scores_RC for record in records])
    ours = rows["stream"] != last
    return rows[ours], scores_RP[ours], asked


def _prompt(llm: Any, way: str, rng: np.random.Generator) -> list[int]:
    if way == "stop string":
        return list(llm.get_tokenizer().encode(TEXT))
    if way in SEEDED:
        return [50]  # the same, so that answers can be compared
    prompt: list[int] = rng.integers(5, 30_000, int(rng.integers(1, 80))).tolist()
    return prompt


def _params(one: Asked, rng: np.random.Generator) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = dict(ALL[one.way])
    if "structured_outputs" in asked:
        asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
    extra = clairai.request(stream=one.stream, prompt_scores=one.wants_prompt_scores)
    defaults = {"max_tokens": int(rng.integers(10, 24)), "ignore_eos": True, "detokenize": False}
    if one.way in SEEDED:
        defaults["max_tokens"] = 12
    return SamplingParams(
        **(defaults | asked | {"extra_args": extra | asked.get("extra_args", {})})
    )


def _by_choice(
    rows: NDArray[np.void], asked: list[Asked]
) -> tuple[dict[int, Sent], NDArray[np.void]]:
    """Every answer as a request of its own, and its rows under a number that is no other's."""
    sent: dict[int, Sent] = {}
    numbered = rows.copy()
    for one in asked:
        is_own = rows["stream"] == one.stream
        for choice in range(ALL[one.way].get("n", 1)):
            number = len(sent) + 1
            found = one.answers.get(choice)
            tokens = [] if found is None else list(found.token_ids)
            # A stop string is found behind the engine's back, which may have gone a step further.
            is_cut = one.is_aborted or one.way == "stop string"
            sent[number] = Sent(number, one.prompt, one.wants_prompt_scores, tokens, is_cut)
            numbered["stream"][is_own & (rows["choice"] == choice)] = number
    return sent, numbered


def _broken(llm: Any, asked: list[Asked]) -> Iterator[str]:
    tokenizer = llm.get_tokenizer()
    by_seed: dict[tuple[str | None, int, int], set[tuple[int, ...]]] = {}
    for one in asked:
        if one.is_aborted:
            continue
        if len(one.answers) != ALL[one.way].get("n", 1):
            yield f"{one.way}: {len(one.answers)} answers"
        for choice, answer in one.answers.items():
            text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            if not _is_kept(one, answer, text):
                yield f"{one.way}: {text!r} {answer.finish_reason}"
            if "seed" in ALL[one.way]:
                key = (one.adapter, ALL[one.way]["seed"], choice)
                by_seed.setdefault(key, set()).add(tuple(answer.token_ids))
    yield from (f"{key}: {len(found)} answers" for key, found in by_seed.items() if len(found) > 1)


def _is_kept(one: Asked, answer: Any, text: str) -> bool:
    tokens = list(answer.token_ids)
    if one.way == "regex":
        return re.fullmatch(DIGITS, text) is not None or answer.finish_reason == "length"
    if one.way == "choice":
        return text in WORDS
    if one.way == "JSON schema":
        return text.lstrip().startswith("{")
    if one.way == "min_tokens":
        return len(tokens) >= 9
    if one.way == "prompt_logprobs":
        return len(one.prompt_logprobs) == len(one.prompt) and len(answer.logprobs) == len(tokens)
    if one.way in ("logits processor", "logit_bias"):
        return set(tokens) == {FORCED}
    if one.way == "allowed_token_ids":
        return set(tokens) <= set(ALLOWED)
    if one.way == "bad_words":
        return not any(word in text for word in BAD_WORDS)
    if one.way == "stop string":
        return answer.finish_reason == "length" or "," not in answer.text
    return True


def score_beams(llm: Any) -> Any:
    """Ask for the scores of an answer that beam search found."""
    return clairai.scores(llm, _search_beams(llm))


def capture_beams(llm: Any) -> Any:
    return clairai.captures(llm, _search_beams(llm))


def search_beams(llm: Any) -> list[list[int]]:
    return [list(one.tokens) for one in _search_beams(llm)[0].sequences]


def _search_beams(llm: Any) -> Any:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=3)
    return llm.beam_search([{"prompt_token_ids": [11, 12, 13]}], params)
