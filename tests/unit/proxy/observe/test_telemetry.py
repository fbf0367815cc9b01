"""A real receiver reads the OTLP events of completions, and no token waits for them."""

from __future__ import annotations

import contextlib
import gzip
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from clairai.errors import ConfigError
from clairai.proxy.observe import telemetry as telemetry_module
from clairai.proxy.observe.observer import ChoiceResult, CompletionEnd, ProbeResult
from clairai.proxy.observe.telemetry import EVENT, MAX_QUEUED, Telemetry, attributes

CODE = ProbeResult("code", mean=0.25, max=0.75, argmax=3, above=2, threshold=0.5)
CALM = ProbeResult("calm", mean=0.125, max=0.25, argmax=0, above=0, threshold=0.5)
TONE = ProbeResult("tone", mean=None, max=None, argmax=None, above=None, threshold=None)


def _end(*probes: ProbeResult, lost: int = 0) -> CompletionEnd:
    choice = ChoiceResult(1, tokens=9, count=8, lost=lost, finish_reason="stop", probes=probes)
    return CompletionEnd("chatcmpl-7", "m", "/v1/chat/completions", "done", 0.5, (choice,))


class Receiver:
    """An OTLP/HTTP collector: takes POST /v1/logs, keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: queue.Queue[ExportLogsServiceRequest] = queue.Queue()
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(raw) if self.headers["Content-Encoding"] == "gzip" else raw
                outer.headers.append({"path": self.path, **dict(self.headers.items())})
                outer.requests.put(ExportLogsServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with contextlib.closing(Receiver()) as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        monkeypatch.setattr(telemetry_module, "CLOSE_S", 60.0)  # all that is queued is sent
        yield made


def _sent(receiver: Receiver) -> list[tuple[str, dict[str, Any]]]:
    request = receiver.requests.get(timeout=60)
    records = [r for part in request.resource_logs for s in part.scope_logs for r in s.log_records]
    return [(r.event_name, {a.key: _value(a.value) for a in r.attributes}) for r in records]


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def test_a_receiver_gets_one_event_per_probe_and_answer(receiver: Receiver) -> None:
    telemetry = Telemetry.from_environ({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
    assert telemetry is not None
    telemetry.on_completion_end(_end(CODE, CALM))
    telemetry.close()
    (code, code_fields), (calm, calm_fields) = _sent(receiver)
    assert (code, calm) == (EVENT, EVENT) == ("gen_ai.evaluation.result",) * 2
    assert code_fields == {
        "gen_ai.evaluation.name": "code",
        "gen_ai.evaluation.score.value": 0.75,
        "gen_ai.evaluation.score.label": "above",
        "gen_ai.evaluation.explanation": (
            "the highest score of 8 tokens, at token 3; 2 at or over the threshold 0.5"
        ),
        "gen_ai.response.id": "chatcmpl-7",
        "clairai.choice": 1,
        "clairai.outcome": "done",
        "clairai.score.mean": 0.25,
        "clairai.score.argmax": 3,
        "clairai.score.threshold": 0.5,
        "clairai.tokens.scored": 8,
        "clairai.tokens.above": 2,
        "clairai.tokens.lost": 0,
    }
    assert calm_fields["gen_ai.evaluation.score.label"] == "below"
    assert receiver.headers[0]["path"] == "/v1/logs"


def test_the_service_is_named_and_nothing_identifies_the_machine(receiver: Receiver) -> None:
    telemetry = Telemetry.from_environ({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
    assert telemetry is not None
    telemetry.on_completion_end(_end(CODE))
    telemetry.close()
    request = receiver.requests.get(timeout=60)
    resource = {a.key: _value(a.value) for a in request.resource_logs[0].resource.attributes}
    assert resource["service.name"] == "clairai"
    assert not [key for key in resource if key.startswith(("host.", "process."))]


def test_missing_values_are_left_out_and_loss_is_reported() -> None:
    fields = attributes(_end(TONE, lost=3), _end(TONE, lost=3).choices[0], TONE)
    assert fields["gen_ai.evaluation.explanation"] == "no token has a score"
    assert fields["clairai.tokens.lost"] == 3
    assert not [key for key in fields if "score." in key]


def test_without_an_endpoint_there_is_no_telemetry_and_no_sdk() -> None:
    program = (
        "import sys; from clairai.proxy.observe.telemetry import Telemetry\n"
        "assert Telemetry.from_environ({}) is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


def test_an_endpoint_without_the_packages_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk._logs", None)
    with pytest.raises(ConfigError, match=r"clairai\[otel\].*unset OTEL_EXPORTER_OTLP_ENDPOINT"):
        Telemetry.from_environ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


def test_an_sdk_that_cannot_send_events_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opentelemetry.sdk.version.__version__", "1.36.0")
    with pytest.raises(ConfigError, match=r"1\.36\.0 cannot send events"):
        Telemetry.from_environ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


def test_an_unsupported_protocol_is_refused_with_a_reason() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }
    with pytest.raises(ConfigError, match=r"is 'grpc', and events are sent by http/protobuf"):
        Telemetry.from_environ(environ)
    quiet = environ | {"OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf"}
    telemetry = Telemetry.from_environ(quiet)
    assert telemetry is not None
    telemetry.close()


STUCK_S = 100.0


class Stuck:
    """A provider whose sending never comes back until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def get_logger(self, *_: str) -> Stuck:
        return self

    def emit(self, _: object) -> None:
        self.gate.wait(STUCK_S)

    def shutdown(self) -> None:
        self.gate.wait(STUCK_S)


def test_a_collector_that_hangs_costs_events_and_no_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = Stuck()
    telemetry = Telemetry(stuck)  # type: ignore[arg-type]
    began_s = time.monotonic()
    for _ in range(MAX_QUEUED + 10):
        telemetry.on_completion_end(_end(CODE))
    assert 9 <= telemetry.num_dropped <= 10  # one may be on its way already
    telemetry.close()
    assert time.monotonic() - began_s < STUCK_S / 2  # nobody has waited for the collector
    assert "completions were not reported" in caplog.text
    stuck.gate.set()
