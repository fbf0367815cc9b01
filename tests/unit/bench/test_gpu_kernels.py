"""What two profiles say of a decode step, and of what taps add to it or leave out of it."""

from __future__ import annotations

import pytest

from bench import gpu_kernels
from bench.gpu_fp8 import differ

QUANTISES = "triton_red_fused__to_copy_abs_add_amax_clamp_mean_mul_pow_rsqrt_0"
MULTIPLIES = "void cutlass::device_kernel<vllm::cutlass_3x_gemm<...>>"
LAYERS = 32


def profile(num_steps: int, **changes: float) -> dict[str, tuple[int, float]]:
    """A prefill of kernels that take long, and steps of `LAYERS` layers."""
    calls = {QUANTISES: 4, MULTIPLIES: 4, "flash_fwd": 1} | changes
    return {
        name: (int(LAYERS * each * (num_steps + 1)), LAYERS * each * (2.0 * num_steps + 100.0))
        for name, each in calls.items()
        if each
    }


def step(**changes: float) -> dict[str, tuple[float, float]]:
    steps = [num_new - 1 for num_new in gpu_kernels.PROFILED_TOKENS]
    return gpu_kernels.kernels_of_a_step(*(profile(one, **changes) for one in steps))


def test_a_step_has_neither_kernels_nor_time_of_the_prefill() -> None:
    assert step()[QUANTISES] == pytest.approx((4.0 * LAYERS, 4.0 * LAYERS * 2.0))


@pytest.mark.parametrize("kernel", ["copy_to_stash", "score_wide"])
def test_taps_add_kernels_of_their_own_and_leave_the_rest_as_it_is(kernel: str) -> None:
    found = gpu_kernels.sum_by_kind(gpu_kernels.compare(step(), step(**{kernel: 1})))
    assert found["clairai"]["first_calls"] == 0
    assert found["clairai"]["other_calls"] == LAYERS
    for kind in ("quantises", "multiplies", "attention"):
        assert found[kind]["first_calls"] == found[kind]["other_calls"] > 0
    assert found["all"]["other_us"] - found["all"]["first_us"] == pytest.approx(2.0 * LAYERS)


def test_a_quantisation_that_taps_leave_out_is_seen() -> None:
    found = gpu_kernels.compare(step(), step(**{QUANTISES: 3}))
    assert (found[0].name, found[0].kind) == (QUANTISES, "quantises")
    assert found[0].first_calls - found[0].other_calls == LAYERS


def test_answers_differ_by_tokens_and_by_logprobs_before_the_first_other_token() -> None:
    mine = [[(1, {1: -0.5, 2: -1.0}), (2, {2: -0.1}), (3, {3: -0.2})]]
    assert differ(mine, mine) == {"tokens": 3, "others": 0, "worst_logprob": 0.0}
    theirs = [[(1, {1: -0.5, 2: -1.25}), (9, {2: -0.6, 9: -0.5}), (3, {3: -7.0})]]
    assert differ(mine, theirs) == {"tokens": 3, "others": 1, "worst_logprob": 0.5}
