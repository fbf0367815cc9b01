"""On a GPU: rows leave the stash beside the forward, as they were, whatever is written there next.

No engine is started here. The twin of the encoders on a CPU says what their bytes are.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clairai.capture.order import Hold
from clairai.store.codecs.registry import named
from clairai.tap.encode_twin import encode_twin
from tests.unit.toy_capture_rig import WIDTH, rig
from tests.unit.toy_captures_engine import order

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_STEPS = 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["raw", "full8", "rp8", "topk8", "fp8", "int4"])
def test_every_step_is_taken_before_the_next_one_overwrites_it(
    name: str, dtype: torch.dtype
) -> None:
    kind = str(dtype).removeprefix("torch.")
    encoder = named(name, {"dtype": kind} if name == "raw" else {})
    wanted = order(
        points=["pre_attn.0", "post_block.1"], encoder=name, parameters=encoder.parameters
    )
    with rig(nbytes=8 << 20, dtype=dtype, device="cuda") as made:
        made.enter("a", 7, wanted)
        # Nobody waits for the GPU in between.
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


def test_a_rule_sees_the_scores_of_the_gpu() -> None:
    with rig(device="cuda") as made:
        made.enter("a", 1, order(hold=Hold("anger", 2.0)))
        made.tables.bias_SK[1, 1] = 1.0
        made.step(("a", 0, 2))
        assert made.found(1).rows == 0
        made.tables.bias_SK[1, 1] = 3.0
        made.step(("a", 2, 1))
        assert made.found(1).rows == 3
    values = made.consumers["toy"].blocks[0].arrays["values"]
    assert values.shape[1] == WIDTH
