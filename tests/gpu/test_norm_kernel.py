"""On a GPU: a norm of ours is vLLM's norm, steers as the twin does, and its rows are scored later.

T = tokens, D = width, K = probes of a site. No engine is started here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clairai.engine.kernel_launch import CudaDriver
from clairai.engine.score.fused_norm import FusedNormSite
from clairai.engine.score.norm_kernel import FusedNorm, norm_twin
from clairai.engine.score.stash_kernel import StashScorer
from clairai.engine.steer.steer_twin import steer_twin
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from tests.gpu.test_kernels import bank, rows, twin
from tests.gpu.test_kernels import tables as score_tables
from tests.gpu.test_steer_kernel import NUM_SITES, plan
from tests.gpu.test_steer_kernel import tables as steer_tables

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROUNDING = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}
EPSILON = 1e-5


def pair(num_tokens: int, width: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    given = rows(2 * num_tokens, width, dtype)
    return given[:num_tokens].clone(), given[num_tokens:].clone()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("width", [576, 4096, 8192])
def test_it_is_vllms_norm_and_the_stream_has_equal_bits(width: int, dtype: str) -> None:
    weight_D = rows(1, width, dtype)[0]
    for num_tokens in (1, 2, 17, 512, 513, 8192):
        x_TD, residual_TD = pair(num_tokens, width, dtype)
        stash_RD = torch.full((512, width), 7.0, device="cuda", dtype=x_TD.dtype)
        ran = torch.zeros((), dtype=torch.int32, device="cuda")
        normed_TD, stream_TD = FusedNorm(width, EPSILON, stash_RD, ran)(x_TD, residual_TD, weight_D)
        expected = norm_twin(x_TD, residual_TD, weight_D, EPSILON)
        assert torch.equal(stream_TD, expected[1])
        bound = ROUNDING[dtype]
        torch.testing.assert_close(normed_TD, expected[0], rtol=bound, atol=bound)
        assert torch.equal(stash_RD[:num_tokens], stream_TD[:512])
        assert (stash_RD[num_tokens:] == 7.0).all()
        assert int(ran) == 1


@pytest.mark.parametrize("dtype", ROUNDING)
def test_it_steers_as_the_twin_does_and_leaves_others_their_bits(dtype: str) -> None:
    width = 4096
    held = steer_tables(width, dtype)
    steering = WorkerSteering(held, {f"s{index}": f"s{index}" for index in range(NUM_SITES)})
    for number in range(3):
        steering.add(f"r{number}", plan(width, number))
    counts = np.array([1, 300, 7, 64], np.int32)
    names = ["r0", "plain", "r1", "r2"]
    steering.place(StepBatch(names, counts, np.zeros(4, np.int32)))
    x_TD, residual_TD = pair(380, width, dtype)
    weight_D = rows(1, width, dtype)[0]
    stash_RD = torch.zeros(512, width, device="cuda", dtype=x_TD.dtype)
    norm = FusedNorm(width, EPSILON, stash_RD, held.ran_S.new_zeros(()))
    plain = norm(x_TD, residual_TD, weight_D)
    normed_TD, stream_TD = norm.steered(x_TD, residual_TD, weight_D, held, 0)
    kernel_state = held.state_ZG.clone()
    held.state_ZG.zero_()
    steer_twin(x_TD, residual_TD, held, 0)
    expected = norm_twin(x_TD, residual_TD, weight_D, EPSILON)
    bound = 3 * ROUNDING[dtype]
    torch.testing.assert_close(stream_TD, expected[1], rtol=bound, atol=bound)
    torch.testing.assert_close(normed_TD, expected[0], rtol=2 * bound, atol=2 * bound)
    torch.testing.assert_close(held.state_ZG, kernel_state)
    others = [*range(1, 301), *range(372, 380)]
    assert torch.equal(stream_TD[others], plain[1][others])
    assert torch.equal(normed_TD[others], plain[0][others])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capacity", [3, 33])
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 100, 129, 512, 513])
def test_a_fused_site_has_the_scores_of_a_plain_one(
    num_tokens: int, capacity: int, dtype: str
) -> None:
    width = 1024
    held = score_tables(3, width, capacity, dtype, max_tokens=1024, stash_rows=512)
    sites = [FusedNormSite(held, name, EPSILON) for name in held.sites]
    for name in held.sites:
        held.score_from_stash(name)
    held.load(bank(3, width, capacity))
    scorer = StashScorer(held)
    driver = CudaDriver()
    scorer.prepare(driver)
    x_TD, residual_TD = pair(num_tokens, width, dtype)
    weight_D = torch.ones(width, device="cuda", dtype=x_TD.dtype)
    streams = [site.norm(x_TD, residual_TD, weight_D)[1] for site in sites]
    if num_tokens <= 512:
        scorer.launch_for(num_tokens).run(driver, torch.cuda.current_stream().cuda_stream)
    found_TK = held.scores_STK[:, :num_tokens].clone()
    if num_tokens <= 512:
        held.scores_STK.zero_()
        scorer.launch_in_graph(num_tokens).run(driver, torch.cuda.current_stream().cuda_stream)
        assert torch.equal(found_TK, held.scores_STK[:, :num_tokens])
    torch.testing.assert_close(found_TK[0], twin(held, streams[0]), rtol=2e-5, atol=2e-5)
    for index, stream_TD in enumerate(streams):
        held.site(held.sites[index]).read(stream_TD)
    assert torch.equal(found_TK, held.scores_STK[:, :num_tokens])
