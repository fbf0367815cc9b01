"""Requests get their stream, choice and plans, and no two unfinished ones share a stream."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.capture.capture_settings import CaptureSettings
from clairai.compat.admission import Admission, split_request_id
from clairai.compat.extra_args import MARK_KEY, read_mark
from clairai.engine.capture.capture_resolver import CaptureResolver, EngineShape
from clairai.engine.core_control import CoreControl
from clairai.engine.step import RequestMark
from clairai.errors import RequestError
from clairai.fields.request_fields import MAX_STREAM, request
from clairai.points import Point


@pytest.mark.parametrize(
    ("internal", "external", "expected"),
    [
        # one answer: {external}-{8 hex}
        ("0-abcdef12", "0", ("0-abcdef12", 0)),
        ("cmpl-1-abcdef12", "cmpl-1", ("cmpl-1-abcdef12", 0)),
        # n answers: {index}_{parent}
        ("3_0-abcdef12", "0", ("0-abcdef12", 3)),
        ("0_0-abcdef12", "0", ("0-abcdef12", 0)),
        ("127_cmpl-1-abcdef12", "cmpl-1", ("cmpl-1-abcdef12", 127)),
        # callers' ids that look like ours
        ("1_x-abcdef12", "1_x", ("1_x-abcdef12", 0)),
        ("2_1_x-abcdef12", "1_x", ("1_x-abcdef12", 2)),
        ("x-deadbeef-abcdef12", "x-deadbeef", ("x-deadbeef-abcdef12", 0)),
        ("5_x-deadbeef-abcdef12", "x-deadbeef", ("x-deadbeef-abcdef12", 5)),
        ("a.*b-abcdef12", "a.*b", ("a.*b-abcdef12", 0)),
        # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION: the caller's id as it is
        ("x", "x", ("x", 0)),
        ("3_x", "x", ("x", 3)),
        ("1_x", "1_x", ("1_x", 0)),
        ("2_1_x", "1_x", ("1_x", 2)),
        ("x-deadbeef", "x-deadbeef", ("x-deadbeef", 0)),
        ("4_x-deadbeef", "x-deadbeef", ("x-deadbeef", 4)),
        # not derived from one another: a request of its own
        ("warmup", None, ("warmup", 0)),
        ("3_warmup", None, ("3_warmup", 0)),
        ("3_warmup", "", ("3_warmup", 0)),
        ("3_other-abcdef12", "x", ("3_other-abcdef12", 0)),
        ("x-ABCDEF12", "x", ("x-ABCDEF12", 0)),
        ("-1_x", "x", ("-1_x", 0)),
    ],
)
def test_the_parent_and_the_choice_are_read_from_the_id(
    internal: str, external: str | None, expected: tuple[str, int]
) -> None:
    assert split_request_id(internal, external) == expected


ids = st.text("ab_-.0123456789", max_size=12) | st.text(max_size=8)
suffixes = st.none() | st.text("0123456789abcdef", min_size=8, max_size=8)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(ids.filter(bool), suffixes, st.none() | st.integers(0, 16383))
def test_any_id_that_vllm_makes_is_read_back(
    external: str, suffix: str | None, index: int | None
) -> None:
    parent = external if suffix is None else f"{external}-{suffix}"
    internal = parent if index is None else f"{index}_{parent}"
    assert split_request_id(internal, external) == (parent, index or 0)


class Params(SimpleNamespace):
    """The parts of vLLM's SamplingParams that are read here."""

    extra_args: dict[str, Any] | None
    skip_reading_prefix_cache: bool | None


class Admitted:
    """A request as the scheduler keeps it."""

    def __init__(self) -> None:
        self.finished = False

    def is_finished(self) -> bool:
        return self.finished


def params(**fields: Any) -> Params:
    return Params(extra_args=request(**fields), skip_reading_prefix_cache=None, n=1)


def incoming(given: Params, request_id: str = "0-abcdef12", external: str = "0") -> SimpleNamespace:
    return SimpleNamespace(
        request_id=request_id,
        external_req_id=external,
        sampling_params=given,
        prompt_token_ids=[1, 2, 3],
    )


def make_admission() -> Admission:
    """For an engine that does not steer."""
    return Admission(CoreControl(None, ()))


def admit(admission: Admission, given: SimpleNamespace) -> Admitted:
    """What EngineCore.preprocess_add_request does with one request."""
    entry, admitted = admission.prepare(given), Admitted()
    admission.accept(entry, admitted)
    return admitted


def mark_of(given: SimpleNamespace) -> RequestMark:
    return read_mark(given.sampling_params, given.request_id)[0]


def test_the_worker_reads_the_mark_the_engine_core_wrote() -> None:
    asked = incoming(params(stream=2**64 - 1), "3_chat-1-abcdef12", "chat-1")
    make_admission().prepare(asked)
    assert read_mark(asked.sampling_params, asked.request_id) == (
        RequestMark(2**64 - 1, 3),
        "chat-1",
    )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_the_mark_survives_a_copy(copied: Any) -> None:
    asked = incoming(params(stream=7))
    make_admission().prepare(asked)
    assert read_mark(copied(asked.sampling_params), "x") == (RequestMark(7, 0), "0")


def test_params_that_requests_share_are_never_written_to() -> None:
    shared = params(prompt_scores=True)
    before = copy.deepcopy(shared)
    admission, requests = (
        make_admission(),
        [incoming(shared, f"{i}-abcdef12", str(i)) for i in range(3)],
    )
    live = [admit(admission, asked) for asked in requests]
    assert shared == before
    assert len({mark_of(asked).stream for asked in requests}) == len(live)
    assert all(asked.sampling_params is not shared for asked in requests)


def test_the_check_of_shared_params_can_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy, "copy", lambda given: given)
    shared = params()
    before = copy.deepcopy(shared)
    make_admission().prepare(incoming(shared))
    assert shared != before


def test_prompt_scores_skip_the_prefix_cache_for_this_request_alone() -> None:
    shared, plain = params(prompt_scores=True), params()
    asked, other = incoming(shared), incoming(plain, "1-abcdef12", "1")
    admission = make_admission()
    admission.prepare(asked)
    admission.prepare(other)
    assert asked.sampling_params.skip_reading_prefix_cache is True
    assert shared.skip_reading_prefix_cache is None
    assert other.sampling_params.skip_reading_prefix_cache is None


def test_the_choices_of_a_request_share_its_stream() -> None:
    admission, shared = make_admission(), params()
    children = [incoming(shared, f"{index}_7-abcdef12", "7") for index in range(4)]
    live = [admit(admission, child) for child in children]
    marks = [mark_of(child) for child in children]
    assert len({mark.stream for mark in marks}) == 1
    assert [mark.choice for mark in marks] == [0, 1, 2, 3]
    other = incoming(shared, "0_8-abcdef12", "8")
    live.append(admit(admission, other))
    assert mark_of(other).stream != marks[0].stream


def test_derived_streams_are_valid_and_differ_between_engines() -> None:
    streams = set()
    for admission in (make_admission(), make_admission()):
        for number in range(100):
            asked = incoming(params(), f"{number}-abcdef12", str(number))
            admission.prepare(asked)
            assert 1 <= mark_of(asked).stream <= MAX_STREAM
            streams.add(mark_of(asked).stream)
    assert len(streams) == 200


USED = "stream 5 was used by a request that has ended"


def test_a_stream_is_refused_while_its_request_is_unfinished_and_afterwards() -> None:
    admission = make_admission()
    first = admit(admission, incoming(params(stream=5)))
    second = incoming(params(stream=5), "1-abcdef12", "1")
    untouched = second.sampling_params
    with pytest.raises(RequestError, match="stream 5 belongs to a request that is not finished"):
        admission.prepare(second)
    assert second.sampling_params is untouched
    first.finished = True
    with pytest.raises(RequestError, match=USED):
        admission.prepare(second)
    del first
    gc.collect()
    with pytest.raises(RequestError, match=USED):
        admission.prepare(second)


def test_the_choices_of_a_request_share_its_stream_although_the_first_have_ended() -> None:
    admission, shared = make_admission(), params(stream=5)
    for index in range(3):
        asked = incoming(shared, f"{index}_7-abcdef12", "7")
        admit(admission, asked).finished = True
        gc.collect()
        assert mark_of(asked) == RequestMark(5, index)
    with pytest.raises(RequestError, match=USED):
        admission.prepare(incoming(shared, "1_7-abcdef12", "7"))


def test_an_id_that_vllm_lets_a_caller_use_again_gets_another_stream() -> None:
    """With VLLM_DISABLE_REQUEST_ID_RANDOMIZATION the id is the caller's own."""
    admission, streams = make_admission(), []
    for _ in range(3):
        choices = [incoming(params(), f"{index}_same", "same") for index in range(2)]
        for admitted in [admit(admission, asked) for asked in choices]:
            admitted.finished = True
        assert len({mark_of(asked).stream for asked in choices}) == 1
        streams.append(mark_of(choices[0]).stream)
    assert len(set(streams)) == 3


def test_a_part_of_a_running_request_keeps_its_stream() -> None:
    """A prompt that comes in parts is added again under the same id."""
    admission, asked = make_admission(), [incoming(params(stream=5)) for _ in range(2)]
    running = [admit(admission, part) for part in asked]
    assert [mark_of(part).stream for part in asked] == [5] * len(running)


def test_a_request_that_vllm_refused_does_not_keep_its_stream() -> None:
    admission = make_admission()
    admission.prepare(incoming(params(stream=5)))  # and never admitted
    second = incoming(params(stream=5), "1-abcdef12", "1")
    admission.prepare(second)
    assert mark_of(second) == RequestMark(5, 0)


def test_a_stream_is_in_use_until_its_last_choice_has_finished() -> None:
    admission, shared = make_admission(), params(stream=5)
    first, last = (
        admit(admission, incoming(shared, f"{index}_7-abcdef12", "7")) for index in range(2)
    )
    first.finished = True
    with pytest.raises(RequestError, match="stream 5 belongs to a request that is not finished"):
        admission.prepare(incoming(params(stream=5), "8-abcdef12", "8"))
    last.finished = True
    with pytest.raises(RequestError, match=USED):
        admission.prepare(incoming(params(stream=5), "8-abcdef12", "8"))


def test_of_several_cores_each_captures_only_under_streams_that_were_drawn() -> None:
    """Another core may have a request with the stream that a caller chose."""
    shape = EngineShape((Point.parse("post_block.0"),), 1, 8, "float32", {})
    resolver = CaptureResolver(CaptureSettings.parse({"folder": "unused"}), shape)
    admission = Admission(CoreControl(None, ()), resolver, has_other_cores=True)
    with pytest.raises(RequestError, match="captured cannot choose its stream"):
        admission.prepare(incoming(params(stream=5, capture=True)))
    drawn = params()
    drawn.extra_args = {"clairai": {"stream": 5, "capture": True, "drawn": True}}
    admit(admission, incoming(drawn))
    admit(admission, incoming(params(stream=6), "1-abcdef12", "1"))
    admit(admission, incoming(params(capture=True), "2-abcdef12", "2"))


def test_a_caller_cannot_write_the_mark_itself() -> None:
    forged = params(stream=5)
    assert forged.extra_args is not None
    forged.extra_args[MARK_KEY] = [1, 2, "somebody else"]
    asked = incoming(forged)
    make_admission().prepare(asked)
    assert read_mark(asked.sampling_params, "x") == (RequestMark(5, 0), "0")


def test_other_extra_args_are_left_as_they_are() -> None:
    given = params(stream=5)
    given.extra_args = {"other": [1], **request(stream=5)}
    asked = incoming(given)
    make_admission().prepare(asked)
    extra = asked.sampling_params.extra_args
    assert {key: extra[key] for key in given.extra_args} == given.extra_args
    assert set(extra) - set(given.extra_args) == {MARK_KEY}


def test_a_request_without_any_extra_args_is_marked_too() -> None:
    asked = incoming(Params(extra_args=None, skip_reading_prefix_cache=None))
    make_admission().prepare(asked)
    assert mark_of(asked).stream >= 1


def test_bad_fields_are_refused_before_anything_is_written() -> None:
    given = Params(extra_args={"clairai": {"stream": 0}})
    asked = incoming(given)
    with pytest.raises(RequestError, match="from 1 to"):
        make_admission().prepare(asked)
    assert asked.sampling_params is given


@pytest.mark.parametrize("given", [None, Params(extra_args=None), Params(extra_args={})])
def test_a_request_that_was_not_admitted_here_gets_a_random_stream(given: object) -> None:
    marks = {read_mark(given, "warmup")[0] for _ in range(50)}
    assert len(marks) == 50
    assert {mark.choice for mark in marks} == {0}
    assert read_mark(given, "warmup")[1] == "warmup"
