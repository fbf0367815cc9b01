"""Listeners hear of every real step in order; CUDA graphs publish their own steps.

The model runner here is a toy; tests/engine uses vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.compat import step_hooks
from clairai.compat.extra_args import with_plans
from clairai.compat.failed_requests import FAILURES
from clairai.compat.step_hooks import publish_in_graphs, watch_forwards
from clairai.engine.publish.repeat_path import RepeatPath
from clairai.engine.side_stream import AfterTaps, NoSideStream
from clairai.engine.step import ForwardInputs, RequestErrors, RequestMark, StepBatch
from tests.support.repeat_engine import Other


class Model:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def compute_logits(self, hidden: str) -> str:
        self._events.append("logits")
        return f"logits of {hidden}"


class Runner:
    """Forwards, then makes logits if the step has any."""

    req_states = None

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.model = Model(self.events)
        self.input_buffers = SimpleNamespace(positions=torch.zeros(4), input_ids=torch.zeros(4))

    def prepare_inputs(self, scheduled: Any) -> Any:
        numbers = np.zeros(1, np.int32)
        return SimpleNamespace(
            req_ids=["a"],
            num_scheduled_tokens=numbers + scheduled.total_num_scheduled_tokens,
            num_computed_tokens_np=numbers,
        )

    def execute_model(self, scheduler_output: Any, *, dummy_run: bool = False) -> str:
        if not dummy_run:
            self.prepare_inputs(scheduler_output)
        self.events.append("forward")
        return "state"

    def sample_tokens(self, grammar: Any) -> str:
        if grammar != "no logits":
            self.model.compute_logits("hidden")
        self.events.append("sampled")
        return "tokens"

    def _dummy_run(self, num_tokens: int) -> None:
        self.events.append(f"dummy {num_tokens}")


class Listener(Other):
    """Notes what it hears among the events of the runner; it skips no step."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events, self.skips = events, False
        self.new: list[Any] = []  # requests of the last step

    def begin(self, new: Any, finished: Any) -> RequestErrors:
        self.new = list(new)
        self.events.append(("begin", len(new), list(finished)))
        return {}

    def place(self, batch: StepBatch) -> None:
        self.events.append(("place", int(batch.counts_R[0])))

    def end(self, inputs: Any) -> None:
        self.events.append("end")
        inputs()

    def before_dummy_run(self) -> None:
        self.events.append("before")

    def after_dummy_run(self) -> None:
        self.events.append("after")


@pytest.fixture
def engine() -> Runner:
    made = Runner()
    step_hooks.connect_listeners(made, [Listener(made.events)], RepeatPath())
    return made


def scheduled(num_tokens: int) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[], finished_req_ids=set(), total_num_scheduled_tokens=num_tokens
    )


def test_listeners_hear_of_a_step_from_its_start_to_its_forward(engine: Runner) -> None:
    assert engine.execute_model(scheduled(3)) == "state"
    assert engine.sample_tokens(None) == "tokens"
    assert engine.events[:2] == [("begin", 0, []), ("place", 3)]
    assert engine.events[2:] == ["forward", "end", "logits", "sampled"]


def test_the_scheduler_may_name_its_argument(engine: Runner) -> None:
    assert engine.execute_model(scheduler_output=scheduled(2)) == "state"
    assert engine.events[1] == ("place", 2)


def test_finished_requests_are_reported_at_the_next_step(engine: Runner) -> None:
    step = scheduled(1)
    step.finished_req_ids.add("b")
    engine.execute_model(step)
    assert engine.events[0] == ("begin", 0, ["b"])


def feature(modality: str, offset: int, embedded: list[bool] | None, length: int = 0) -> Any:
    """MultiModalFeatureSpec, as far as it is read."""
    is_embed = None if embedded is None else torch.tensor(embedded)
    place = SimpleNamespace(offset=offset, length=length or len(embedded or ()), is_embed=is_embed)
    return SimpleNamespace(modality=modality, mm_position=place)


@pytest.mark.parametrize(
    ("features", "media"),
    [
        ([], None),
        ([feature("image", 2, None, length=3)], [0, 0, 1, 1, 1]),
        # Tokens of text between the tiles of an image; a sound within a video.
        ([feature("image", 1, [False, True, False, True])], [0, 0, 1, 0, 1]),
        (
            [feature("video", 0, [True, False, True]), feature("audio", 0, [False, True, False])],
            [3, 2, 3],
        ),
        ([feature("smell", 1, [True])], [0, 4]),
        ([feature("image", 1, [False])], None),
    ],
)
def test_positions_that_are_no_text_are_read_from_a_new_request(
    features: list[Any], media: list[int] | None
) -> None:
    runner = Runner()
    listener = Listener(runner.events)
    step_hooks.connect_listeners(runner, [listener], RepeatPath())
    params = with_plans(None, RequestMark(7), "a", None, None)
    step = scheduled(9)
    step.scheduled_new_reqs.append(
        SimpleNamespace(
            req_id="a",
            prompt_token_ids=[1] * 9,
            sampling_params=SimpleNamespace(extra_args=params),
            mm_features=features,
        )
    )
    runner.execute_model(step)
    (found,) = listener.new
    assert (found.media if found.media is None else found.media.tolist()) == media


def test_a_dummy_run_is_no_step(engine: Runner) -> None:
    engine.execute_model(scheduled(5), dummy_run=True)
    engine.sample_tokens(None)
    engine._dummy_run(5)
    assert engine.events == ["forward", "logits", "sampled", "before", "dummy 5", "after"]


class SpeculatingRunner:
    """As V1 on a CPU: two requests, of 1 and 4 tokens; the last 3 of those are drafts."""

    speculative_config = "ngram"

    def __init__(self, sampled: list[list[int]]) -> None:
        self.events: list[Any] = []
        self._sampled = torch.tensor(sampled)
        self.positions = torch.tensor([7, 20, 21, 22, 23, 0])
        self.input_ids = SimpleNamespace(gpu=torch.zeros(6))
        ahead = np.array([7, 23], np.int32)  # as if all drafts of the step before stood
        self.input_batch = SimpleNamespace(
            num_reqs=2, req_ids=["a", "b"], vocab_size=100, num_computed_tokens_cpu=ahead
        )

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> None:
        del scheduler_output, num_scheduled_tokens

    def execute_model(self, scheduler_output: Any, *, dummy_run: bool = False) -> str:
        del dummy_run
        if scheduler_output.total_num_scheduled_tokens:
            self._prepare_inputs(scheduler_output, np.array([1, 4], np.int32))
            self.events.append("forward")
        return "state"

    def _dummy_run(self, num_tokens: int) -> None: ...

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        del logits, spec_decode_metadata
        return SimpleNamespace(sampled_token_ids=self._sampled)

    def sample_tokens(self, grammar: Any) -> Any:
        del grammar
        self._sample(None, None)
        self.events.append("drafted")
        return SimpleNamespace(tokens="tokens")


def speculated(num_tokens: int) -> Any:
    step = scheduled(num_tokens)
    step.scheduled_spec_decode_tokens = {"b": [4, 5, 6]}
    return step


class SpeculatingListener(Listener):
    def place(self, batch: StepBatch) -> None:
        assert batch.drafts_R is not None
        self.events.append(("place", batch.starts_R.tolist(), batch.drafts_R.tolist()))


@pytest.mark.parametrize(
    ("sampled", "rejected"),
    [
        ([[1, -1, -1, -1], [4, 9, -1, -1]], [0, 2]),
        ([[1, -1, -1, -1], [9, -1, -1, -1]], [0, 3]),
        ([[1, -1, -1, -1], [4, 5, 6, 7]], None),
        ([[-1, -1, -1, -1], [4, 5, 100, -1]], [0, 2]),  # what no vocabulary has is no token
    ],
)
def test_a_step_with_drafts_ends_when_the_sampler_has_judged_them_and_before_the_drafter(
    sampled: list[list[int]], rejected: list[int] | None
) -> None:
    """Positions are those that the forward reads, not those that the scheduler hoped for."""
    runner = SpeculatingRunner(sampled)
    step_hooks.connect_listeners(runner, [SpeculatingListener(runner.events)], RepeatPath())
    runner.execute_model(speculated(5))
    runner.sample_tokens(None)
    told = [] if rejected is None else [("reject", rejected)]
    expected = [("begin", 0, []), ("place", [7, 20], [0, 3]), "forward", *told, "end", "drafted"]
    assert runner.events == expected


def test_a_step_that_forwards_nothing_ends_without_a_sampler() -> None:
    runner = SpeculatingRunner([[1], [2]])
    step_hooks.connect_listeners(runner, [SpeculatingListener(runner.events)], RepeatPath())
    runner.execute_model(speculated(0))
    assert runner.events == [("begin", 0, []), "end"]


def test_what_fails_with_the_drafts_leaves_with_the_output_of_the_same_step() -> None:
    class Failing(SpeculatingListener):
        def reject(self, rejected_R: Any) -> None:
            raise ValueError(f"planted for {rejected_R}")

        def end_failed(self, batch: StepBatch | None) -> list[str]:
            return [] if batch is None else [batch.req_ids[1]]

    runner = SpeculatingRunner([[1, -1, -1, -1], [4, 9, -1, -1]])
    step_hooks.connect_listeners(runner, [Failing(runner.events)], RepeatPath())
    runner.execute_model(speculated(5))
    output = runner.sample_tokens(None)
    assert getattr(output, FAILURES) == {"b": "ValueError"}
    assert output.tokens == "tokens"


class DraftsOnDevice(Runner):
    """As V2: what is rejected is a tensor of the device."""

    speculative_config = "eagle"
    vllm_config = SimpleNamespace(
        max_concurrent_batches=2, speculative_config=SimpleNamespace(num_speculative_tokens=3)
    )

    def prepare_inputs(self, scheduled: Any) -> Any:
        del scheduled
        return SimpleNamespace(
            req_ids=["a", "b"],
            num_scheduled_tokens=np.array([1, 4], np.int32),
            num_computed_tokens_np=np.array([7, 23], np.int32),
            num_draft_tokens_per_req=np.array([0, 3], np.int32),
            prefill_len_np=np.array([9, 22], np.int32),
            query_start_loc=torch.tensor([0, 1, 5]),
        )

    def execute_model(self, scheduler_output: Any, *, dummy_run: bool = False) -> str:
        if not dummy_run:
            self.batch = self.prepare_inputs(scheduler_output)
        self.events.append("forward")
        return "state"

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        del hidden_states, input_batch, grammar_output
        return "output", torch.tensor([1, 2]), torch.tensor([0, 2])

    def sample_tokens(self, grammar: Any) -> Any:
        self.sample("hidden", self.batch, grammar)
        self.events.append("drafted")
        return SimpleNamespace(tokens="tokens")


class DeviceListener(Listener):
    def place(self, batch: StepBatch) -> None:
        assert batch.lowest_R is not None
        self.events.append(("place", batch.starts_R.tolist(), batch.lowest_R.tolist()))

    def end(self, inputs: Any) -> None:
        drafts = inputs().drafts
        told = None if drafts is None else (drafts.starts_R.tolist(), drafts.rejected_R.tolist())
        self.events.append(("end", told))


def test_what_the_device_says_of_drafts_stays_there_until_the_step_is_published() -> None:
    runner = DraftsOnDevice()
    inputs = step_hooks.connect_listeners(runner, [DeviceListener(runner.events)], RepeatPath())
    runner.execute_model(scheduled(5), dummy_run=True)
    runner.execute_model(scheduled(5))
    runner.sample_tokens(None)
    runner.sample_tokens(None)  # as a warm-up of the sampler would: it belongs to no step
    placed = [("begin", 0, []), ("place", [7, 23], [7, 22]), "forward"]
    ended = [("end", ([0, 1, 5], [0, 2])), "drafted", "drafted"]
    assert runner.events == ["forward", *placed, *ended]
    assert inputs().drafts is None


class TappedModel(torch.nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Runs a number of taps, each of three tokens."""

    def __init__(self, tail: AfterTaps, events: list[Any]) -> None:
        super().__init__()
        self._tail, self._events = tail, events

    def forward(self, num_taps: int) -> torch.Tensor:
        for at in range(num_taps):
            self._events.append(f"tap {at}")
            self._tail.tap_ran(3)
        self._events.append("last block")
        return torch.zeros(3, 8)


class Forwards:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def forward_ran(self, inputs: Callable[[], ForwardInputs]) -> None:
        self._events.append(f"forwarded {inputs()}")

    def capture_publish(self, num_tokens: int) -> None:
        self._events.append(f"publish {num_tokens}")

    def disable_graphs(self) -> None:
        self._events.append("disable graphs")


class GraphEngine:
    """Like vLLM: forwards, and graphs captured around them."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_capturing = False
        tail = AfterTaps(NoSideStream())
        self.model = TappedModel(tail, self.events)
        inputs: Any = lambda: "inputs"  # noqa: E731
        watch_forwards(self.model, inputs, tail, Forwards(self.events), lambda: self.is_capturing)

    def forward(self, num_taps: int = 2) -> list[Any]:
        self.events.clear()
        self.model(num_taps)
        return list(self.events)

    def capture(self, num_taps: int = 2) -> list[Any]:
        self.is_capturing = True
        events = self.forward(num_taps)
        self.is_capturing = False
        return events


@pytest.fixture
def graphs() -> GraphEngine:
    return GraphEngine()


def test_a_forward_that_runs_in_python_is_reported_when_it_ends(graphs: GraphEngine) -> None:
    assert graphs.forward() == ["tap 0", "tap 1", "last block", "forwarded inputs"]


def test_a_graph_publishes_as_soon_as_the_last_tap_has_run(graphs: GraphEngine) -> None:
    graphs.forward()
    assert graphs.capture() == ["tap 0", "tap 1", "publish 3", "last block"]
    assert graphs.capture() == ["tap 0", "tap 1", "publish 3", "last block"]


def test_replayed_pieces_run_no_taps_and_do_not_lower_the_count(
    graphs: GraphEngine,
) -> None:
    graphs.forward()
    assert graphs.forward(num_taps=0) == ["last block", "forwarded inputs"]
    assert graphs.capture() == ["tap 0", "tap 1", "publish 3", "last block"]


def test_a_graph_before_any_forward_disables_publishing_in_graphs(graphs: GraphEngine) -> None:
    assert graphs.capture() == ["tap 0", "tap 1", "last block", "disable graphs"]


@pytest.mark.parametrize(("num_taps", "is_published"), [(1, False), (3, True)])
def test_a_graph_with_other_taps_disables_publishing_in_graphs(
    graphs: GraphEngine, num_taps: int, is_published: bool
) -> None:
    """It would publish too early: a tap would not have run yet."""
    graphs.forward()
    events = graphs.capture(num_taps)
    assert ("publish 3" in events) is is_published
    assert events[-1] == "disable graphs"


class NotedAfterTaps(AfterTaps):
    """Notes whether it stays on the main stream."""

    is_in_line = False

    def stay_on_main_stream(self) -> None:
        self.is_in_line = True


def published(model: TappedModel, tapped: str = "pre_attn.1") -> str:
    """How the graphs of a model with two blocks publish."""
    tail = NotedAfterTaps(NoSideStream())
    tables: Any = SimpleNamespace(tail=tail, sites=("pre_attn.0", tapped))
    runner, inputs = SimpleNamespace(get_model=lambda: model), SimpleNamespace()
    publish_in_graphs(runner, inputs, tables, Forwards([]), "post_block.1")  # type: ignore[arg-type]
    if not (model._forward_hooks and model._forward_pre_hooks):
        return "not"
    return "in line" if tail.is_in_line else "beside"


@pytest.fixture
def model() -> TappedModel:
    made = TappedModel(AfterTaps(NoSideStream()), [])
    made.weight = torch.nn.Parameter(torch.zeros(1000))
    return made


@pytest.mark.parametrize("tapped", ["pre_attn.1", "post_block.1"])
def test_graphs_of_a_small_model_publish_on_the_main_stream(
    model: TappedModel, tapped: str
) -> None:
    assert published(model, tapped) == "in line"


@pytest.mark.parametrize(("tapped", "how"), [("pre_attn.1", "beside"), ("post_block.1", "not")])
def test_graphs_of_a_large_model_publish_on_a_side_stream(
    model: TappedModel, tapped: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_hooks, "LARGE_MODEL_BYTES", 4000)
    assert published(model, tapped) == how


def test_a_model_whose_graphs_can_split_gets_no_hooks(
    model: TappedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert published(model) == "not"


def test_a_model_that_is_compiled_with_its_hooks_gets_none(model: TappedModel) -> None:
    model._compiled_call_impl = model._call_impl  # as Module.compile does
    assert published(model) == "not"
