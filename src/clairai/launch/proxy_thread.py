"""Takes the proxy's server and an address; gives it answering there, in a thread of its own.

A thread, because the main thread answers signals and looks after the engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

import uvicorn

from clairai.errors import ClairaiError, ConfigError
from clairai.launch.engine_command import ListenAddress
from clairai.launch.engine_process import LOOK_PAUSE_S
from clairai.launch.user_output import UserOutput
from clairai.local.private_socket import runtime_dir
from clairai.local.stop_signal import StopSignal
from clairai.proxy.app import create_app, create_server
from clairai.proxy.observe.log_lines import AccessLog
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.observe.observer import Observer
from clairai.proxy.observe.telemetry import Telemetry
from clairai.proxy.proxy import Proxy
from clairai.proxy.proxy_settings import ProxySettings

START_S: Final = 20.0
STOP_S: Final = 4.0  # for answers that are being sent, and for the ring's thread
_LOOK_S: Final = 0.01


def listen(bind: ListenAddress) -> socket.socket:
    """Taken from now on, so that nothing has to be undone later because somebody else has it."""
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((bind.host, bind.port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"{bind.host} port {bind.port} cannot be used ({error.strerror}); "
                f"choose another with --port"
            ) from None
        undo.pop_all()
    return listener


class ProxyThread:
    """Inside the block the server answers; after it, the port is free again."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="clairai-proxy", daemon=True)

    def check(self) -> None:
        """ClairaiError if it has ended although nobody asked it to."""
        if not self._thread.is_alive():
            raise ClairaiError(f"the proxy has ended ({self._error!r})") from self._error

    def __enter__(self) -> Self:
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            self.check()
            if time.monotonic() > deadline_s:
                raise ClairaiError(f"the proxy did not start within {START_S:.0f} s")
            time.sleep(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(STOP_S)
        self._server.force_exit = True  # no more waiting for what is left
        self._thread.join(STOP_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:  # kept for the main thread, which says it
            self._error = error


# MERGED
# Takes an upstream and an address; runs the proxy there. The command `clairai proxy`, and a part
# of `clairai serve`.


@dataclass(frozen=True)
class ProxyOptions:
    """How the proxy meets the world."""

    bind: ListenAddress
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    examples: Path | None = None

    def settings(
        self, upstream: str, runtime: Path, upstream_api_key: str | None = None
    ) -> ProxySettings:
        return ProxySettings(
            upstream,
            upstream_api_key=upstream_api_key,
            host=self.bind.host,
            port=self.bind.port,
            api_key=self.bind.api_key,
            runtime_dir=runtime,
            examples=self.examples,
            allowed_origins=self.allowed_origins,
            allowed_hosts=self.allowed_hosts,
        )


class RunningProxy(NamedTuple):
    """A proxy that answers, and what it knows."""

    front: ProxyThread
    proxy: Proxy


@contextmanager
def run_proxy(settings: ProxySettings, listener: socket.socket) -> Iterator[RunningProxy]:
    """With everything that watches it: metrics, the access log, telemetry where it is asked for."""
    with ExitStack() as undo:
        undo.callback(listener.close)
        observers: list[Observer] = [AccessLog()]
        telemetry = Telemetry.from_environ(os.environ)
        if telemetry is not None:
            undo.callback(telemetry.close)
            observers.append(telemetry)
        app = create_app(settings, observers=observers, metrics=Metrics())
        front = undo.enter_context(ProxyThread(create_server(app, settings), listener))
        yield RunningProxy(front, app.state.proxy)


def serve_proxy(
    upstream: str,
    outside: ProxyOptions,
    voice: UserOutput,
    *,
    runtime: str | None,
    upstream_api_key: str | None,
) -> None:
    """The command `clairai proxy`; an upstream that is not there yet is waited for."""
    settings = outside.settings(upstream, runtime_dir(runtime), upstream_api_key)
    with StopSignal() as stop, run_proxy(settings, listen(outside.bind)) as running:
        shown = f"{upstream} is shown on {outside.bind.url}"
        voice.announce([shown, "dashboard in a browser, OpenAI's API under /v1; Ctrl-C stops it"])
        while not stop():
            running.front.check()
            time.sleep(LOOK_PAUSE_S)
