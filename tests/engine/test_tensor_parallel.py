"""Several ranks, in processes of their own beside the engine core's: each steers, one speaks.

The tests run in this order, on one engine for each layout; the last one kills a rank.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.fields.request_fields import new_stream_id
from clairai.library.engine_control import ask_engine
from clairai.points import Point
from clairai.ring.attach import RingReader
from clairai.vector.safetensors_format import dumps
from clairai.wire import control_messages
from tests.engine import (
    asks,
    attribution,
    capturing,
    expert_map,
    models,
    ray_cluster,
    steering,
)
from tests.engine.hooked import TOLERANCE, error_of, positions
from tests.engine.installed_plugin import InstalledPlugin
from tests.engine.process import EngineProcess
from tests.engine.steering import Ask
from tests.fidelity.oracle import hidden_states, relative_error
from tests.fidelity.steered import Change, Floats, Gated, streams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

WIDTH: Final = 64
PROMPT: Final = tuple(range(10, 60))  # more than a step
OTHER: Final = tuple(range(100, 140))
NUM_STEPS: Final = 8  # until a rank is killed: the prompt takes two
LOAD: Final = attribution.Plan(
    num_requests=40, num_at_once=8, max_prompt=70, max_new=30, seed=3, max_rounds=20
)


def _row(seed: int) -> Floats:
    row = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return row.astype(np.float64)


ROWS: Final = {"post_block.1": _row(1), "post_attn.2": _row(2)}
GATE_D: Final = _row(3)


@dataclass(frozen=True)
class Layout:
    """A model, and how it is spread over ranks."""

    architecture: str
    ranks: int
    shape: dict[str, int]
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def uses_ray(self) -> bool:
        return self.arguments.get("distributed_executor_backend") == "ray"


# Four heads, so that four ranks have one each; the CPU kernels take no smaller ones.
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
VOCABULARY: Final = {"vocab_size": 32000}  # attribution draws from it
BY_RAY: Final = {"distributed_executor_backend": "ray"}
LAYOUTS: Final = {
    "tensor-2": Layout("llama", 2, VOCABULARY | HEADS),
    "expert-2": Layout(
        "olmoe", 2, VOCABULARY | {"num_key_value_heads": 2}, {"enable_expert_parallel": True}
    ),
    "tensor-4": Layout("llama", 4, VOCABULARY | HEADS),
    # Each rank on a node of its own.
    "ray-2": Layout("llama", 2, VOCABULARY | HEADS, BY_RAY),
    "ray-graph-2": Layout(
        "llama", 2, VOCABULARY | HEADS, BY_RAY, {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}
    ),
}
NEEDS_RAY: Final = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: `make ray` has it"
)
MARKS: Final = {
    "expert-2": [pytest.mark.layouts],
    "tensor-4": [pytest.mark.layouts],
    "ray-2": [pytest.mark.ray, NEEDS_RAY],
    "ray-graph-2": [pytest.mark.ray, NEEDS_RAY],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, [])) for name in LAYOUTS],
)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def model(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel") / layout.architecture
    return models.tiny(layout.architecture, folder, **layout.shape)


@pytest.fixture(scope="module")
def threshold(model: Path) -> float:
    """About half of the tokens are above it."""
    states_TD = hidden_states(str(model), [*PROMPT, *OTHER])["post_block.0"]
    return float(np.median(states_TD.astype(np.float64) @ GATE_D))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory, layout: Layout) -> InstalledPlugin:
    """What vLLM's CPU build lacks for a layout."""
    entry = ray_cluster.PLATFORM_ENTRY if layout.uses_ray else expert_map.ENTRY
    return InstalledPlugin(tmp_path_factory.mktemp("packages"), entry)


@pytest.fixture(scope="module")
def cluster(layout: Layout, plugins: InstalledPlugin) -> Iterator[dict[str, str]]:
    """The variables by which an engine finds its cluster of two nodes, if it needs one."""
    if not layout.uses_ray:
        yield {}
        return
    nodes = ray_cluster.make_device_nodes(1, 1)
    with ray_cluster.run_cluster(nodes, paths=(plugins.path,)) as found:
        yield found.engine_variables


@pytest.fixture(scope="module")
def parallel(
    layout: Layout,
    model: Path,
    runtime: Path,
    plugins: InstalledPlugin,
    cluster: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    with EngineProcess(
        runtime=runtime,
        plant=plugins,
        start_s=900,  # four ranks on two cores
        environment={
            **cluster,
            **layout.environment,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[rank % 2] for rank in range(layout.ranks)),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the tests send functions to the ranks
        },
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=32,
        num_gpu_blocks_override=9,  # four requests of the load below need more
        tensor_parallel_size=layout.ranks,
        **layout.arguments,
        additional_config=clairai.config(
            points=["all"],
            capacity=8,
            steering=True,
            capture={"folder": str(tmp_path_factory.mktemp("parallel") / "store")},
        ),
    ) as engine:
        points = {Point.parse(point): row.astype(np.float32) for point, row in ROWS.items()}
        engine.call(steering.put, [dumps(clairai.Vector("v", points))])
        if layout.uses_ray:
            assert len({*engine.call(_on_ranks, _node)}) == layout.ranks
        yield engine


@pytest.fixture(scope="module")
def gated(parallel: EngineProcess, threshold: float) -> EngineProcess:
    """The engine with the probe that gates and rules use."""
    gate = clairai.Probe(
        "g", Point.parse("post_block.0"), GATE_D.astype(np.float32), threshold=threshold
    )
    parallel.call(steering.add_probes, [gate])
    return parallel


def test_no_row_lands_on_another_request(parallel: EngineProcess) -> None:
    verdict = parallel.call(attribution.run, LOAD)
    assert verdict.wrong == []
    assert (verdict.unaccounted, verdict.lost) == (0, 0)
    # The load really was what it claims to be.
    assert verdict.rows > 1_000
    assert verdict.cached_tokens > 0, "no prefix-cache hit"
    assert verdict.recomputed_rows > 0, "nothing was preempted"
    assert verdict.aborted > 0


def test_scores_are_those_of_one_process(parallel: EngineProcess, model: Path) -> None:
    points = [f"{kind}.{layer}" for kind in ("post_attn", "post_block") for layer in (0, 2)]
    directions = {point: _row(10 + index) for index, point in enumerate(points)}
    found = parallel.call(_score_prompts, directions, [list(PROMPT), list(OTHER)])
    for prompt, scores in zip((PROMPT, OTHER), found, strict=True):
        truth = hidden_states(str(model), list(prompt))
        for point, direction_D in directions.items():
            expected_T = truth[point].astype(np.float64) @ direction_D
            lengths_T = np.linalg.norm(truth[point], axis=1) * np.linalg.norm(direction_D)
            errors_T = np.abs(scores[point] - expected_T) / lengths_T
            assert np.quantile(errors_T, 0.999) <= 1e-5


def test_gates_are_the_same_on_all_ranks_and_those_of_a_reference(
    gated: EngineProcess, layout: Layout, model: Path, threshold: float
) -> None:
    latched = {"vector": "v", "gate": {"probe": "g", "latch": True}}
    soft = {"vector": "v", "gate": {"probe": "g", "sharpness": 3.0}}
    asks = [Ask(PROMPT, (latched,)), Ask(OTHER, (soft,)), Ask(OTHER)]
    answers = gated.call(steering.answer, asks)
    gate = Gated("post_block.0", GATE_D, threshold)
    always = positions(0)
    changes = [
        [Change("add", ROWS, always, gate=Gated(gate.point, GATE_D, threshold, latch=True))],
        [Change("add", ROWS, always, gate=Gated(gate.point, GATE_D, threshold, sharpness=3.0))],
        [],
    ]
    for ask, answer, change in zip(asks, answers, changes, strict=True):
        assert error_of(model, ask, answer, change) <= TOLERANCE
    first, *others = [np.frombuffer(one, np.float32) for one in gated.call(_on_ranks, _gates)]
    assert len(others) == layout.ranks - 1
    # Of two numbers the sum is the same in any order; of more it is rounded differently.
    bound = 0.0 if layout.ranks == 2 else 1e-5
    assert max(np.abs(first - other).max() for other in others) <= bound
    assert first.any()


def test_a_rule_ends_an_answer_whose_scores_come_from_another_process(
    gated: EngineProcess,
) -> None:
    rule = {"probe": "g", "threshold": -1e9, "tokens": 3}
    (answer,) = gated.call(steering.answer, [Ask(PROMPT, stop=(rule,))])
    assert len(answer.token_ids) == 4
    assert answer.stop_reason == "clairai: probe g >= -1e+09 for 3 tokens"


def test_all_ranks_take_up_a_change_in_the_same_step(gated: EngineProcess, model: Path) -> None:
    rule = {"probe": "g", "threshold": -1e9, "action": "steer", "steer": [{"vector": "v"}]}
    ask = Ask(PROMPT, stop=(rule,))
    (answer,) = gated.call(steering.answer, [ask])
    # The first generated token crosses; the second is sampled with it, the third is changed.
    change = Change("add", ROWS, positions(len(PROMPT) + 2))
    assert error_of(model, ask, answer, [change]) <= TOLERANCE


def test_rows_are_captured_once_and_with_the_steering_that_came_on_the_way(
    gated: EngineProcess, model: Path
) -> None:
    rule = {"probe": "g", "threshold": -1e9, "action": "steer", "steer": [{"vector": "v"}]}
    asks = [
        capturing.Ask(PROMPT, True, fields={"stop": [rule]}),
        capturing.Ask(OTHER, {"points": ["post_block.3"], "positions": "generated"}),
    ]
    (amended,), (plain,) = gated.call(capturing.capture, asks)
    changes = [Change("add", ROWS, positions(len(PROMPT) + 2))]
    for ask, found, change in zip(asks, (amended, plain), (changes, []), strict=True):
        tokens = [*ask.prompt, *found.token_ids]
        assert found.tokens == tuple(tokens[at] for at in found.positions)
        truth = streams(str(model), tokens, change)
        for point, rows in found.rows.items():
            wanted = truth[point][list(found.positions)].astype(np.float32)
            assert np.quantile(relative_error(rows, wanted), 0.999) <= 1e-5
    # A step that was on its way when the answer ended may have forwarded its last token, too.
    assert amended.positions[:61] == (*range(61),)
    assert plain.positions[:11] == (*range(40, 51),)
    assert len(amended.rows) == 12
    (applied,) = amended.stored["steering"]["applied"]
    assert applied["when"]["positions"] == [[len(PROMPT) + 2, None]]
    assert plain.stored["steering"] == {}


def test_a_rank_that_is_killed_ends_the_engine_and_leaves_no_wrong_row(
    parallel: EngineProcess,
) -> None:
    *_, victim = parallel.call(_on_ranks, _pid)
    error, tokens, rows = parallel.call(_kill_while_it_runs, victim)
    assert error == "EngineDeadError"
    # A row for each forwarded token at most, of this request, with the token that was there.
    assert [position for position, _ in rows] == [*range(len(rows))]
    assert len(PROMPT) <= len(rows) < len(PROMPT) + NUM_STEPS
    known = [(position, token) for position, token in rows if position < len(tokens)]
    assert known == [(position, tokens[position]) for position, _ in known]


def _kill_while_it_runs(llm: Any, victim: int) -> tuple[str, list[int], list[tuple[int, int]]]:
    """What a caller is told, the tokens it got, and the rows that were published."""
    from vllm import SamplingParams

    engine, stream = llm.llm_engine, new_stream_id()
    described = ask_engine(llm, control_messages.Describe(), control_messages.Description)
    llm.collective_rpc(_plant_death, args=(victim,))
    tokens = list(PROMPT)
    with RingReader.attach(Path(described.socket), start="newest") as reader:
        params = SamplingParams(
            max_tokens=60,
            ignore_eos=True,
            detokenize=False,
            extra_args=clairai.request(stream=stream, prompt_scores=True),
        )
        engine.add_request("cut off", {"prompt_token_ids": tokens.copy()}, params)
        said = _step_to_the_end(engine, tokens)
        rows = np.concatenate([record.rows for record in reader.poll()])
    ours = rows[(rows["stream"] == stream) & (rows["span"] == 1)]
    return said, tokens, [(int(row["position"]), int(row["token_id"])) for row in ours]


def _plant_death(worker: Any, victim: int) -> None:
    """Let the victim be killed when it begins a step of an answer that has many more.

    From outside nobody would know in which step: the ranks do not wait for the LLM's process.
    """
    if os.getpid() != victim:
        return
    runner, steps = worker.model_runner, list[int]()
    execute = runner.execute_model

    def execute_or_die(*args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        if len(steps) == NUM_STEPS:
            os.kill(victim, signal.SIGKILL)
        return execute(*args, **kwargs)

    runner.execute_model = execute_or_die


def _step_to_the_end(engine: Any, tokens: list[int]) -> str:
    """The error that ends the request, if one does; `tokens` grows on the way."""
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[len(PROMPT) :] = output.outputs[0].token_ids
    except Exception as error:
        return type(error).__name__
    return "finished"


def _node(_: Any) -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _pid(_: Any) -> int:
    return os.getpid()


def _score_prompts(llm: Any, directions: dict[str, Floats], prompts: list[list[int]]) -> Any:
    bank = clairai.ProbeBank(llm)
    probes = [
        clairai.Probe(point, Point.parse(point), row_D.astype(np.float32))
        for point, row_D in directions.items()
    ]
    bank.add(*probes)
    outputs = asks.generate(llm, prompts, extra=clairai.request(prompt_scores=True))
    found = [
        {point: scores[point][: len(prompt)] for point in directions}
        for prompt, (scores,) in zip(prompts, clairai.scores(llm, outputs), strict=True)
    ]
    bank.remove(*directions)
    return found


def _on_ranks(llm: Any, what: Any) -> list[Any]:
    found: list[Any] = llm.collective_rpc(what)
    return found


def _gates(worker: Any) -> bytes:
    tables = worker.clairai_steer_tables
    kept: bytes = tables.state_ZG.numpy().tobytes() + tables.gates_TG.numpy().tobytes()
    return kept
