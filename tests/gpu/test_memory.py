"""On a GPU: what clairai takes is in vLLM's budget, survives sleep, and goes with the engine.

vLLM takes its budget from the whole GPU: nothing else may start or end on it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import clairai
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.steer.steer_tables import SteerTables
from clairai.errors import RingError
from tests.engine.process import EngineProcess
from tests.gpu import forced

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Large on purpose: more than everything else that a small model takes.
RING_MIB, CAPACITY, MAX_TOKENS = 4096, 1024, 8192
POINTS: Final = ["pre_attn.0", "post_attn.*", "post_block.*"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[EngineProcess]:
    config = clairai.config(
        points=POINTS, capacity=CAPACITY, ring_mib=RING_MIB, ring_home="device", steering=True
    )
    with EngineProcess(
        runtime=runtime,
        environment={
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the test sends functions to the worker
        },
        model=str(forced.model(tmp_path_factory.mktemp("memory") / "tiny")),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=MAX_TOKENS,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        enable_sleep_mode=True,
        additional_config=config,
    ) as running:
        running.call(forced.fill)
        yield running


def in_worker(llm: Any, function: Callable[[Any], Any]) -> Any:
    return llm.collective_rpc(function)[0]


def budget(worker: Any) -> dict[str, int]:
    """v1/worker/gpu_worker.py Worker.determine_available_memory.

    0.26 counts weights and what is not torch's; 0.32:731 only what the whole GPU has lost.
    """
    weights = worker.model_runner.model_memory_usage
    counts_all = hasattr(worker, "total_consumed")
    return {
        "tables": worker.clairai_tables.nbytes + worker.clairai_steer_tables.nbytes,
        "counted as weights": weights,
        "counted": worker.total_consumed if counts_all else weights + worker.non_torch_memory,
        "asked for": worker.requested_memory,
        "for KV": worker.available_kv_cache_memory_bytes,
    }


def let_go(worker: Any) -> dict[str, Any]:
    """End the worker; what the driver says of the ring's memory before and after."""
    memory = worker.clairai_step_publisher._ring.memory
    gpu, address = memory._gpu, memory.address
    held, free = gpu.extent(address), torch.cuda.mem_get_info()[0]
    worker.shutdown()
    torch.cuda.synchronize()
    try:
        left = gpu.extent(address)
    except RingError:
        left = 0
    return {"held": held, "left": left, "freed": torch.cuda.mem_get_info()[0] - free}


def asleep_and_awake(llm: Any) -> tuple[int, int]:
    """Free memory before and during the sleep."""
    awake = torch.cuda.mem_get_info()[0]
    llm.sleep(level=1)
    asleep = torch.cuda.mem_get_info()[0]
    llm.wake_up()
    return awake, asleep


def test_tables_and_ring_are_in_vllms_budget(
    engine: EngineProcess, report: Callable[..., None]
) -> None:
    """The ring is not torch's, and vLLM sees it on the GPU; the tables are, and we count them."""
    found = engine.call(in_worker, budget)
    report(test="memory", **found)
    assert found["tables"] > 256 << 20
    assert found["tables"] <= found["counted as weights"] < 2 * found["tables"]
    assert found["counted"] >= found["tables"] + (RING_MIB << 20)
    assert found["for KV"] <= found["asked for"] - found["counted"]


def test_rows_and_scores_are_the_same_after_a_sleep(engine: EngineProcess) -> None:
    before = {is_steered: engine.call(forced.ask, is_steered) for is_steered in (False, True)}
    awake, asleep = engine.call(asleep_and_awake)
    assert asleep > awake  # it slept
    for is_steered, expected in before.items():
        found = engine.call(forced.ask, is_steered)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.scores["pre_attn.0"].tobytes() == theirs.scores["pre_attn.0"].tobytes()
            for point in (forced.MIDDLE, forced.LAST):
                assert np.isfinite(mine.scores[point]).all()
                difference = np.abs(mine.scores[point] - theirs.scores[point])
                assert difference.max() <= 0.02 * np.abs(theirs.scores[point]).max()


def test_the_ring_goes_with_the_engine(engine: EngineProcess) -> None:
    """Runs last: the engine serves no more."""
    found = engine.call(in_worker, let_go)
    assert found["held"] >= (RING_MIB - 1) << 20
    assert found["left"] == 0
    assert found["freed"] >= (RING_MIB - 1) << 20


def tap_tables() -> ScoreTables:
    return ScoreTables(
        ["a", "b"], width=4096, capacity=64, max_tokens=8192, device="cuda:0", dtype=torch.bfloat16
    )


def steer_tables() -> SteerTables:
    return SteerTables(
        ["a", "b"], width=4096, max_tokens=8192, gate_slots=256, rows=1024, programs=256,
        vocabulary=32000, device="cuda:0", dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("make", [tap_tables, steer_tables])
def test_tables_take_what_they_say(make: Callable[[], ScoreTables | SteerTables]) -> None:
    before = torch.cuda.memory_allocated()
    made = make()
    taken = torch.cuda.memory_allocated() - before
    assert abs(taken - made.nbytes) <= 0.01 * made.nbytes
