"""step.c is compiled with the layout that Python has, and checks what it is called with."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from clairai.engine.publish import header_layout, step_extension
from clairai.engine.publish.header_layout import HeaderHead, StepCounters
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_header import StepHeaders


@pytest.mark.parametrize("name", ["repeat_header", "is_same_batch", "repeat_step", "launch"])
def test_a_call_without_its_arguments_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match=r"5 arguments were given, [134] are wanted"):
        getattr(load_step_extension(), name)(0, 0, 0, 0, 0)


def test_without_a_compiler_there_is_no_extension_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert load_step_extension.__wrapped__() is None
    assert "no C compiler found" in caplog.text


def test_every_field_is_one_word_in_python_and_in_c() -> None:
    for struct, names in (
        (HeaderHead, header_layout.HEADER_FIELDS),
        (StepCounters, header_layout.COUNTER_FIELDS),
    ):
        assert ctypes.sizeof(struct) == 8 * len(names)
        assert [getattr(struct, name).offset for name in names] == [*range(0, 8 * len(names), 8)]


def test_no_number_of_the_layout_is_typed_in_c() -> None:
    source = step_extension.SOURCE.read_text()
    for name in header_layout.c_definitions():
        assert name in source
        assert f"#define {name}" not in source


def test_c_writes_the_fields_that_python_reads() -> None:
    headers = StepHeaders(max_requests=2, max_tokens=3)
    counters, (first, second, *_) = headers.counters, headers.all
    counters.shape = counters.sent = 1
    counters.published, counters.step, counters.num_records = 5, 7, 2
    first.head.shape, first.head.num_rows, first.head.number, first.head.in_graph = 1, 3, 1, 1
    assert load_step_extension().repeat_header(ctypes.addressof(counters))
    assert (counters.sent, counters.published, counters.step) == (2, 7, 8)
    head = second.head
    assert (head.number, head.first_seq, head.step, head.num_rows) == (2, 5, 8, 3)
    assert (head.shape, head.in_graph, head.done) == (1, 1, 0)
    assert head.stamp_ns > 0
