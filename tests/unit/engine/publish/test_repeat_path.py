"""While the same requests decode, C does what all listeners together would have done.

Two engines run the same steps; one has C for steps that are alike, the other has none.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.engine.publish.header_layout import StepCounters
from clairai.engine.publish.repeat_path import RepeatPath
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_header import StepHeaders
from tests.support.probes import probe
from tests.support.repeat_engine import V1, V2, Engine, engine
from tests.support.toy_publisher import SECOND


def decode(one: Engine, steps: int, who: str = "ab") -> None:
    for _ in range(steps):
        one.step(dict.fromkeys(who, 1))
        one.gpu.publish(1)


def steps_read(one: Engine) -> list[int]:
    return [read["head"]["step"] for read in one.gpu.read]


def placed(one: Engine) -> list[int]:
    """Where the first request was in the steps that listeners heard of."""
    return [word[2][0] for word in one.other.take() if word[0] == "place"]


@pytest.mark.parametrize("runner", [V1, V2])
def test_listeners_hear_of_steps_only_until_they_are_alike(runner: type[Engine]) -> None:
    with engine(runner=runner) as one, engine(has_c=False, runner=runner) as other:
        for each in (one, other):
            decode(each, 6)
        assert placed(one) == [0]
        assert placed(other) == [0, 1, 2, 3, 4, 5]
        assert one.read() == other.read()
        assert steps_read(one) == [1, 2, 3, 4, 5, 6]


def test_one_listener_that_cannot_skip_has_all_of_them_called() -> None:
    with engine() as one:
        one.other.skips = False
        decode(one, 3)
        assert placed(one) == [0, 1, 2]
        one.other.skips = True
        decode(one, 3)
        assert placed(one) == [3]


def test_a_request_that_comes_or_goes_is_heard_of() -> None:
    with engine() as one:
        decode(one, 3, "ab")
        decode(one, 3, "abc")
        one.step({"a": 1, "c": 1}, finished=("b",))
        # The step in which b has finished is not like the one after it.
        decode(one, 3, "ac")
        begun = [word for word in one.other.take() if word[0] == "begin"]
        assert begun == [("begin", ["a", "b"], []), ("begin", ["c"], []), ("begin", [], ["b"]),
                        ("begin", [], [])]  # fmt: skip


def test_a_step_that_has_only_finished_requests_has_a_number_of_its_own() -> None:
    with engine() as one:
        decode(one, 3, "ab")
        one.step({}, finished=("a", "b"))
        decode(one, 2, "c")
        assert steps_read(one) == [1, 2, 3, 4, 5, 6]


def test_a_change_of_steering_is_heard_of() -> None:
    with engine() as one:
        decode(one, 3, "a")
        one.other.take()
        one.carried = {"a": None}
        decode(one, 3, "a")
        assert one.other.take() == [
            ("begin", [], []),
            ("amend", "a", None),
            ("place", ["a"], [3]),
            "end",
        ]


def test_a_batch_in_another_order_is_heard_of_once_it_is_laid_out() -> None:
    with engine() as one:
        decode(one, 3, "ab")
        one.other.take()
        one.step({"b": 1, "a": 1})
        assert one.other.take() == [("place", ["b", "a"], [3, 3]), "end"]
        assert steps_read(one) == [1, 2, 3, 4]


def test_an_argument_passed_by_name_is_understood() -> None:
    with engine() as one:
        decode(one, 3, "a")
        one.other.take()
        assert one.execute_model(scheduler_output=one.scheduled({"a": 1})) == "state"
        assert placed(one) == [3]
        assert steps_read(one) == [1, 2, 3, 4]


def test_a_warm_up_between_two_steps_is_not_published() -> None:
    with engine() as one:
        decode(one, 3, "a")
        assert one.execute_model(one.scheduled({"a": 1}), dummy_run=True) == "dummy"
        decode(one, 2, "a")
        assert placed(one) == [0]
        assert steps_read(one) == [1, 2, 3, 4, 5]


def test_a_repeated_step_whose_forward_was_no_graph_is_published_by_a_launch() -> None:
    with engine() as one:
        decode(one, 4)
        one.is_graph = False
        decode(one, 2)
        one.is_graph = True
        decode(one, 3)
        assert [call[0] for call in one.gpu.queued].count("launch") == 2
        assert steps_read(one) == [*range(1, 10)]


def test_a_step_without_tokens_publishes_nothing_and_changes_nothing() -> None:
    with engine() as one:
        decode(one, 3)
        one.step({})
        decode(one, 2)
        assert placed(one) == [0]
        assert steps_read(one) == [1, 2, 3, 4, 5]


def test_a_gpu_that_is_behind_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All headers are taken: C has none to write, and leaves the step as it was."""
    with engine() as one:
        for _ in range(8):
            one.step({"a": 1})
        monkeypatch.setattr(
            "clairai.engine.publish.step_header._wait_for", lambda _: one.gpu.publish(1)
        )
        one.step({"a": 1})
        assert placed(one) == [0, 8]
        assert steps_read(one) == [*range(1, 10)]
        *_, flagged = one.read()[-1]["requests"]
        assert (
            flagged == 0
        )  # had C counted the step too, its row would be flagged as one seen before


def test_a_step_that_needs_room_in_the_ring_is_python_s_and_those_after_it_are_not() -> None:
    """A limit of four records, then of another four: one record is one step here."""
    asked: dict[bool, list[tuple[int, int]]] = {}
    for has_c in (True, False):
        with engine(has_c=has_c) as one:
            calls = asked[has_c] = []
            one.publisher.set_limit(lambda *given, to=calls: to.append(given) or sum(given) + 3)
            decode(one, 10)
            assert steps_read(one) == [*range(1, 11)]
            assert one.publisher.published == 10
            if has_c:
                assert placed(one) == [0, 4, 8]
    assert asked[True] == asked[False] == [(0, 1), (4, 1), (8, 1)]


def test_a_bank_that_is_installed_in_between_scores_the_next_step() -> None:
    with engine() as one:
        decode(one, 3)
        one.step_publisher.install(one.step_publisher.bank.add([probe("new", point=SECOND)]))
        decode(one, 3)
        versions = [read["head"]["epoch_and_bank"] >> 32 for read in one.gpu.read]
        assert versions == [0, 0, 0, 1, 1, 1]


def test_before_any_step_there_is_none_to_repeat() -> None:
    ones_R, counters = np.ones(1, np.int32), StepCounters()
    assert not RepeatPath(load_step_extension(), counters).repeat(["a"], ones_R, ones_R)


@pytest.mark.parametrize("name", ["execute_model", "prepare_inputs"])
def test_what_the_runner_raises_is_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(V2, name, broken)
    with engine() as one:
        one.come["a"], one.step_publisher.repeat_path.is_on = 0, True
        with pytest.raises(RuntimeError, match="CUDA error"):
            one.step({"a": 1})


@pytest.mark.parametrize("gone", ["scheduled_new_reqs", "finished_req_ids"])
def test_a_scheduler_without_its_lists_of_new_and_finished_requests_is_an_error(gone: str) -> None:
    with engine() as one:
        decode(one, 2, "a")
        scheduled = one.scheduled({"a": 1})
        delattr(scheduled, gone)
        with pytest.raises(AttributeError, match=gone):
            one.execute_model(scheduled)


def test_a_repeated_step_keeps_nothing_of_its_batch() -> None:
    with engine() as one:
        decode(one, 3, "a")
        batch = one.lay_out(one.scheduled({"a": 1}))
        assert one.step_publisher.repeat_path.is_on
        watched = [
            weakref.ref(batch.num_scheduled_tokens),
            weakref.ref(batch.num_computed_tokens_np),
        ]
        del batch
        assert [each() for each in watched] == [None, None]


def test_an_engine_that_is_gone_leaves_nothing_behind() -> None:
    with engine() as one:
        decode(one, 3)
        methods = [vars(one)[name] for name in ("execute_model", "prepare_inputs")]
        assert all(inspect.isbuiltin(method) for method in methods)
        of_engine, of_path = weakref.ref(one), weakref.ref(one.step_publisher.repeat_path)
        del one, methods
    gc.collect()
    assert (of_engine(), of_path()) == (None, None)


def test_a_wrapped_method_keeps_what_it_writes_to() -> None:
    headers = StepHeaders(1, 1)
    path = RepeatPath(load_step_extension(), headers.counters, headers)
    method = path.wrap_execute_model(print, print, print, ("one", "two", "three"))
    watched = weakref.ref(headers)
    del headers, path
    gc.collect()
    assert watched() is not None
    del method
    assert watched() is None


@pytest.mark.parametrize("name", ["wrap_execute_model", "wrap_prepare_inputs"])
def test_what_a_wrapper_is_given_is_checked(name: str) -> None:
    wrap = getattr(load_step_extension(), name)
    with pytest.raises(TypeError, match="three names of attributes are wanted"):
        wrap(print, print, print, ("one", "two"), 0, None)


# Of some steps: what they are, who is in them, how many, and how much is published after each.
SCRIPT = st.lists(
    st.tuples(
        st.sampled_from(["graph", "graph", "graph", "python", "dummy", "empty", "bank", "weights"]),
        st.sampled_from(["a", "ab", "ba", "abc", "abcd"]),
        st.integers(1, 12),
        st.sampled_from([1, 1, 1, 2, 100]),
        st.sampled_from(["", "", "a", "c"]),
        st.integers(0, 3),
    ),
    max_size=10,
)


@given(SCRIPT)
@pytest.mark.parametrize("runner", [V1, V2])
def test_what_the_gpu_reads_does_not_depend_on_who_wrote_it(
    runner: type[Engine], script: list[tuple[str, str, int, int, str, int]]
) -> None:
    with engine(runner=runner) as short, engine(has_c=False, runner=runner) as long:
        for one in (short, long):
            for kind, who, times, count, gone, published in script:
                play(one, kind, who, times, count, gone, published)
        assert short.read() == long.read()
        assert short.publisher.published == long.publisher.published
        assert short.publisher.last_step == long.publisher.last_step


def play(
    one: Engine, kind: str, who: str, times: int, count: int, gone: str, published: int
) -> None:
    one.is_graph = kind != "python"
    if kind == "bank":
        one.gpu.publish(len(one.gpu.pending))  # it is waited for
        one.step_publisher.install(one.step_publisher.bank)
    if kind == "weights":
        one.gpu.publish(len(one.gpu.pending))
        one.step_publisher.set_weights_version((one.step_publisher.weights or 0) + 1)
    for _ in range(times):
        if kind == "dummy":
            one._dummy_run(3)
        one.step({} if kind == "empty" else dict.fromkeys(who, count))
        one.gpu.publish(published if len(one.gpu.pending) < 5 else 5)
    if gone in one.come:
        one.step({}, finished=(gone,))
        one.gpu.publish(1)
