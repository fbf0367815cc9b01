"""Runs the proxy in a thread: for the command `clairai proxy`, and as a part of `clairai serve`.

A thread, because the main thread answers signals and supervises the engine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import uvicorn

from clairai.errors import ClairaiError, ConfigError
from clairai.launch.engine_command import ListenAddress
from clairai.launch.engine_process import POLL_S
from clairai.launch.user_output import UserOutput
from clairai.local.frozen_heap import frozen_heap
from clairai.local.own_clock import OwnClock
from clairai.local.private_socket import runtime_dir
from clairai.local.stop_signal import StopSignal
from clairai.local.thread_switch import switch_threads_often
from clairai.proxy.app import create_app, create_server
from clairai.proxy.observe.log_lines import AccessLog
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.observe.observer import Observer
from clairai.proxy.observe.telemetry import Telemetry
from clairai.proxy.proxy import Proxy
from clairai.proxy.proxy_settings import ProxySettings, Timeouts

START_S: Final = 20.0
STOP_S: Final = 4.0  # for answers that are being sent, and for the thread that reads the ring
NUM_FILES: Final = 1 << 16
STALL_S: Final = 30.0  # an event loop that has not gone round for so long answers nobody
_START_POLL_S: Final = 0.01


@dataclass(frozen=True)
class ProxyOptions:
    """How clients reach the proxy, and what it shows them."""

    address: ListenAddress
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    examples: Path | None = None
    score_all: bool = False
    scores_kept_s: float = Timeouts.scores_kept
    completion_processes: int = 1
    replica: str | None = None

    def settings(
        self,
        upstream: str,
        runtime: Path,
        upstream_api_key: str | None = None,
        upstream_idle_s: float = Timeouts.upstream_idle,
    ) -> ProxySettings:
        return ProxySettings(
            upstream,
            upstream_api_key=upstream_api_key,
            host=self.address.host,
            port=self.address.port,
            api_key=self.address.api_key,
            keys=self.address.keys,
            runtime_dir=runtime,
            examples=self.examples,
            allowed_origins=self.allowed_origins,
            allowed_hosts=self.allowed_hosts,
            score_all=self.score_all,
            completion_processes=self.completion_processes,
            replica=self.replica,
            timeouts=Timeouts(scores_kept=self.scores_kept_s, upstream_idle=upstream_idle_s),
        )


def listen(address: ListenAddress) -> socket.socket:
    """A listening socket, opened before anything is started that would have to be undone."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"{address.host} port {address.port} cannot be used ({error.strerror}); "
                f"choose another with --port"
            ) from None
        undo.pop_all()
    return listener


class ProxyThread:
    """Serves inside the `with` block; after it the port is free again."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener
        self._error: BaseException | None = None
        self._rounds = _LoopRounds(server)
        self._thread = threading.Thread(target=self._run, name="clairai-proxy", daemon=True)

    def check(self) -> None:
        """ClairaiError if the server ended although nobody asked it to, or hangs."""
        if not self._thread.is_alive():
            raise ClairaiError(f"the proxy has ended ({self._error!r})") from self._error
        if self._rounds.silent_s() >= STALL_S:
            raise ClairaiError(f"the proxy's event loop has not gone round for {STALL_S:.0f} s")

    def __enter__(self) -> Self:
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            self.check()
            if time.monotonic() > deadline_s:
                raise ClairaiError(f"the proxy did not start within {START_S:.0f} s")
            time.sleep(_START_POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(STOP_S)
        self._server.force_exit = True  # no more waiting for open connections
        self._thread.join(STOP_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:  # reported by the main thread in check()
            self._error = error


class _LoopRounds:
    """Counts the rounds of the server's main loop, which uvicorn makes ten times a second."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._clock = OwnClock()
        self._num_rounds = self._num_seen = 0
        self._progress_s = 0.0
        original = server.on_tick

        async def on_tick(counter: int) -> bool:
            self._num_rounds += 1
            return await original(counter)

        server.on_tick = on_tick  # type: ignore[method-assign]

    def silent_s(self) -> float:
        """How long the loop has stood still; called often, by the main thread."""
        now_s = self._clock.tick()
        if self._num_rounds != self._num_seen or not self._num_rounds:
            self._num_seen, self._progress_s = self._num_rounds, now_s
        return now_s - self._progress_s


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process: a connection takes a descriptor, and one upstream.

    A shell leaves 1,024, so that old programs with select(2) work. Not more than are of use: some
    programs, and vLLM inherits the limit, try every number up to it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_FILES if hard == resource.RLIM_INFINITY else min(NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def run_proxy(
    settings: ProxySettings, listener: socket.socket
) -> Iterator[tuple[ProxyThread, Proxy]]:
    """The proxy with its metrics and access log, and telemetry where the environment asks."""
    with ExitStack() as undo:
        undo.callback(listener.close)
        undo.callback(sys.setswitchinterval, sys.getswitchinterval())
        switch_threads_often()
        observers: list[Observer] = [AccessLog()]
        telemetry = Telemetry.from_environ(os.environ)
        if telemetry is not None:
            undo.callback(telemetry.close)
            observers.append(telemetry)
        app = create_app(settings, observers=observers, metrics=Metrics(replica=settings.replica))
        server = create_server(app, settings)
        undo.enter_context(frozen_heap())  # before it answers: the collection takes a while
        yield undo.enter_context(ProxyThread(server, listener)), app.state.proxy


def serve_proxy(
    upstream: str,
    options: ProxyOptions,
    output: UserOutput,
    *,
    runtime: str | None,
    upstream_api_key: str | None,
) -> None:
    """The command `clairai proxy`. It also waits for an upstream that does not run yet."""
    settings = options.settings(upstream, runtime_dir(runtime), upstream_api_key)
    raise_descriptor_limit()
    with StopSignal() as stop, run_proxy(settings, listen(options.address)) as (thread, _):
        shown = f"{upstream} is shown on {options.address.url}"
        output.announce([shown, "dashboard in a browser, OpenAI's API under /v1; Ctrl-C stops it"])
        while not stop():
            thread.check()
            time.sleep(POLL_S)
