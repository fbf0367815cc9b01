"""The settings of the proxy, checked: where it listens, which engine it asks, its limits."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from clairai.errors import ConfigError, quote
from clairai.fields.json_outline import JsonBounds
from clairai.probe.files import MAX_PROBE_NBYTES
from clairai.proxy.access_keys import AccessKey, check_keys
from clairai.vector.files import MAX_NBYTES as MAX_VECTOR_NBYTES

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 6969
UNIX: Final = "unix:"
_REPLICA: Final = re.compile("[A-Za-z0-9._-]{1,64}")
MAX_PROCESSES: Final = 32  # each reads the ring, which has 64 readers at most
PAGE: Final = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Limits:
    """What one client may cost; each limit is checked before the work that it bounds."""

    body_bytes: int = 8 << 20  # a vector of 80 layers and width 8192 in base64 has 3.5 MB
    probe_bytes: int = MAX_PROBE_NBYTES
    vector_bytes: int = MAX_VECTOR_NBYTES
    manifest_bytes: int = 32 << 20  # of new weights; the engine has the same limit
    form_bytes: int = 32 << 20  # a sound to be transcribed; vLLM takes 25 MiB of it
    header_bytes: int = 64 << 10
    headers: int = 128
    target_bytes: int = 8 << 10  # path and query
    connections: int = 4096  # open at once; fewer if the process has not enough descriptors
    # Bodies that are being received or passed on. A JSON body is held twice while it is edited.
    bodies_bytes: int = 192 << 20  # in all; more get 503
    client_bodies_bytes: int = 128 << 20  # of one client
    body_rate: int = 64 << 10  # bytes a second; a body that comes more slowly gets 408
    # JSON is read at these rates, in bytes a second; faster clients get 429.
    client_json_rate: int = 16 << 20
    client_json_burst: int = 64 << 20
    json_rate: int = 64 << 20  # of all clients; more get 503
    json_burst: int = 256 << 20
    depth: int = 64  # of a JSON body
    items: int = 200_000  # strings, lists and objects in a JSON body
    values: int = 1 << 20  # of any kind in a JSON body: a prompt of a million token ids
    keys: int = 1024  # of the outermost object of a JSON body
    choices: int = 64  # n of a scored request
    streams: int = 2048  # requests in the proxy at once; more get 503
    # Scores held until their token arrives, 32 bytes each; more are lost, and counted.
    scores: int = 1 << 22  # of one request
    scores_in_all: int = 1 << 24
    runs: int = 64  # named runs held, ended ones included
    run_bytes: int = 8 << 20  # events held of one run, for a client that resumes it
    # Answers whose scores are kept for clients that fetch them; the oldest are dropped first.
    kept_answers: int = 4096
    kept_bytes: int = 64 << 20
    # A response that is not streamed, such as a vector's file.
    answer_bytes: int = MAX_VECTOR_NBYTES

    @property
    def json_bounds(self) -> JsonBounds:
        return JsonBounds(self.depth, self.items, self.values, self.keys)


@dataclass(frozen=True)
class Timeouts:
    """Seconds."""

    connect: float = 5.0
    # How long a connection to upstream is kept for the next request. A little under the 5 s after
    # which vLLM closes an idle one (envs.py, VLLM_HTTP_TIMEOUT_KEEP_ALIVE): a request on a
    # connection that is just being closed would be lost.
    upstream_idle: float = 2.0
    # How long upstream may send nothing.
    control: float = 60.0  # for anything but a completion or new weights
    # An answer that is not streamed is silent until its end. What ends one of an engine that
    # hangs is its heartbeat, or the watch of engine_watch.py; this is for an upstream without.
    completion: float = 3600.0
    weights: float = 1800.0  # the engine waits for unfinished requests, then loads them
    # How long an engine that nobody supervises may leave control requests without an answer.
    stall: float = 120.0
    head: float = 10.0  # from the first byte of a request, or a new connection, to its last header
    body: float = 10.0  # of a body, and a second more for every `Limits.body_rate` bytes of it
    idle: float = 30.0  # of a connection between two requests
    # How long a last chunk waits for its rows. They are there at once, or the engine's mark that no
    # more follow: only a machine that is overloaded, or a ring that has lost the mark, needs it.
    finish: float = 10.0
    ping: float = 15.0
    run_kept: float = 60.0  # after a named run's end
    scores_kept: float = 600.0  # after an answer's end
    run_alone: float = 30.0  # until a named run without a client is cancelled
    stalled: float = 120.0  # until a client that takes nothing is disconnected


@dataclass(frozen=True)
class ProxySettings:
    """Where the proxy listens, which engine it asks, and its limits.

    `upstream` is an address (http://127.0.0.1:8000) or a Unix socket (unix:/run/me/vllm.sock).
    The ring is looked for in `runtime_dir` (None: the usual one of this user), or is the one at
    `ring_socket`.
    """

    upstream: str
    upstream_api_key: str | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None  # one key with every right
    keys: tuple[AccessKey, ...] = ()  # or several
    runtime_dir: Path | None = None
    ring_socket: Path | None = None
    examples: Path | None = None
    page: Path = PAGE
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # host names of requests, besides the bound one
    score_all: bool = False  # score requests that do not ask for it, and keep their scores
    # Processes that answer completions beside the first one; 1: the first one does it itself.
    completion_processes: int = 1
    replica: str | None = None  # name of this server among several behind a router
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.upstream_socket is None:
            parts = urlsplit(self.upstream)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(
                    f"{quote(self.upstream)} is no upstream; write http://127.0.0.1:8000, "
                    f"or unix:/path/of/its.sock"
                )
        for key in (self.api_key, self.upstream_api_key):
            if key == "":
                raise ConfigError("an API key is empty; give one, or leave it out")
        if self.api_key is not None and self.keys:
            raise ConfigError("an API key and a list of keys are given; put it into the list")
        check_keys(self.keys)
        if not self.access_keys and not is_loopback(self.host):
            raise ConfigError(
                f"host {quote(self.host)} can be reached from other machines; give an API key, "
                f"or keep to {DEFAULT_HOST}"
            )
        if not 1 <= self.completion_processes <= MAX_PROCESSES:
            raise ConfigError(
                f"{self.completion_processes} completion processes; give 1 to {MAX_PROCESSES}"
            )
        for origin in self.allowed_origins:
            _check_origin(origin)
        if self.replica is not None and not _REPLICA.fullmatch(self.replica):
            raise ConfigError(
                f"{quote(self.replica)} is no name of a replica; give 1 to 64 letters, digits, "
                "dots, dashes and underscores"
            )

    @cached_property
    def access_keys(self) -> tuple[AccessKey, ...]:
        """The keys that requests may carry; none if they need not carry one."""
        return self.keys if self.api_key is None else (AccessKey.of(self.api_key),)

    def share_of_held(self, num_processes: int) -> ProxySettings:
        """With limits of what one of so many processes may hold, all having the same share."""
        limits = self.limits
        return replace(
            self,
            limits=replace(
                limits,
                runs=max(1, limits.runs // num_processes),
                kept_answers=max(1, limits.kept_answers // num_processes),
                kept_bytes=limits.kept_bytes // num_processes,
            ),
        )

    @property
    def upstream_socket(self) -> Path | None:
        """The Unix socket, if upstream is one."""
        if not self.upstream.startswith(UNIX):
            return None
        return Path(self.upstream.removeprefix(UNIX))

    @property
    def upstream_url(self) -> str:
        """The part of an upstream URL before its path."""
        is_socket = self.upstream_socket is not None
        return "http://engine" if is_socket else self.upstream.rstrip("/")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    is_whole = parts.scheme in ("http", "https") and origin == f"{parts.scheme}://{parts.netloc}"
    if not is_whole or not parts.netloc:
        raise ConfigError(
            f"{quote(origin)} is no origin; write scheme, host and port: http://127.0.0.1:5173"
        )
