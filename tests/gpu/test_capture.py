"""On a GPU: rows are copied beside the forward pass, before the stash is overwritten.

No engine is started here. The twin of the encoders on a CPU says what their bytes are.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import clairai
from clairai.capture.staging_arena import StagingArena
from clairai.engine.capture.capture_plan import KeepThreshold
from clairai.engine.capture.encode import encode_twin
from clairai.engine.capture.pinned_arena import PinnedArena
from clairai.store.codecs.registry import named
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import WIDTH, remote_rig, rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_STEPS = 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["raw", "full8", "rp8", "topk8", "fp8", "int4"])
def test_every_step_is_copied_before_the_next_one_overwrites_it(
    name: str, dtype: torch.dtype
) -> None:
    kind = str(dtype).removeprefix("torch.")
    encoder = named(name, {"dtype": kind} if name == "raw" else {})
    wanted = capture_plan(
        points=["pre_attn.0", "post_block.1"], encoder=name, parameters=encoder.parameters
    )
    with rig(nbytes=8 << 20, dtype=dtype, device="cuda") as made:
        made.enter("a", 7, wanted)
        # The host does not wait for the GPU in between.
        kept = [made.step(("x", 0, 3), ("a", 5 * step, 5)) for step in range(NUM_STEPS)]
        assert made.found(7).rows == 2 * 5 * NUM_STEPS
        assert made.found(7).dropped == 0
    for site, point in ((0, "pre_attn.0"), (2, "post_block.1")):
        blocks = [block for block in made.consumers["toy"].blocks if block.point == point]
        rows_N = np.concatenate([block.rows_N for block in blocks])
        assert rows_N["position"].tolist() == [*range(5 * NUM_STEPS)]
        assert rows_N["token_id"].tolist() == [*range(1000, 1000 + 5 * NUM_STEPS)]
        truth = encode_twin(torch.cat([step[site, 3:] for step in kept]).cpu(), encoder)
        for array_name, values in truth.items():
            found = np.concatenate([block.arrays[array_name] for block in blocks])
            assert found.shape == tuple(values.shape)
            assert np.array_equal(found, values.numpy()), array_name


@pytest.mark.parametrize("name", ["raw", "rp8"])
def test_rows_reach_another_process_when_the_gpu_says_so(name: str, tmp_path: Path) -> None:
    """This process does not wait: the writer reads no row before the GPU has written its number."""
    encoder = named(name, {"dtype": "bfloat16"} if name == "raw" else {"k": 16})
    wanted = capture_plan(
        points=["pre_attn.0", "post_block.1"],
        encoder=name,
        parameters=encoder.parameters,
        to=("fs",),
    )
    with remote_rig({"folder": str(tmp_path / "s")}, dtype=torch.bfloat16, device="cuda") as made:
        made.enter("a", 7, wanted)
        kept = [made.step(("x", 0, 3), ("a", 5 * step, 5)) for step in range(NUM_STEPS)]
        told = made.ended("api-a", "kept")
        assert (told.rows, told.lost) == (2 * 5 * NUM_STEPS, 0)
    store = clairai.open(tmp_path / "s")
    for site, point in ((0, "pre_attn.0"), (2, "post_block.1")):
        rows = store.rows(7, point=point)
        assert rows.token_id.tolist() == [*range(1000, 1000 + 5 * NUM_STEPS)]
        truth = encode_twin(torch.cat([step[site, 3:] for step in kept]).cpu(), encoder)
        arrays = {key: array.numpy() for key, array in truth.items()}
        assert np.array_equal(np.asarray(rows), encoder.decode(arrays, width=WIDTH))


def test_copies_into_registered_memory_do_not_wait_for_the_gpu() -> None:
    """Calls that enqueue copies behind long work return before the work is done."""
    arena = StagingArena.create(64 << 20)
    pinned = PinnedArena(arena, torch.device("cuda", 0))
    rows = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
        begin_s = time.perf_counter()
        pinned.tensor(0, torch.uint8, (len(rows),)).copy_(rows, non_blocking=True)
        pinned.mark_copied(int(stream.cuda_stream), 1)
        took_s = time.perf_counter() - begin_s
    assert not arena.is_copied(1)
    assert took_s < 0.2
    stream.synchronize()
    assert arena.is_copied(1)
    assert (arena.memory[: len(rows)] == 1).all()
    pinned.close()
    arena.close()


def test_a_rule_sees_the_scores_of_the_gpu() -> None:
    with rig(device="cuda") as made:
        made.enter("a", 1, capture_plan(hold=KeepThreshold("anger", 2.0)))
        made.tables.bias_SK[1, 1] = 1.0
        made.step(("a", 0, 2))
        assert made.found(1).rows == 0
        made.tables.bias_SK[1, 1] = 3.0
        made.step(("a", 2, 1))
        assert made.found(1).rows == 3
    values = made.consumers["toy"].blocks[0].arrays["values"]
    assert values.shape[1] == WIDTH
