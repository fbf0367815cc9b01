"""Takes a Launch and an address; runs that engine behind a proxy until told to stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from clairai.errors import ConfigError
from clairai.launch.engine_command import EngineCommand, ListenAddress, PrivateSocket
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import LOOK_PAUSE_S, EngineProcess
from clairai.launch.preflight import check_before_start
from clairai.launch.proxy_thread import ProxyOptions, RunningProxy, listen, run_proxy
from clairai.launch.supervisor import DeathPolicy, StopRequest, SupervisedEngine, Supervisor
from clairai.launch.user_output import UserOutput, show_start_progress
from clairai.library.engine_control import config
from clairai.local.private_socket import runtime_dir
from clairai.local.stop_signal import StopSignal
from clairai.points import quote
from clairai.proxy.engine_info import HealthStatus
from clairai.proxy.proxy_settings import ProxySettings
from clairai.settings import Settings

RING_S: Final = 5.0
Banner = Callable[[], Sequence[str]]


def run_service(
    launch: EngineCommand,
    settings: ProxySettings,
    outside: ProxyOptions,
    voice: UserOutput,
    *,
    log: EngineLog | None,
    on_death: DeathPolicy,
    banner: Banner,
) -> None:
    """The proxy answers from the first moment on; whichever way this ends, all of it ends."""
    with StopSignal() as stop, run_proxy(settings, listen(outside.bind)) as running:
        service = EngineService(launch, running, voice, stop, log=log, banner=banner)
        Supervisor(service, on_death=on_death).run(stop)


class EngineService:
    """What happens around an engine: shown here, told to the proxy."""

    def __init__(
        self,
        launch: EngineCommand,
        running: RunningProxy,
        voice: UserOutput,
        stop: StopRequest,
        *,
        log: EngineLog | None,
        banner: Banner,
    ) -> None:
        self._launch, self._running, self._voice, self._stop = launch, running, voice, stop
        self._log, self._banner = log, banner

    def start(self) -> EngineProcess:
        told = "" if self._log is None else f"; its log: {self._log.path}"
        self.say(f"starting vLLM{told}")
        return EngineProcess(self._launch, log=self._log)

    def await_ready(self, engine: SupervisedEngine) -> bool:
        began_s = time.monotonic()
        with show_start_progress(self._voice.console, self._log, self.say) as shown:

            def tick() -> None:
                shown()
                self.check()
                stage = "starting" if self._log is None else self._log.stage()
                seconds = time.monotonic() - began_s
                self.tell(HealthStatus("starting", f"the engine is {stage}, {seconds:.0f} s"))

            if not engine.wait_ready(stop=self._stop, tick=tick):
                return False
        self._await_ring(engine)
        return True

    def _await_ring(self, engine: SupervisedEngine) -> None:
        """Else the first answers would come before anybody reads their scores."""
        deadline_s = time.monotonic() + RING_S
        feed = self._running.proxy.feed
        while not feed.is_attached and not self._stop() and engine.is_alive():
            if time.monotonic() > deadline_s:
                self.say("warning: the engine serves, and its ring cannot be read: no scores")
                return
            time.sleep(LOOK_PAUSE_S)

    def announce(self) -> None:
        self._voice.announce(self._banner())

    def tell(self, word: HealthStatus | None) -> None:
        self._running.proxy.health.tell(word)

    def say(self, line: str) -> None:
        self._voice.say(line)

    def check(self) -> None:
        self._running.front.check()
        if self._log is not None:
            self._log.trim()


# MERGED
# Takes a model and what to tap; serves it, engine and proxy, until told to stop.


BESIDE: Final = "-"  # vLLM's log goes where ours goes
_NAMED: Final = "--served-model-name"
QUIET: Final = "--disable-uvicorn-access-log"  # the proxy's own says more


def serve(
    model: str,
    outside: ProxyOptions,
    voice: UserOutput,
    *,
    points: Sequence[str],
    probes: Sequence[str],
    vectors: Sequence[str],
    steering: bool,
    capture: str | None,
    arguments: Sequence[str],
    on_death: DeathPolicy,
    vllm_log: str | None,
) -> None:
    """The command `clairai serve`."""
    folder = runtime_dir()
    tapped = config(
        points=points,
        probes=probes,
        vectors=vectors,
        steering=steering,
        capture=None if capture is None else capture_setting(capture),
        runtime_dir=str(folder),
    )
    check_before_start(model, Settings.read(tapped["clairai"], os.environ), arguments, os.environ)
    log = _log(vllm_log, folder, outside.bind)
    private = PrivateSocket.within(folder)
    launch = EngineCommand(model, tapped, private, (*_name(model, arguments), QUIET, *arguments))
    run_service(
        launch,
        outside.settings(private.url, folder),
        outside,
        voice,
        log=log,
        on_death=on_death,
        banner=lambda: banner(_shown(model), outside.bind),
    )


def capture_setting(text: str) -> dict[str, Any]:
    """A folder, or all of the `capture` setting as JSON."""
    if not text.lstrip().startswith("{"):
        return {"folder": text}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--capture is {quote(text)}; give a folder, or a JSON object")
    return found


def banner(what: str, bind: ListenAddress) -> list[str]:
    """Where it is, and what one can do there."""
    key = "" if bind.api_key is None else "; both ask for the key"
    return [
        f"{what} is served on {bind.url}",
        f"dashboard in a browser, OpenAI's API under /v1{key}; "
        f"scores in a terminal: clairai sidecar; Ctrl-C stops everything",
    ]


def _log(chosen: str | None, folder: Path, bind: ListenAddress) -> EngineLog | None:
    if chosen == BESIDE:
        return None
    path = Path(chosen) if chosen else folder / f"vllm-{bind.port}.log"
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"{quote(str(path))} cannot be a log file; check --vllm-log")
    return EngineLog(path)


def _name(model: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A folder is served under its own name: its whole path is nobody's business."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    is_named = any(len(name) > len("--se") and _NAMED.startswith(name) for name in names)
    return () if is_named or not Path(model).exists() else (_NAMED, _shown(model))


def _shown(model: str) -> str:
    return Path(model).absolute().name if Path(model).exists() else model
