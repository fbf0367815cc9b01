"""Answers of steered and plain requests in one batch of a running engine, with logprobs.

Scenarios: they run in the engine's process.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clairai
from clairai.fields.request_fields import new_stream_id
from clairai.vector.files import loads
from tests.engine import preempting

NUM_LOGPROBS = 20


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, what steers it, what else is asked of it."""

    prompt: tuple[int, ...]
    steer: tuple[dict[str, Any], ...] = ()
    num_new: int = 12
    salt: str | None = None  # one of its own keeps it out of everybody's prefix cache
    stop: tuple[dict[str, Any], ...] = ()
    adapter: Path | None = None  # of LoRA: its folder
    given: dict[str, Any] | None = None  # what vLLM makes the prompt of: a text with images


@dataclass(frozen=True)
class Answer:
    """Tokens, and for each the most likely ones' logprobs before it was chosen."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    num_cached: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def answer(llm: Any, asks: list[Ask]) -> list[Answer]:
    """All in one call: they share steps."""
    return list(map(read, generate(llm, asks)))


def generate(llm: Any, asks: list[Ask]) -> list[Any]:
    prompts = []
    for ask in asks:
        prompt = {"prompt_token_ids": list(ask.prompt)} if ask.given is None else ask.given
        prompts.append(prompt if ask.salt is None else {**prompt, "cache_salt": ask.salt})
    given = adapters([ask.adapter for ask in asks])
    return list(llm.generate(prompts, list(map(_params, asks)), use_tqdm=False, **given))


def adapters(folders: Sequence[Path | None]) -> dict[str, Any]:
    """What `generate` is given for requests with these adapters, and without."""
    if not any(folders):
        return {}
    return {"lora_request": [folder and lora_request(folder) for folder in folders]}


def lora_request(adapter: Path) -> Any:
    """Adapters are numbered by their names: vLLM asks for a number that is no other's."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, zlib.crc32(adapter.name.encode()) >> 1, str(adapter))


def _params(ask: Ask, **fields: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=ask.num_new,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=NUM_LOGPROBS,
        extra_args=clairai.request(steer=list(ask.steer), stop=list(ask.stop), **fields),
    )


def read(output: Any) -> Answer:
    (found,) = output.outputs
    steps = found.logprobs or ()  # None for one that failed before its first token
    logprobs = tuple({token: one.logprob for token, one in step.items()} for step in steps)
    return Answer(
        tuple(found.token_ids),
        logprobs,
        output.num_cached_tokens or 0,
        found.finish_reason,
        found.stop_reason,
    )


def put(llm: Any, data: list[bytes]) -> None:
    """Give these vectors their names, whatever the names meant before."""
    bank = clairai.VectorBank(llm)
    held = {listed.name for listed in bank.list()}
    for vector in (loads(one, source="test") for one in data):
        (bank.replace if vector.name in held else bank.add)(vector)


def remove_all(llm: Any) -> None:
    bank = clairai.VectorBank(llm)
    bank.set_tiers(base=[], prefill=[], decode=[])
    bank.remove(*(listed.name for listed in bank.list()))


def add_probes(llm: Any, probes: list[clairai.Probe]) -> None:
    clairai.ProbeBank(llm).add(*probes)


def remove_probes(llm: Any, names: list[str]) -> None:
    clairai.ProbeBank(llm).remove(*names)


def set_tiers(llm: Any, **tiers: Any) -> dict[str, Any]:
    return clairai.VectorBank(llm).set_tiers(**tiers)


def reset_cache(llm: Any) -> None:
    assert llm.reset_prefix_cache()


def answer_and_count_preemptions(llm: Any, asks: list[Ask]) -> tuple[int, list[Answer]]:
    with preempting.counted(llm) as seen:
        answers = answer(llm, asks)
    return len(seen), answers


def forget_keys(llm: Any) -> None:
    """Plant the bug that every rival has: steering is no part of a block's hash."""
    del llm
    from vllm.v1.core import kv_cache_utils

    ours = kv_cache_utils.generate_block_hash_extra_keys
    plain = ours.__wrapped__
    plain.clairai_ours = ours
    kv_cache_utils.generate_block_hash_extra_keys = plain


def remember_keys(llm: Any) -> None:
    del llm
    from vllm.v1.core import kv_cache_utils

    plain = kv_cache_utils.generate_block_hash_extra_keys
    kv_cache_utils.generate_block_hash_extra_keys = plain.clairai_ours


def answer_and_score(llm: Any, asks: list[Ask], probe: str) -> tuple[list[Answer], list[Any]]:
    """Answers, and the probe's scores of every token of each."""
    outputs = generate(llm, asks)
    found = [scores[0] for scores in clairai.scores(llm, outputs)]
    generated = [one[probe][one.num_prompt :].tolist() for one in found]
    return list(map(read, outputs)), generated


def abort_one(llm: Any, ask: Ask, num_steps: int) -> int:
    """Abort a watched request in the middle; how many are still watched then."""
    import gc

    engine = llm.llm_engine
    prompt = {"prompt_token_ids": list(ask.prompt)}
    request_id = engine.add_request("aborted", prompt, _params(ask))
    for _ in range(num_steps):
        engine.step()
    engine.abort_request([request_id or "aborted"])
    while engine.has_unfinished_requests():
        engine.step()
    gc.collect()
    return len(engine.engine_core.engine_core.clairai_rule_enforcer._rules)


def amend_after(llm: Any, ask: Ask, num_steps: int, steer: list[Any]) -> tuple[int, Answer]:
    """Steer a request otherwise when it has run for some steps; from where on, and its answer."""
    engine, stream = llm.llm_engine, new_stream_id()
    prompt = {"prompt_token_ids": list(ask.prompt)}
    engine.add_request("amended", prompt, _params(ask, stream=stream))
    for _ in range(num_steps):
        engine.step()
    (position,) = clairai.VectorBank(llm).amend(stream, steer)
    done: list[Any] = []
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
    return position, read(done[0])
