"""Log lines have all that is useful, and nothing of a client or of the machine."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from clairai.proxy.observe import log_lines
from clairai.proxy.observe.log_lines import FIELDS, AccessLog, LogFormat, access_fields
from clairai.proxy.observe.observer import ChoiceResult, CompletionEnd

END = CompletionEnd(
    response_id="chatcmpl-1",
    model="/models/secret/path",
    route="/v1/chat/completions",
    outcome="done",
    seconds=1.23456,
    choices=(
        ChoiceResult(0, tokens=12, count=11, lost=0, finish_reason="stop", probes=()),
        ChoiceResult(1, tokens=8, count=5, lost=2, finish_reason="stop", probes=()),
    ),
    run="0123456789abcdef",
    first_token_seconds=0.12345,
)


@pytest.fixture(autouse=True)
def logging_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log_lines, "CLOSE_S", 60.0)  # every line is written before a test reads
    root, ours = logging.getLogger(), logging.getLogger(log_lines.LOGGER)
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


class Lines(list[str]):
    """What has been written, once everything is."""

    scribe: log_lines.ThreadedLogHandler

    def all(self) -> list[str]:
        self.scribe.close()
        return self


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Lines:
    said = Lines()
    form: LogFormat = getattr(request, "param", "json")
    said.scribe = log_lines.configure_logging(form, said.append)
    return said


def _parsed(lines: Lines) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.all()]


def test_a_completion_is_one_line_with_its_numbers(lines: Lines) -> None:
    AccessLog().on_completion_end(END)
    (line,) = _parsed(lines)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "clairai.access",
        "message": "completion",
        "route": "/v1/chat/completions",
        "status": 200,
        "outcome": "done",
        "seconds": 1.2346,
        "first_token_seconds": 0.1235,
        "tokens": 20,
        "scored": 16,
        "lost": 2,
        "stopped": None,
        "response": "chatcmpl-1",
        "run": "0123456789abcdef",
        "key": None,
        "request": None,
    }


def test_a_completion_without_scores_has_nulls_and_no_zeros_in_their_place() -> None:
    plain = CompletionEnd(
        None, None, "/v1/completions", "error", 0.1, (), is_scored=False, status=503
    )
    fields = access_fields(plain)
    assert (fields["status"], fields["outcome"]) == (503, "error")
    assert [fields[name] for name in ("tokens", "scored", "lost", "run")] == [None] * 4


def test_the_models_name_may_be_a_path_and_is_not_logged() -> None:
    assert "secret" not in json.dumps(access_fields(END))


@pytest.mark.parametrize("lines", ["text"], indirect=True)
def test_as_text_a_line_is_what_a_person_reads(lines: Lines) -> None:
    logging.getLogger("clairai").info("m is served on %s", "http://127.0.0.1:6969")
    logging.getLogger("clairai.proxy").warning("records were lost")
    AccessLog().on_completion_end(END)
    lines.all()
    assert lines[:2] == ["m is served on http://127.0.0.1:6969", "warning: records were lost"]
    assert lines[2].startswith("completion route=/v1/chat/completions status=200 outcome=done")


def test_of_another_librarys_message_only_the_first_line_is_kept(lines: Lines) -> None:
    asyncio_says = "Task exception was never retrieved\nfuture: <Task coro=</home/someone/x.py:1>>"
    logging.getLogger("asyncio").error(asyncio_says)
    logging.getLogger("uvicorn.error").warning("x" * 500)
    logging.getLogger("uvicorn.error").info("not said")
    first, second = _parsed(lines)
    assert first["message"] == "Task exception was never retrieved"
    assert second["message"] == "x" * 200


@pytest.mark.parametrize("lines", ["text", "json"], indirect=True)
def test_an_exception_is_its_kind_and_its_place_and_never_its_text(lines: Lines) -> None:
    try:
        raise ValueError("the client's prompt, and /home/someone/key")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    (line,) = lines.all()
    assert "ValueError" in line
    assert "test_log_lines:" in line
    assert not [word for word in ("prompt", "someone", ".py") if word in line]


def test_lines_that_come_together_are_written_in_order_and_at_the_end_without_a_pause(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "PAUSE_S", 3600.0)
    for at in range(100):
        logging.getLogger("clairai").info("%s", at)
    assert [line["message"] for line in _parsed(lines)] == [str(at) for at in range(100)]


def test_every_line_is_one_json_object_whatever_is_in_it(lines: Lines) -> None:
    awkward = 'quote " newline \n tab \t nul \0 ünïcode \ud800'.encode("utf-8", "replace").decode()
    logging.getLogger("clairai").info("%s", awkward, extra={FIELDS: {"a": float("nan")}})
    (line,) = lines.all()
    assert "\n" not in line
    assert json.loads(line)["a"] is None


def test_a_line_that_cannot_be_written_stops_nothing() -> None:
    written: list[str] = []

    def say(line: str) -> None:
        if "first" in line:
            raise OSError("the terminal is gone")
        written.append(line)

    scribe = log_lines.configure_logging("text", say)
    for line in ("first", "second"):
        logging.getLogger("clairai").info(line)
    scribe.close()
    assert written == ["second"]


def test_a_blocked_terminal_delays_nothing_and_dropped_lines_are_counted() -> None:
    gate, began = threading.Event(), threading.Event()
    written: list[str] = []

    def say(line: str) -> None:
        began.set()
        assert gate.wait(30)
        written.append(line)

    scribe = log_lines.configure_logging("text", say)
    logging.getLogger("clairai").info("held up")
    assert began.wait(30)
    for _ in range(log_lines.MAX_QUEUED + 3):
        logging.getLogger("clairai").info("more")
    gate.set()
    scribe.close()
    assert json.loads(written[1]) == {
        "level": "warning",
        "message": "log lines were dropped",
        "lines": 3,
    }
    assert len(written) == 2 + log_lines.MAX_QUEUED
