"""The command `clairai serve`: one engine behind the proxy, until told to stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from clairai.errors import ConfigError, quote
from clairai.launch.engine_command import (
    EngineCommand,
    ListenAddress,
    PrivateSocket,
    is_cpu_build,
    upstream_idle_s,
)
from clairai.launch.engine_folder import remove_stale_folders
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import POLL_S, EngineProcess
from clairai.launch.liveness import LivenessLimits
from clairai.launch.preflight import check_before_start
from clairai.launch.proxy_thread import (
    ProxyOptions,
    ProxyThread,
    listen,
    raise_descriptor_limit,
    run_proxy,
)
from clairai.launch.supervisor import DeathPolicy, StopRequest, SupervisedEngine, Supervisor
from clairai.launch.user_output import UserOutput, show_start_progress
from clairai.library.config import config
from clairai.local.private_socket import runtime_dir
from clairai.local.stop_signal import StopSignal
from clairai.proxy.engine_facts import HealthStatus
from clairai.proxy.proxy import Proxy
from clairai.proxy.proxy_settings import ProxySettings
from clairai.settings import Settings

LOG_TO_OUTPUT: Final = "-"  # vLLM's log goes where ours goes
# The proxy's own access log says more.
NO_ACCESS_LOG: Final = "--disable-uvicorn-access-log"
RING_TIMEOUT_S: Final = 5.0
CPU_STALL_S: Final = 600.0  # a long prompt of a large model is one step of minutes
_NAME_OPTION: Final = "--served-model-name"
Banner = Callable[[], Sequence[str]]


def serve(
    model: str,
    options: ProxyOptions,
    output: UserOutput,
    *,
    points: Sequence[str],
    probes: Sequence[str],
    vectors: Sequence[str],
    steering: bool,
    capture: str | None,
    arguments: Sequence[str],
    on_death: DeathPolicy,
    stall_limit_s: float | None,
    vllm_log: str | None,
) -> None:
    """The command `clairai serve`."""
    folder = runtime_dir()
    additional_config = config(
        points=points,
        probes=probes,
        vectors=vectors,
        steering=steering,
        capture=None if capture is None else parse_capture_option(capture),
        runtime_dir=str(folder),
    )
    settings = Settings.read(additional_config["clairai"], os.environ)
    check_before_start(model, settings, arguments, os.environ)
    log = _open_log(vllm_log, folder, options.address)
    private = PrivateSocket.within(folder)
    arguments = (*_name_arguments(model, arguments), NO_ACCESS_LOG, *arguments)
    run_service(
        EngineCommand(model, additional_config, private, arguments),
        options.settings(private.url, folder, upstream_idle_s=upstream_idle_s(arguments)),
        options.address,
        output,
        log=log,
        on_death=on_death,
        limits=choose_limits(stall_limit_s),
        banner=lambda: make_banner(_shown_name(model), options.address),
    )


def run_service(
    command: EngineCommand,
    settings: ProxySettings,
    address: ListenAddress,
    output: UserOutput,
    *,
    log: EngineLog | None,
    on_death: DeathPolicy,
    limits: LivenessLimits,
    banner: Banner,
) -> None:
    """Run engine and proxy until told to stop. The proxy answers before the engine serves."""
    raise_descriptor_limit()
    with StopSignal() as stop, run_proxy(settings, listen(address)) as (thread, proxy):
        if command.runtime_folder is not None:
            remove_stale_folders(command.runtime_folder)
        service = EngineService(
            command, thread, proxy, output, stop, log=log, limits=limits, banner=banner
        )
        Supervisor(service, on_death=on_death).run(stop)


def choose_limits(stall_limit_s: float | None) -> LivenessLimits:
    """How long the engine may make no progress; one step of a CPU may take minutes."""
    if stall_limit_s is None:
        stall_limit_s = CPU_STALL_S if is_cpu_build() else LivenessLimits.stall
    return LivenessLimits(
        slow=min(LivenessLimits.slow, stall_limit_s / 2),
        stall=stall_limit_s,
        call=max(LivenessLimits.call, stall_limit_s),
    )


class EngineService:
    """The supervisor's EngineHost: reports an engine's state to the user and to the proxy."""

    def __init__(
        self,
        command: EngineCommand,
        thread: ProxyThread,
        proxy: Proxy,
        output: UserOutput,
        stop: StopRequest,
        *,
        log: EngineLog | None,
        limits: LivenessLimits,
        banner: Banner,
    ) -> None:
        self._command, self._thread, self._proxy = command, thread, proxy
        self._output, self._stop = output, stop
        self._log, self._limits, self._banner = log, limits, banner

    def start(self) -> EngineProcess:
        where = "" if self._log is None else f"; its log: {self._log.path}"
        self.say(f"starting vLLM{where}")
        self._proxy.set_engine_ending(is_ending=False)
        return EngineProcess(self._command, log=self._log, limits=self._limits)

    def wait_ready(self, engine: SupervisedEngine) -> bool:
        began_s = time.monotonic()
        with show_start_progress(self._output.console, self._log, self.say) as show:

            def tick() -> None:
                show()
                self.check()
                stage = "starting" if self._log is None else self._log.stage()
                seconds = time.monotonic() - began_s
                self.set_health(HealthStatus("starting", f"the engine is {stage}, {seconds:.0f} s"))

            if not engine.wait_ready(stop=self._stop, tick=tick):
                return False
        self._wait_for_ring(engine)
        return True

    def _wait_for_ring(self, engine: SupervisedEngine) -> None:
        """So that the scores of the first answers are not missed."""
        deadline_s = time.monotonic() + RING_TIMEOUT_S
        while not self._proxy.is_reading and not self._stop() and engine.is_alive():
            if time.monotonic() > deadline_s:
                self.say("warning: the engine serves, and its ring cannot be read: no scores")
                return
            time.sleep(POLL_S)

    def announce(self) -> None:
        self._output.announce(self._banner())

    def set_health(self, status: HealthStatus | None) -> None:
        self._proxy.health.set_status(status)

    def end_answers(self) -> None:
        self._proxy.end_answers()

    def expect_end(self) -> None:
        self._proxy.set_engine_ending(is_ending=True)

    def say(self, line: str) -> None:
        self._output.say(line)

    def check(self) -> None:
        self._thread.check()
        if self._log is not None:
            self._log.trim()


def parse_capture_option(text: str) -> dict[str, Any]:
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


def make_banner(what: str, address: ListenAddress) -> list[str]:
    """Where it serves, and what one can do there."""
    key = "; both ask for the key" if address.needs_key else ""
    return [
        f"{what} is served on {address.url}",
        f"dashboard in a browser, OpenAI's API under /v1{key}; "
        f"scores in a terminal: clairai sidecar; Ctrl-C stops everything",
    ]


def _open_log(chosen: str | None, folder: Path, address: ListenAddress) -> EngineLog | None:
    if chosen == LOG_TO_OUTPUT:
        return None
    path = Path(chosen) if chosen else folder / f"vllm-{address.port}.log"
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"{quote(str(path))} cannot be a log file; check --vllm-log")
    return EngineLog(path)


def _name_arguments(model: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A folder is served under its last name, so that clients do not see its path."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    is_named = any(len(name) > len("--se") and _NAME_OPTION.startswith(name) for name in names)
    return () if is_named or not Path(model).exists() else (_NAME_OPTION, _shown_name(model))


def _shown_name(model: str) -> str:
    return Path(model).absolute().name if Path(model).exists() else model
