"""The fuzzer finds what it looks for: each kind of bug is planted in a toy parser."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from clairai.errors import RequestError
from clairai.fields import json_fields
from tests.fuzz import run
from tests.fuzz.fuzzer import MEMORY_FLOOR, Finding, Fuzzer, shrink
from tests.fuzz.spans import JSON_VALUES, MSGPACK_VALUES, json_spans, msgpack_spans
from tests.fuzz.target import MAX_REASON, Target, grow_prefix

SEED = b'{"kind": "toy", "count": 3, "deep": {"items": [1, 2, 3], "name": "x"}}'


def toy(parse: Callable[[bytes], object]) -> Target:
    return Target("toy", parse, [SEED], find_spans=json_spans, values=JSON_VALUES)


def found_in(parse: Callable[[bytes], object], inputs: int = 3000) -> list[str]:
    return [finding.what for finding in Fuzzer(toy(parse), seed=1).run(inputs).findings]


def read(data: bytes) -> dict[str, object]:
    """A parser without a bug."""
    fields = json_fields.decode_json(data.decode(errors="replace"), what="toy")
    return dict(json_fields.read_object("toy", fields, ("kind", "count", "deep")))


def test_a_parser_without_a_bug_has_no_finding() -> None:
    assert found_in(read) == []


def test_another_exception_than_a_refusal_is_found() -> None:
    def parse(data: bytes) -> object:
        count = read(data).get("count")
        return 1 / count if isinstance(count, int) else None

    assert any(what.startswith("ZeroDivisionError") for what in found_in(parse))


def test_a_bug_behind_a_value_three_levels_deep_is_found() -> None:
    def parse(data: bytes) -> None:
        deep = read(data).get("deep")
        items = deep.get("items") if isinstance(deep, dict) else None
        assert not (isinstance(items, list) and len(items) == 2), "two items"

    assert any("two items" in what for what in found_in(parse, 20_000))


def test_an_answer_that_contradicts_another_is_found() -> None:
    def parse(data: bytes) -> None:
        fields = read(data)
        written = json.dumps(fields).replace("null", "0")  # forgets what None was
        assert json.loads(written) == fields

    assert any(what.startswith("AssertionError") for what in found_in(parse))


def test_an_input_that_takes_too_long_is_found() -> None:
    def parse(data: bytes) -> None:
        while read(data).get("count") is None:
            data = bytes(data)

    assert any(what.startswith("TooSlow") for what in found_in(parse, 600))


def test_an_input_that_takes_too_much_memory_is_found() -> None:
    def parse(data: bytes) -> object:
        is_changed = read(data).get("count") != 3
        return bytearray(MEMORY_FLOOR + len(SEED) * 4) if is_changed else None

    assert any("bytes of memory" in what for what in found_in(parse))


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("a" * MAX_REASON, "characters"),
        ("line\r\nforged: field", "cannot be printed"),
        ("lone \ud800", "cannot be printed"),
        (f"no file {tempfile.gettempdir()}/x", "path of this machine"),
        (f"no file {os.getcwd()}/x", "path of this machine"),
    ],
)
def test_a_refusal_that_says_too_much_is_found(reason: str, expected: str) -> None:
    def parse(data: bytes) -> None:
        if read(data).get("count") is None:
            raise RequestError(reason)

    assert any(expected in what for what in found_in(parse))


def test_a_warning_of_a_library_is_found() -> None:
    def parse(data: bytes) -> None:
        if read(data).get("count") is None:
            warnings.warn("overflow", RuntimeWarning, stacklevel=1)

    assert any(what.startswith("RuntimeWarning") for what in found_in(parse))


def test_equal_seeds_make_equal_runs() -> None:
    def inputs_of(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        Fuzzer(toy(read), seed, seen.append).run(500)
        return seen

    assert inputs_of(3) == inputs_of(3)
    assert inputs_of(3) != inputs_of(4)


def test_a_run_in_two_parts_is_the_run_as_a_whole() -> None:
    whole: list[bytes] = []
    parts: list[bytes] = []
    Fuzzer(toy(read), 3, whole.append).run(500)
    fuzzer = Fuzzer(toy(read), 3, parts.append)
    fuzzer.run(200)
    assert fuzzer.run(300).inputs == 500
    assert parts == whole


def test_inputs_that_reach_something_new_are_built_upon() -> None:
    def parse(data: bytes) -> None:
        """Each byte is looked at only once the one before it is right, in half of its bits."""
        half = [byte & 15 for byte in data[:5]]
        if half[:1] != [3]:
            raise RequestError("first")
        if half[1:2] != [9]:
            raise RequestError("second")
        if half[2:3] != [12]:
            raise RequestError("third")
        if half[3:4] != [6]:
            raise RequestError("fourth")
        if half[4:5] != [10]:
            raise RequestError("fifth")
        raise ZeroDivisionError

    # Chance alone needs 16**5 inputs, a million.
    outcome = Fuzzer(Target("toy", parse, [b"aaaaa"]), seed=0).run(60_000)
    assert [finding.what for finding in outcome.findings] == ["ZeroDivisionError: "]


def test_a_finding_is_made_shorter_and_stays_one() -> None:
    def parse(data: bytes) -> None:
        assert b"!" not in data

    finding = Finding("toy", "AssertionError: ", b"x" * 300 + b"!" + b"y" * 300)
    assert shrink(toy(parse), finding).data == b"!"


def test_a_worker_that_dies_is_a_finding_of_its_last_input(tmp_path: Path) -> None:
    class Dead:
        exitcode = -11

        @staticmethod
        def is_alive() -> bool:
            return False

    job = run.Job(0, {}, 1.0, 0, tmp_path)
    record = run.InputRecord(job.record)
    record.target = b"toy"
    record(b"the last")
    (report,) = run._read_report(job, Dead)
    assert report["target"] == "toy"
    assert bytes.fromhex(report["findings"][0]["data"]) == b"the last"
    assert run.merge([[report]])[0]["num_findings"] == 1


def test_inputs_are_shared_out_without_losing_any() -> None:
    targets = [toy(read), Target("other", read, [SEED], share=0.3)]
    shared = run.share_inputs(1000, targets, jobs=7)
    assert 1000 <= 7 * sum(shared.values()) < 1000 + 7 * len(targets)


def test_values_are_found_in_json_and_in_msgpack() -> None:
    texts = {SEED[span.start : span.end] for span in json_spans(SEED)}
    assert {b'"toy"', b"3", b"[1, 2, 3]", b'{"items": [1, 2, 3], "name": "x"}'} <= texts
    packed = msgspec.msgpack.encode({"a": [1, b"x" * 300, 2.5], "b": {"c": None}})
    values = {packed[span.start : span.end] for span in msgpack_spans(packed)}
    expected = ({"c": None}, None, 2.5, b"x" * 300, "a")
    assert {msgspec.msgpack.encode(value) for value in expected} <= values
    assert packed in values
    assert all(msgpack_spans(value) for value in MSGPACK_VALUES)


def test_a_length_before_the_head_follows_a_change_of_the_head() -> None:
    seed = (5).to_bytes(8, "little") + b"HEAD!" + b"tail"
    repair = grow_prefix(8)
    longer = seed[:8] + b"HEADER!" + b"tail"
    assert repair(seed, longer) == (7).to_bytes(8, "little") + longer[8:]
    assert repair(seed, seed[:-1]) == seed[:-1]
