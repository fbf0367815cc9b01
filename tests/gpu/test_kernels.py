"""On a GPU: compiled kernels equal their twins, captured or not, and so do the ring's records.

T = tokens, D = width, K = probes of a site, P = probes. No engine is started here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clairai.engine.kernel_launch import CudaDriver
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.ring_setup import open_ring
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_rows import RowBuilder
from clairai.engine.score.score_tables import ScoreTables, copy_to_stash_twin, score_twin
from clairai.engine.score.stash_kernel import StashScorer
from clairai.engine.step import ForwardInputs, RequestMark, StepBatch
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe
from clairai.ring.reader import RingCursor
from clairai.settings import Settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = ("bfloat16", "float16", "float32")
TOKENS = (1, 2, 15, 16, 17, 100, 512, 513, 4096, 8192)


def tables(
    num_sites: int,
    width: int,
    capacity: int,
    dtype: str,
    max_tokens: int = 8192,
    stash_rows: int = 0,
) -> ScoreTables:
    made = ScoreTables(
        [f"post_block.{layer}" for layer in range(num_sites)],
        width=width,
        capacity=capacity,
        max_tokens=max_tokens,
        device="cuda:0",
        dtype=getattr(torch, dtype),
        stash_rows=stash_rows,
    )
    made.load(bank(num_sites, width, capacity))
    return made


def bank(num_sites: int, width: int, capacity: int, seed: int = 0) -> EngineBank:
    rng = np.random.default_rng(seed)
    points = [Point("post_block", layer) for layer in range(num_sites)]
    probes = [
        Probe(
            f"{point}:{slot}",
            point,
            (rng.standard_normal(width) / width**0.5).astype(np.float32),
            bias=float(rng.standard_normal()),
            activation=("none", "relu", "sigmoid")[slot % 3],
        )
        for point in points
        for slot in range(capacity)
    ]
    return EngineBank.empty(points, capacity, width, "toy").add(probes)


def rows(num_tokens: int, width: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    made = torch.randn(num_tokens, width, generator=generator, device="cuda")
    return made.to(getattr(torch, dtype))


def twin(held: ScoreTables, hidden_TD: torch.Tensor) -> torch.Tensor:
    out_TK = torch.empty(len(hidden_TD), held.scores_STK.shape[2], device="cuda")
    given = (held.weights_SHDK[0], held.bias_SK[0], held.activation_SK[0])
    score_twin(hidden_TD, *given, out_TK, torch.zeros((), dtype=torch.int32, device="cuda"))
    return out_TK


@pytest.fixture(autouse=True)
def exact_twin() -> None:
    """The twin's own product must not be coarser than the kernel's."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [1, 16, 33, 64])
@pytest.mark.parametrize("width", [576, 4096])
def test_the_kernel_equals_its_twin(width: int, capacity: int, dtype: str) -> None:
    held = tables(1, width, capacity, dtype)
    site = held.site("post_block.0")
    for num_tokens in TOKENS:
        hidden_TD = rows(num_tokens, width, dtype)
        held.scores_STK.fill_(7.0)
        site.read(hidden_TD)
        torch.testing.assert_close(
            held.scores_STK[0, :num_tokens], twin(held, hidden_TD), rtol=2e-5, atol=2e-5
        )
        assert (held.scores_STK[0, num_tokens:] == 7.0).all()  # nothing beyond the step is written


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_captured_or_eager_alone_or_padded(dtype: str) -> None:
    held = tables(2, 4096, 16, dtype)
    hidden_TD = rows(64, 4096, dtype)
    site = held.site("post_block.0")
    site.read(hidden_TD[:5])
    eager_TK = held.scores_STK[0, :5].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        site.read(hidden_TD)
    held.scores_STK.zero_()
    graph.replay()
    assert torch.equal(held.scores_STK[0, :5], eager_TK)


def test_a_captured_graph_sees_a_new_bank_and_new_rows() -> None:
    held = tables(1, 1024, 16, "bfloat16")
    hidden_TD = rows(8, 1024, "bfloat16")
    site = held.site("post_block.0")
    site.read(hidden_TD)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        site.read(hidden_TD)
    hidden_TD.copy_(hidden_TD.flip(0))
    held.load(bank(1, 1024, 16, seed=9))
    graph.replay()
    expected_TK = twin(held, hidden_TD)
    torch.testing.assert_close(held.scores_STK[0, :8], expected_TK, rtol=2e-5, atol=2e-5)


STASH_ROWS = 512


def stash_tables(num_sites: int, width: int, capacity: int, dtype: str) -> ScoreTables:
    """Every site is scored from the stash."""
    held = tables(num_sites, width, capacity, dtype, max_tokens=1024, stash_rows=STASH_ROWS)
    for name in held.sites:
        held.score_from_stash(name)
    held.load(bank(num_sites, width, capacity))
    return held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [100, 576, 1025, 4096, 5120, 8192])
def test_a_row_in_the_stash_has_the_bits_of_the_stream(width: int, dtype: str) -> None:
    """Site by site: Triton compiles again for a stash that is aligned otherwise."""
    held = stash_tables(3, width, 1, dtype)
    sites = [held.stash_site(name) for name in held.sites]
    for num_tokens in (1, 2, 17, STASH_ROWS, STASH_ROWS + 1, 1024):
        held.stash_SRD.fill_(7.0)
        held.ran_S.zero_()
        wide_TD = rows(num_tokens, 2 * width, dtype)
        for at, hidden_TD in ((0, wide_TD[:, :width].contiguous()), (2, wide_TD[:, width:])):
            sites[at].read(hidden_TD)
            twin_RD = torch.full_like(held.stash_SRD[at], 7.0)
            copy_to_stash_twin(hidden_TD, twin_RD, torch.zeros_like(held.ran_S[at]))
            assert torch.equal(held.stash_SRD[at], twin_RD)
        assert (held.stash_SRD[1] == 7.0).all()
        assert [bool(ran) for ran in held.ran_S] == [True, False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capacity", [3, 33])
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 100, 129, 512, 513])
def test_a_stash_site_has_the_scores_of_one_that_scores_at_once(
    num_tokens: int, capacity: int, dtype: str
) -> None:
    held = stash_tables(3, 1024, capacity, dtype)
    scorer, driver = StashScorer(held), CudaDriver()
    scorer.prepare(driver)
    given = rows(3 * num_tokens, 1024, dtype).split(num_tokens)
    for name, hidden_TD in zip(held.sites, given, strict=True):
        held.stash_site(name).read(hidden_TD)
    if num_tokens <= STASH_ROWS:
        assert not held.scores_STK.any()
        scorer.launch_for(num_tokens).run(driver, torch.cuda.current_stream().cuda_stream)
    found_STK = held.scores_STK[:, :num_tokens].clone()
    torch.testing.assert_close(found_STK[0], twin(held, given[0]), rtol=2e-5, atol=2e-5)
    for name, hidden_TD in zip(held.sites, given, strict=True):
        held.site(name).read(hidden_TD)
    assert torch.equal(found_STK, held.scores_STK[:, :num_tokens])


def test_a_captured_graph_stashes_new_rows_and_scores_them_by_a_new_bank() -> None:
    held = stash_tables(2, 1024, 16, "bfloat16")
    scorer, driver = StashScorer(held), CudaDriver()
    scorer.prepare(driver)
    hidden_TD = rows(8, 1024, "bfloat16")
    sites = [held.stash_site(name) for name in held.sites]
    sites[0].read(hidden_TD)  # compiles
    sites[1].read(hidden_TD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for site in sites:
            site.read(hidden_TD)
        scorer.launch_in_graph(8).run(driver, torch.cuda.current_stream().cuda_stream)
    hidden_TD.copy_(hidden_TD.flip(0))
    held.load(bank(2, 1024, 16, seed=9))
    held.stash_SRD.zero_()
    held.ran_S.zero_()
    graph.replay()
    assert torch.equal(held.stash_SRD[:, :8], hidden_TD.expand(2, -1, -1))
    assert held.ran_S.tolist() == [1, 1]
    torch.testing.assert_close(held.scores_STK[0, :8], twin(held, hidden_TD), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("home", ["host", "device"])
def test_the_gpu_writes_the_rows_that_the_host_would(home: str) -> None:
    held = tables(3, 576, 16, "bfloat16", max_tokens=2048)
    held.scores_STK.normal_()
    settings = Settings(points=("post_block.0",), ring_mib=16, ring_home=home)
    opened = open_ring(settings, held, max_requests=8, epoch=77)
    inputs = ForwardInputs(
        torch.arange(2048, device="cuda") + 30,
        torch.arange(2048, device="cuda", dtype=torch.int32) * 3,
    )
    opened.publisher.prepare(inputs)
    builder = RowBuilder()
    for index in range(4):
        builder.add_request(
            f"r{index}", RequestMark(2**64 - 1 - index, index), prompt_len=40 * index
        )
    ring = RingCursor(opened.memory)
    for number, counts in enumerate(([5, 1, 1, 900], [1, 1, 1, 1], [1000, 3, 7, 1]), start=1):
        counts_R = np.array(counts, np.int32)
        batch = StepBatch(["r0", "r1", "r2", "r3"], counts_R, np.full(4, 20 * number, np.int32))
        step = builder.build(batch)
        opened.publisher.begin_step()
        opened.publisher.publish(step, 5, inputs)
        opened.publisher.flush()
        num_tokens = sum(counts)
        expected = step.fill(
            inputs.positions_T[:num_tokens].cpu().numpy(),
            inputs.token_ids_T[:num_tokens].cpu().numpy(),
        )
        records = ring.poll()
        found = np.concatenate([record.rows for record in records])
        scores_RP = np.concatenate([record.scores_RC for record in records])
        assert found.tobytes() == expected.tobytes()
        assert {record.bank_version for record in records} == {5}
        assert np.isnan(scores_RP[: len(step.events)]).all()
        assert np.array_equal(scores_RP[len(step.events) :], held.gather(num_tokens).cpu().numpy())
    assert ring.statistics().lost == 0
    opened.close()


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["a GPU that waits", "a busy GPU"])
def test_steps_that_are_alike_reach_the_ring_like_any_other(is_waited_for: bool) -> None:
    """By one call of C: on the engine's own stream if the GPU is idle, else on the side stream."""
    held = tables(3, 576, 16, "bfloat16", max_tokens=256)
    settings = Settings(points=("post_block.0",), ring_mib=16)
    opened = open_ring(settings, held, max_requests=8, epoch=77)
    start_T = torch.arange(256, device="cuda")
    inputs = ForwardInputs(start_T.clone(), start_T.to(torch.int32))
    opened.publisher.prepare(inputs)
    builder, names, ones_R = (
        RowBuilder(load_step_extension()),
        ["r0", "r1", "r2"],
        np.ones(3, np.int32),
    )
    for index, name in enumerate(names):
        builder.add_request(name, RequestMark(index + 1, index), prompt_len=10)
    assert isinstance(opened.publisher, DevicePublisher)
    repeat, repeated = opened.publisher._repeat, list[bool]()

    def counted() -> bool:
        repeated.append(repeat())
        return repeated[-1]

    opened.publisher._repeat = counted
    ring, expected = RingCursor(opened.memory), []
    for number in range(1, 41):
        opened.publisher.begin_step()
        inputs.positions_T.copy_(start_T + number)
        held.scores_STK.normal_()
        if not is_waited_for:
            torch.cuda._sleep(4_000_000)  # clock ticks: about 2 ms
        rows_of = builder.build(StepBatch(names, ones_R, np.full(3, number - 1, np.int32)))
        assert opened.publisher.announce(rows_of, 5)
        opened.publisher.finish(lambda: inputs)
        expected.append(rows_of.fill(np.arange(3) + number, np.arange(3)))
        if is_waited_for:
            opened.publisher.flush()
            scores_TC = held.gather(3).cpu().numpy()
            (record,) = ring.poll()
            assert record.rows.tobytes() == expected[-1].tobytes()
            assert np.array_equal(record.scores_RC, scores_TC)
    opened.publisher.flush()
    if not is_waited_for:
        records = ring.poll()
        assert [record.step for record in records] == [*range(1, 41)]
        assert np.concatenate([one.rows for one in records]).tobytes() == b"".join(
            one.tobytes() for one in expected
        )
    assert sum(repeated) >= (39 if is_waited_for else 6)  # eight steps behind, Python waits
    assert ring.statistics().lost == 0
    opened.close()


@pytest.mark.parametrize("home", ["host", "device"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_captured_graph_publishes_its_own_steps(is_busy: bool, home: str) -> None:
    """The host launches nothing; replays without a step, and steps without a replay, in between."""
    held = tables(3, 576, 16, "bfloat16", max_tokens=256)
    settings = Settings(points=("post_block.0",), ring_mib=16, ring_home=home)
    opened = open_ring(settings, held, 8, epoch=77)
    publisher, forwards, ring = opened.publisher, opened.forwards, RingCursor(opened.memory)
    assert forwards is not None
    positions_T, scores = torch.zeros(256, device="cuda", dtype=torch.int64), held.scores_STK
    inputs = ForwardInputs(positions_T, torch.arange(256, device="cuda", dtype=torch.int32))
    forwards.forward_ran(lambda: inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions_T.add_(1)
        scores.add_(1.0)
        forwards.capture_publish(3)
    builder, names, ones_R = (
        RowBuilder(load_step_extension()),
        ["r0", "r1", "r2"],
        np.ones(3, np.int32),
    )
    for index, name in enumerate(names):
        builder.add_request(name, RequestMark(index + 1, index), prompt_len=10)
    expected = []
    for number in range(1, 61):
        publisher.begin_step()
        if is_busy:
            torch.cuda._sleep(2_000_000)
        if number % 7 == 0:  # a forward of no request
            publisher.before_dummy_run()
            graph.replay()
            publisher.after_dummy_run()
        rows_of = builder.build(StepBatch(names, ones_R, np.full(3, number - 1, np.int32)))
        assert publisher.announce(rows_of, 5)
        if number % 5:
            graph.replay()
        else:
            positions_T.add_(1)
            scores.add_(1.0)
            forwards.forward_ran(lambda: inputs)
        publisher.finish(lambda: inputs)
        expected.append(number + number // 7)
    publisher.flush()
    records = ring.poll(1 << 20)
    assert [record.step for record in records] == [*range(1, 61)]
    assert [record.rows["position"].tolist() for record in records] == [[n] * 3 for n in expected]
    assert all((record.scores_RC == n).all() for record, n in zip(records, expected, strict=True))
    opened.close()
