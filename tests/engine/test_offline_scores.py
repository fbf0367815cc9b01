"""`clairai.scores` of a real engine, with default settings and a ring that is much too small."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import clairai
from tests.engine import asks, spooling
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
NUM_REQUESTS, NUM_TOKENS = 300, 6


@pytest.fixture(scope="module")
def small_ring(cut_model: Path, runtime: Path) -> Iterator[EngineProcess]:
    """As users have it: the engine core in a process of its own, and a spool beside it."""
    with EngineProcess(
        runtime=runtime,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        model=str(cut_model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        # A plain object: what `clairai.config` makes is not needed for scores to be kept.
        additional_config={
            "clairai": {"points": [*spooling.POINTS], "capacity": 64, "ring_mib": 1}
        },
    ) as running:
        running.call(spooling.fill_bank, 60)
        yield running


def test_every_row_of_several_hundred_requests_arrives_and_is_the_rings_own(
    small_ring: EngineProcess,
) -> None:
    found = small_ring.call(spooling.compare, NUM_REQUESTS, max_tokens=NUM_TOKENS)
    assert found.laps > 4
    assert found.num_answers == NUM_REQUESTS
    assert found.num_different == 0
    # The last token of an answer is never forwarded.
    num_generated = NUM_REQUESTS * (NUM_TOKENS - 1)
    assert found.num_rows == sum(spooling.prompt_lengths(NUM_REQUESTS)) + num_generated


def test_a_spool_that_is_starved_costs_time_and_no_rows(small_ring: EngineProcess) -> None:
    num_rows, unread, slots = small_ring.call(spooling.starve, NUM_REQUESTS, max_tokens=NUM_TOKENS)
    assert slots - spooling.MAX_RECORDS <= unread < slots
    num_generated = NUM_REQUESTS * (NUM_TOKENS - 1)
    assert num_rows == sum(spooling.prompt_lengths(NUM_REQUESTS)) + num_generated


def test_every_choice_of_a_request_has_its_own_rows(small_ring: EngineProcess) -> None:
    found = small_ring.call(spooling.compare, 8, max_tokens=NUM_TOKENS, n=3, temperature=1.0)
    assert (found.num_answers, found.num_different) == (24, 0)


def test_rows_that_the_ring_has_overwritten_still_arrive(small_ring: EngineProcess) -> None:
    assert small_ring.call(asks.overrun) == "accepted"


def test_an_async_engine_gives_the_scores_of_each_request_while_others_run(
    cut_model: Path, runtime: Path, tmp_path: Path
) -> None:
    for index in range(60):
        clairai.save(tmp_path / f"p{index}.safetensors", asks.probe(f"p{index}", seed=index))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        called = process.submit(
            spooling.compare_async, str(cut_model), str(runtime), str(tmp_path), 60, NUM_TOKENS
        )
        found = called.result()
    assert (found.num_answers, found.num_different) == (60, 0)
    assert found.num_rows == sum(spooling.prompt_lengths(60)) + 60 * (NUM_TOKENS - 1)
