"""Log lines of a launched process and of the proxy: plain text, or JSON.

They hold no prompt, answer, key or path. Messages are ours; of other libraries' messages only the
first line is kept, and of an exception its type and its place in the code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.proxy.observe.observer import CompletionEnd
from clairai.wire import ring_messages

LogFormat = Literal["text", "json"]
LOGGER: Final = "clairai"
FIELDS: Final = "clairai_fields"  # attribute of a record: fields beside the message
MAX_QUEUED: Final = 10_000  # lines
CLOSE_S: Final = 2.0
# Between two looks for lines: a thread that waits for each of them would be woken for each, and
# take Python's lock from the event loop when many answers end at once.
PAUSE_S: Final = 0.02
_DROPPED: Final = '{{"level": "warning", "message": "log lines were dropped", "lines": {}}}'
_MAX_FOREIGN_CHARACTERS: Final = 200
_MAX_VALUE_CHARACTERS: Final = 128
_PLAIN_VALUE: Final = re.compile(r"[!#-<>-~]*")  # ASCII without spaces, quotes and =
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_ENCODER: Final = msgspec.json.Encoder()


class JsonLines(logging.Formatter):
    """One JSON object a line: `{"time": ..., "level": ..., "message": ..., ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **{name: _json_value(value) for name, value in _fields(record).items()},
            **_error(record),
        }
        return _ENCODER.encode(line).decode()


class TextLines(logging.Formatter):
    """Plain text: the message, after `warning:` or `error:`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {**_fields(record), **_error(record)}
        given = ((name, value) for name, value in fields.items() if value is not None)
        shown = " ".join(f"{name}={_text_value(value)}" for name, value in given)
        line = f"{_message(record)} {shown}" if shown else _message(record)
        return line if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {line}"


class ThreadedLogHandler(logging.Handler):
    """Writes lines on a thread, so that a slow terminal delays no token.

    `write_line` writes one. `close`, which logging calls at exit, writes those still queued.
    """

    def __init__(self, write_line: Callable[[str], None]) -> None:
        super().__init__()
        self._write_line = write_line
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self._num_dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="clairai-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1
        except Exception:  # as logging treats errors in a handler
            self.handleError(record)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        super().close()

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            dropped, self._num_dropped = self._num_dropped, 0
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, a closed file
                if dropped:
                    self._write_line(_DROPPED.format(dropped))
                self._write_line(line)
            if self._queue.empty():
                self._closing.wait(PAUSE_S)


def configure_logging(form: LogFormat, write_line: Callable[[str], None]) -> ThreadedLogHandler:
    """Configure logging once a process: ours from INFO on, other libraries' from WARNING on."""
    handler = ThreadedLogHandler(write_line)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(LOGGER).setLevel(logging.INFO)
    return handler


def configured_format() -> LogFormat | None:
    """The format that `configure_logging` was given; None if this process has not called it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ThreadedLogHandler):
            return "json" if isinstance(handler.formatter, JsonLines) else "text"
    return None


class AccessLog:
    """An Observer that logs one line when a completion has ended."""

    reads_probes = False

    def __init__(self) -> None:
        self._logger = logging.getLogger(f"{LOGGER}.access")

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        pass

    def on_completion_end(self, end: CompletionEnd) -> None:
        self._logger.info("completion", extra={FIELDS: access_fields(end)})


def access_fields(end: CompletionEnd) -> dict[str, Any]:
    """The fields of that line; token counts are null for a completion without scores."""
    first_s = end.first_token_seconds
    counts = [(choice.tokens, choice.count, choice.lost) for choice in end.choices]
    tokens, scored, lost = map(sum, zip(*counts, strict=True)) if counts else (None, None, None)
    return {
        "route": end.route,
        "status": end.status,
        "outcome": end.outcome,
        "seconds": round(end.seconds, 4),
        "first_token_seconds": None if first_s is None else round(first_s, 4),
        "tokens": tokens,
        "scored": scored,
        "lost": lost,
        "stopped": ",".join(sorted({c.stopped for c in end.choices if c.stopped})) or None,
        "response": end.response_id,
        "run": end.run,
        "key": end.key,
        "request": end.request_id,
    }


def _message(record: logging.LogRecord) -> str:
    is_ours = record.name.partition(".")[0] == LOGGER
    if is_ours:
        return _escape(record.getMessage())
    # The rest may quote anything: a path, a request, the text of an exception.
    first, _, _ = record.getMessage().strip().partition("\n")
    return _escape(first[:_MAX_FOREIGN_CHARACTERS])


def _escape(text: str) -> str:
    """Without characters that move a cursor, change a colour or hide text; lines stay lines."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _json_value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return _escape(value[:_MAX_VALUE_CHARACTERS].replace("\n", "\\n"))


def _text_value(value: Any) -> str:
    """A value that cannot be taken for another field, or for another line."""
    text = str(value)[:_MAX_VALUE_CHARACTERS]
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    return fields


def _error(record: logging.LogRecord) -> dict[str, str]:
    """The type of an exception and where it was raised, as module and line."""
    if not record.exc_info or record.exc_info[0] is None:
        return {}
    kind, _, trace = record.exc_info
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    if not frames:
        return {"error": kind.__name__}
    line = traceback.extract_tb(trace)[-1].lineno
    return {"error": kind.__name__, "at": f"{frames[-1].f_globals.get('__name__', '?')}:{line}"}
