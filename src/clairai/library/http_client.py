"""HTTP client for the routes that clairai adds to vLLM's API server.

Runs in: the command line program, the launcher and trainers. It follows no redirect and no proxy
setting: the key goes to the given address and nowhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlsplit

from clairai.errors import ClairaiError, ConfigError, ProbeError, VectorError, WeightsError

CONTROL_TIMEOUT_S: Final = 60.0
ANSWER_TIMEOUT_S: Final = 600.0
_MAX_ANSWER_BYTES: Final = 64 << 20
_UNIX: Final = "unix:"
_VECTORS: Final = "/v1/steering/vectors"
_WEIGHTS: Final = "/v1/weights"


@dataclass(frozen=True)
class ServerClient:
    """One server, by its URL or by `unix:/path/of/its.sock`."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        is_web = parts.scheme in ("http", "https") and parts.hostname
        if not is_web and not self.url.startswith(f"{_UNIX}/"):
            raise ConfigError(f"{self.url!r} is not an address; write http://127.0.0.1:8000")

    def is_healthy(self, timeout_s: float) -> bool:
        try:
            return self._call("GET", "/health", timeout_s=timeout_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def describe(self) -> Mapping[str, Any]:
        return self._ask("GET", "/v1/clairai")

    def probes(self) -> Mapping[str, Any]:
        return self._ask("GET", "/v1/probes")

    def put_probe(self, name: str, data: bytes, *, only_if: Mapping[str, str]) -> Mapping[str, Any]:
        return self._ask("PUT", _probe_path(name), body=data, headers=only_if)

    def remove_probe(self, name: str) -> Mapping[str, Any]:
        return self._ask("DELETE", _probe_path(name))

    def vectors(self) -> Mapping[str, Any]:
        return self._ask("GET", _VECTORS)

    def put_vector(
        self, name: str, data: bytes, *, only_if: Mapping[str, str]
    ) -> Mapping[str, Any]:
        return self._ask("PUT", f"{_VECTORS}/{quote(name, safe='')}", body=data, headers=only_if)

    def remove_vector(self, name: str) -> Mapping[str, Any]:
        return self._ask("DELETE", f"{_VECTORS}/{quote(name, safe='')}")

    def weights(self) -> Mapping[str, Any]:
        return self._ask("GET", _WEIGHTS)

    def post_weights(self, what: str, manifest: bytes) -> Mapping[str, Any]:
        typed = {"Content-Type": "application/json"}
        path = f"{_WEIGHTS}/{what}"
        return self._ask("POST", path, body=manifest, headers=typed, timeout_s=ANSWER_TIMEOUT_S)

    def put_weights(self, transfer: str, index: int, body: Iterable[bytes], nbytes: int) -> None:
        """One buffer of a planned transfer, in pieces: it may be larger than memory."""
        typed = {"Content-Type": "application/octet-stream", "Content-Length": str(nbytes)}
        path = f"{_WEIGHTS}/buffers/{transfer}/{index}"
        self._ask("PUT", path, body=body, headers=typed, timeout_s=ANSWER_TIMEOUT_S)

    def ask_scores(self, response_id: str, timeout_s: float) -> tuple[int, Mapping[str, Any]]:
        """The status and the answer of `GET /v1/scores/{id}`; OSError if there is none."""
        return self._call("GET", f"/v1/scores/{quote(response_id, safe='')}", timeout_s=timeout_s)

    def chat(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        body = json.dumps(request).encode()
        typed = {"Content-Type": "application/json"}
        path = "/v1/chat/completions"
        return self._ask("POST", path, body=body, headers=typed, timeout_s=ANSWER_TIMEOUT_S)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> Mapping[str, Any]:
        try:
            status, answer = self._call(
                method, path, body=body, headers=headers, timeout_s=timeout_s
            )
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{self.url} does not answer ({error}); start the server, or give its address"
            ) from None
        if status >= 400:
            raise self._make_error(status, answer, _error_kind(path))
        return answer

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> tuple[int, Mapping[str, Any]]:
        """The status, and the JSON object of the body; empty if the body is none."""
        connection = self._connection(timeout_s)
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        try:
            sent = {**(headers or {}), **key}
            # A server that refuses a long body stops reading it: its answer says why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._base + path, body, sent)
            response = connection.getresponse()
            return response.status, _read_object(response.read(_MAX_ANSWER_BYTES))
        finally:
            connection.close()

    @property
    def _base(self) -> str:
        return "" if self.url.startswith(_UNIX) else urlsplit(self.url).path.rstrip("/")

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.url.startswith(_UNIX):
            return _UnixConnection(self.url.removeprefix(_UNIX), timeout_s)
        parts = urlsplit(self.url)
        is_safe = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_safe else http.client.HTTPConnection
        return kind(str(parts.hostname), parts.port, timeout=timeout_s)

    def _make_error(
        self, status: int, answer: Mapping[str, Any], kind: type[ClairaiError]
    ) -> ClairaiError:
        if status == 401:
            return ConfigError(f"{self.url} wants another API key; give it with --api-key")
        error = answer.get("error")
        if isinstance(error, dict) and "message" in error:
            return kind(f"{self.url} refused ({status}): {error['message']}")
        return ConfigError(
            f"{self.url} answered {status} and is no server with clairai's routes; "
            f"start it with `clairai serve`, or with VLLM_PLUGINS naming clairai"
        )


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _error_kind(path: str) -> type[ClairaiError]:
    if path.startswith(_WEIGHTS):
        return WeightsError
    return VectorError if path.startswith(_VECTORS) else ProbeError


def _probe_path(name: str) -> str:
    return f"/v1/probes/{quote(name, safe='')}"


def _read_object(raw: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
