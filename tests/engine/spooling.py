"""Scores of a real engine whose ring is much too small; runs in the engine's process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

import clairai
from clairai.library.engine_control import ask_async_engine, ask_engine
from clairai.match.align import Scores, align
from clairai.match.row_collector import RowCollector
from clairai.ring.attach import RingReader
from clairai.spool.client import SpoolClient
from clairai.wire import control_messages
from tests.engine import asks, models
from tests.engine.process import ENVIRONMENT
from tests.support.ring_engine import until

POINTS = ("pre_attn.0", "post_attn.1", "post_block.3")
PART = 8  # requests whose rows fit a ring of 1 MiB
MAX_RECORDS = 4  # of a step
QUIET_S = 0.3  # longer than a step
DEADLINE_S = 300.0


class Comparison(NamedTuple):
    """What `clairai.scores` gave, against a reader that followed the ring all the time."""

    num_answers: int
    num_rows: int
    laps: float  # how often the ring was filled
    num_different: int  # answers


class RingFollower:
    """Collects every row of the ring on a thread, as `clairai.scores` cannot: it comes later."""

    def __init__(self, socket: Path) -> None:
        self.rows = RowCollector(max_streams=1 << 20, max_rows=1 << 30)
        self._reader = RingReader.attach(socket, start="newest")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while True:
            is_over = self._is_over.is_set()
            records = self._reader.poll()
            for record in records:
                self.rows.add(record, self._reader.bank(record.bank_version))
            if is_over and not records:
                return
            if not records:
                self._reader.wait(0.01)

    def catch_up(self) -> None:
        """Nobody waits for this reader: it has to have read before the ring is filled again."""
        until(lambda: self._reader.statistics().lag == 0, DEADLINE_S)

    def finish(self) -> float:
        """How often the ring was filled; raises if a record was lost."""
        self._is_over.set()
        self._thread.join()
        with self._reader:
            statistics = self._reader.statistics()
        assert statistics.lost == 0
        return statistics.delivered / self._reader.welcome.slots


def fill_bank(llm: Any, num_probes: int) -> None:
    clairai.ProbeBank(llm).add(
        *(
            asks.probe(f"{point}:{index}", point, seed=index)
            for point in POINTS
            for index in range(num_probes)
        )
    )


def prompt_lengths(num_requests: int) -> tuple[int, ...]:
    return tuple(3 + 7 * index % 37 for index in range(num_requests))


def compare(llm: Any, num_requests: int, **asked: Any) -> Comparison:
    """Short requests, in all more than the ring holds: every score, and the ring's own."""
    prompts = models.random_prompts(5, prompt_lengths(num_requests), 40_000)
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    follower = RingFollower(Path(described.socket))
    outputs = []
    for begin in range(0, num_requests, PART):
        outputs += asks.generate(llm, prompts[begin : begin + PART], **asked)
        follower.catch_up()
    found = clairai.scores(llm, outputs)
    laps = follower.finish()
    ids = tuple(output.request_id for output in outputs)
    streams = ask_engine(llm, control_messages.FindStreams(ids), control_messages.Streams).streams
    return _compare(follower.rows, streams, outputs, found, laps)


def starve(llm: Any, num_requests: int, **asked: Any) -> tuple[int, int, int]:
    """More requests than the ring holds, and a spool that reads nothing until the ring is full.

    How many rows were scored; and of the full ring: its records that were not read, its slots.
    """
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    socket = Path(described.socket)
    with SpoolClient.connect(socket.parent, described.epoch, WeakValueDictionary()) as client:
        client.read(described.published, described.published)  # all so far
        spool = client.process
    prompts = models.random_prompts(5, prompt_lengths(num_requests), 40_000)
    with RingReader.attach(socket, start="newest") as reader, ThreadPoolExecutor() as pool:
        slots = reader.welcome.slots

        def wake() -> int:
            try:
                until(lambda: reader.statistics().lag >= slots - MAX_RECORDS, DEADLINE_S)
                while reader.wait(QUIET_S):  # until the engine publishes nothing more
                    reader.poll(1)
                counted = reader.statistics()
                return counted.delivered + counted.lost
            finally:
                os.kill(spool, signal.SIGCONT)

        os.kill(spool, signal.SIGSTOP)
        waking = pool.submit(wake)
        outputs = asks.generate(llm, prompts, **asked)
        found = clairai.scores(llm, outputs)
        num_rows = sum(
            int(np.isfinite(one.scores_NP).all(axis=1).sum())
            for answers in found
            for one in answers
        )
        return num_rows, waking.result(), slots


def _compare(
    rows: RowCollector, streams: Sequence[int | None], outputs: Any, found: Any, laps: float
) -> Comparison:
    pairs = [
        (_oracle(rows, stream, output, answer), scores)
        for stream, output, answers in zip(streams, outputs, found, strict=True)
        for answer, scores in zip(output.outputs, answers, strict=True)
    ]
    num_different = sum(not is_same(expected, scores) for expected, scores in pairs)
    num_rows = sum(int(np.isfinite(scores.scores_NP).all(axis=1).sum()) for _, scores in pairs)
    return Comparison(len(pairs), num_rows, laps, num_different)


def _oracle(rows: RowCollector, stream: int | None, output: Any, answer: Any) -> Scores:
    assert stream is not None
    held = rows.rows(stream, answer.index)
    assert held is not None
    return align(held, output.prompt_token_ids, answer.token_ids)


def is_same(expected: Scores, found: Scores) -> bool:
    return (
        found.names == expected.names
        and found.missing == expected.missing == 0
        and np.array_equal(found.token_ids, expected.token_ids)
        and np.array_equal(found.phase, expected.phase)
        and np.array_equal(found.scores_NP, expected.scores_NP, equal_nan=True)
    )


def compare_async(
    model: str, runtime: str, probes: str, num_requests: int, max_tokens: int
) -> Comparison:
    """As `compare`, with vLLM's AsyncLLM: each request is read when it ends, while others run."""
    os.environ.update(ENVIRONMENT | {"CLAIRAI_RUNTIME_DIR": runtime})
    return asyncio.run(_compare_async(model, probes, num_requests, max_tokens))


async def _compare_async(model: str, probes: str, num_requests: int, max_tokens: int) -> Comparison:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        # Large enough for a follower that nobody waits for.
        additional_config=clairai.config(probes=probes, capacity=64, ring_mib=16),
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        described = await ask_async_engine(
            engine, control_messages.Describe(), control_messages.Description
        )
        assert described.keeps_scores
        follower = RingFollower(Path(described.socket))
        prompts = models.random_prompts(5, prompt_lengths(num_requests), 40_000)
        answered = await asyncio.gather(
            *(
                _answer(engine, f"request-{at}", prompt, max_tokens)
                for at, prompt in enumerate(prompts)
            )
        )
        outputs, found = zip(*answered, strict=True)
        question = control_messages.FindStreams(tuple(output.request_id for output in outputs))
        streams = (await ask_async_engine(engine, question, control_messages.Streams)).streams
        return _compare(follower.rows, streams, outputs, found, follower.finish())
    finally:
        engine.shutdown()


async def _answer(
    engine: Any, request_id: str, prompt: list[int], max_tokens: int
) -> tuple[Any, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    (output,) = [
        one async for one in engine.generate({"prompt_token_ids": prompt}, params, request_id)
    ]
    (answers,) = await clairai.async_scores(engine, [output])
    return output, answers
