"""What requests and bank changes do to a running engine; runs in the engine's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import clairai
from clairai.errors import ClairaiError
from clairai.library.engine_control import ask_engine
from clairai.ring.attach import RingReader
from clairai.wire import control_messages

WIDTH = 576


def probe(name: str, point: str = "post_block.3", seed: int = 0, **fields: Any) -> clairai.Probe:
    direction_D = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return clairai.Probe(name, clairai.Point.parse(point), direction_D, **fields)


def generate(
    llm: Any, prompts: list[list[int]], *, max_tokens: int = 4, extra: Any = None, **params: Any
) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra, **params
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, sampling, use_tqdm=False)


def scores(
    llm: Any, prompts: list[list[int]], names: list[str], **asked: Any
) -> list[list[clairai.Scores]]:
    """Scores of one generate() with a bank of probes of these names."""
    bank = clairai.ProbeBank(llm)
    bank.add(*(probe(name, seed=index) for index, name in enumerate(names)))
    found = clairai.scores(llm, generate(llm, prompts, **asked))
    bank.remove(*names)
    return found


def tokens(llm: Any, prompts: list[list[int]], **asked: Any) -> list[list[list[int]]]:
    outputs = generate(llm, prompts, **asked)
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def generate_quietly(llm: Any, prompts: list[list[int]], **asked: Any) -> None:
    generate(llm, prompts, **asked)


def drop_unfinished(llm: Any) -> None:
    """After a refusal inside generate(): end what was already admitted."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    while engine.has_unfinished_requests():
        engine.step()


def bank_life(llm: Any) -> list[list[str]]:
    """Names in the bank after each of: add two, replace one, remove one, remove the other."""
    bank = clairai.ProbeBank(llm)
    return [
        [info.name for info in infos]
        for infos in (
            bank.add(probe("a"), probe("b", "pre_attn.0")),
            bank.replace(probe("a", "post_attn.1", seed=5)),
            bank.remove("b"),
            bank.remove("a"),
        )
    ]


def change_mid_request(llm: Any) -> tuple[clairai.Scores, int]:
    """Add a probe while a request generates; the step it arrived at."""
    from vllm import SamplingParams

    bank, engine = clairai.ProbeBank(llm), llm.llm_engine
    bank.add(probe("early"))
    params = SamplingParams(
        max_tokens=8, ignore_eos=True, detokenize=False, extra_args=clairai.request()
    )
    engine.add_request("mid", {"prompt_token_ids": [5, 6, 7]}, params)
    for step in range(8):
        if step == 4:
            bank.add(probe("late", seed=1))
        outputs = engine.step()
    found = clairai.scores(llm, outputs)[0][0]
    bank.remove("early", "late")
    return found, 4


def refused(llm: Any, change: str) -> tuple[str, str, bool]:
    """Code and reason of a bank change that must fail, and whether the bank stayed as it was."""
    bank = clairai.ProbeBank(llm)
    before = bank.add(probe("keep", model="SmolLM2-135M-Instruct"))
    try:
        _CHANGES[change](bank)
    except ClairaiError as error:
        return error.code, error.reason, bank.list() == before
    finally:
        bank.remove("keep")
    return "", "accepted", False


def _truncated(bank: clairai.ProbeBank) -> None:
    from clairai.probe.files import dumps

    bank._change(control_messages.AddProbes((dumps(probe("x"))[:-7],)))


def _fill(bank: clairai.ProbeBank) -> None:
    bank.add(*(probe(f"p{i}") for i in range(8)))  # with "keep" one more than the capacity


def _narrow(bank: clairai.ProbeBank) -> None:
    point = clairai.Point.parse("post_block.3")
    bank.add(clairai.Probe("x", point, np.ones(64, np.float32)))


_CHANGES = {
    "untapped point": lambda bank: bank.add(probe("x", "post_block.1")),
    "duplicate": lambda bank: bank.add(probe("keep")),
    "unknown name": lambda bank: bank.remove("nobody"),
    "replace unknown": lambda bank: bank.replace(probe("nobody")),
    "other model": lambda bank: bank.add(probe("x", model="other/Model-7B")),
    "truncated file": _truncated,
    "over capacity": _fill,
    "wrong width": _narrow,
}


def events_of(llm: Any, prompts: list[list[int]], **asked: Any) -> list[tuple[int, ...]]:
    """(choice, position, span, phase, flags) of every row of one generate() and the step after."""
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    with RingReader.attach(Path(described.socket), start="newest") as reader:
        generate(llm, prompts, **asked)
        ask_engine(llm, control_messages.Describe(), control_messages.Description)
        rows = np.concatenate([record.rows for record in reader.poll()])
    fields = ("choice", "position", "span", "phase", "flags")
    return [tuple(int(row[name]) for name in fields) for row in rows]


def overrun(llm: Any) -> str:
    """Ask for scores that a small ring has already overwritten; the error, if it is one."""
    bank = clairai.ProbeBank(llm)
    bank.add(probe("a"))
    first = generate(llm, [[9, 9, 9]], max_tokens=2)
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    with RingReader.attach(Path(described.socket), start="newest") as reader:
        num_slots = reader.welcome.slots
    while (
        ask_engine(llm, control_messages.Describe(), control_messages.Description).published
        < described.published + num_slots
    ):
        generate(llm, [[9]], max_tokens=200)
    try:
        clairai.scores(llm, first)
    except ClairaiError as error:
        return f"{error.code}: {error.reason}"
    finally:
        bank.remove("a")
    return "accepted"
