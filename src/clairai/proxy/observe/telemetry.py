"""Reports ended completions to OpenTelemetry: one event per probe and choice, by OTLP.

The event is `gen_ai.evaluation.result` of the semantic conventions for generative AI. It is sent
only if OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_LOGS_ENDPOINT is set, and on a thread: a
collector that is slow or gone costs events, which are counted, and delays no token.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, quote
from clairai.proxy.observe.observer import ChoiceResult, CompletionEnd, ProbeResult
from clairai.wire import ring_messages

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import LogRecordExporter

EVENT: Final = "gen_ai.evaluation.result"
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OLDEST_SDK: Final = (1, 37)
PROTOCOL: Final = "http/protobuf"
MAX_QUEUED: Final = 1024
MAX_ID: Final = 256  # characters; a client may choose a part of it
CLOSE_S: Final = 2.0


class Telemetry:
    """An Observer; `close` sends what is still queued, within CLOSE_S."""

    def __init__(self, provider: LoggerProvider) -> None:
        self._provider = provider
        self._logger = provider.get_logger("clairai", version("clairai"))
        self._queue: queue.Queue[CompletionEnd | None] = queue.Queue(MAX_QUEUED)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._send, name="clairai-telemetry", daemon=True)
        self._thread.start()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Telemetry | None:
        """None if no endpoint is set; ConfigError if one is set and cannot be used."""
        endpoint = next((name for name in ENDPOINTS if environ.get(name)), None)
        return None if endpoint is None else cls(_provider(endpoint, environ))

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        pass

    def on_completion_end(self, end: CompletionEnd) -> None:
        try:
            self._queue.put_nowait(end)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        deadline_s = time.monotonic() + CLOSE_S
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            self.num_dropped += self._queue.qsize()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        # The SDK alone would wait half a minute for a collector that is gone.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(max(0.0, deadline_s - time.monotonic()))
        if self.num_dropped:
            message = "telemetry: %d completions were not reported; is the collector too slow?"
            logging.getLogger(__name__).warning(message, self.num_dropped)

    def _send(self) -> None:
        from opentelemetry._logs import LogRecord, SeverityNumber

        while (end := self._queue.get()) is not None:
            for choice in end.choices:
                for probe in choice.probes:
                    record = LogRecord(
                        timestamp=time.time_ns(),
                        severity_number=SeverityNumber.INFO,
                        event_name=EVENT,
                        attributes=attributes(end, choice, probe),
                    )
                    self._logger.emit(record)


def attributes(end: CompletionEnd, choice: ChoiceResult, probe: ProbeResult) -> dict[str, Any]:
    """The attributes of one event; the score is the highest of the answer's tokens."""
    label = None if probe.above is None else ("above" if probe.above else "below")
    found = {
        "gen_ai.evaluation.name": probe.name,
        "gen_ai.evaluation.score.value": probe.max,
        "gen_ai.evaluation.score.label": label,
        "gen_ai.evaluation.explanation": _explanation(choice, probe),
        "gen_ai.response.id": None if end.response_id is None else end.response_id[:MAX_ID],
        "clairai.choice": choice.choice,
        "clairai.outcome": end.outcome,
        "clairai.score.mean": probe.mean,
        "clairai.score.argmax": probe.argmax,
        "clairai.score.threshold": probe.threshold,
        "clairai.tokens.scored": choice.count,
        "clairai.tokens.above": probe.above,
        "clairai.tokens.lost": choice.lost,
    }
    return {name: value for name, value in found.items() if value is not None}


def _explanation(choice: ChoiceResult, probe: ProbeResult) -> str:
    if probe.max is None:
        return "no token has a score"
    text = f"the highest score of {choice.count} tokens, at token {probe.argmax}"
    if probe.above is not None:
        text += f"; {probe.above} at or over the threshold {probe.threshold:g}"
    return f"{text}; {choice.lost} lost" if choice.lost else text


def _provider(endpoint: str, environ: Mapping[str, str]) -> LoggerProvider:
    try:
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
        from opentelemetry.sdk.resources import Resource

        _require_new(endpoint)
        exporter = _exporter(environ)
    except ImportError as error:
        raise ConfigError(
            f"{endpoint} is set, and sending events needs {error.name}; "
            f"run `pip install 'clairai[otel]'`, or unset {endpoint}"
        ) from None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override this default.
    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "clairai"}
    provider = LoggerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return provider


def _require_new(endpoint: str) -> None:
    """Before 1.37 the SDK accepts an event and fails to send it."""
    from opentelemetry.sdk.version import __version__ as found

    if tuple(map(int, found.split(".")[:2])) < OLDEST_SDK:
        raise ConfigError(
            f"{endpoint} is set, and opentelemetry-sdk {found} cannot send events, from 1.37 on it "
            f"can; run `pip install 'clairai[otel]'`, or unset {endpoint}"
        )


def _exporter(environ: Mapping[str, str]) -> LogRecordExporter:
    """The exporter, which reads address, headers and certificates from the environment itself."""
    variable = next((name for name in _PROTOCOLS if environ.get(name)), None)
    if variable is not None and environ[variable] != PROTOCOL:
        raise ConfigError(
            f"{variable} is {quote(environ[variable])}, and events are sent by {PROTOCOL} alone; "
            f"set {_PROTOCOLS[0]}={PROTOCOL} and {ENDPOINTS[0]} to such an endpoint"
        )
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

    return OTLPLogExporter()
