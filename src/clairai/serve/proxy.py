"""Takes an upstream and an address; runs the proxy there. The command `clairai proxy`, and a part
of `clairai serve`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clairai.ring.folder import runtime_dir
from clairai.serve.engine import LOOK_PAUSE_S
from clairai.serve.front import Front, listen
from clairai.serve.launch import Bind
from clairai.serve.voice import Voice
from clairai.sidecar.stopping import Stopping
from clairai.stream.app import create_app
from clairai.stream.jsonlog import AccessLog
from clairai.stream.listen import server
from clairai.stream.metrics import Metrics
from clairai.stream.observe import Observer
from clairai.stream.proxy import Proxy
from clairai.stream.settings import ProxySettings
from clairai.stream.telemetry import Telemetry


@dataclass(frozen=True)
class Outside:
    """How the proxy meets the world."""

    bind: Bind
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


class Running(NamedTuple):
    """A proxy that answers, and what it knows."""

    front: Front
    proxy: Proxy


@contextmanager
def running_proxy(settings: ProxySettings, listener: socket.socket) -> Iterator[Running]:
    """With everything that watches it: metrics, the access log, telemetry where it is asked for."""
    with ExitStack() as undo:
        undo.callback(listener.close)
        observers: list[Observer] = [AccessLog()]
        telemetry = Telemetry.from_environ(os.environ)
        if telemetry is not None:
            undo.callback(telemetry.close)
            observers.append(telemetry)
        app = create_app(settings, observers=observers, metrics=Metrics())
        front = undo.enter_context(Front(server(app, settings), listener))
        yield Running(front, app.state.proxy)


def proxy(
    upstream: str,
    outside: Outside,
    voice: Voice,
    *,
    runtime: str | None,
    upstream_api_key: str | None,
) -> None:
    """The command `clairai proxy`; an upstream that is not there yet is waited for."""
    settings = outside.settings(upstream, runtime_dir(runtime), upstream_api_key)
    with Stopping() as stop, running_proxy(settings, listen(outside.bind)) as running:
        shown = f"{upstream} is shown on {outside.bind.url}"
        voice.announce([shown, "dashboard in a browser, OpenAI's API under /v1; Ctrl-C stops it"])
        while not stop():
            running.front.check()
            time.sleep(LOOK_PAUSE_S)
