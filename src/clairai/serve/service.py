"""Takes a Launch and an address; runs that engine behind a proxy until told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from clairai.serve.engine import LOOK_PAUSE_S, EngineProcess
from clairai.serve.front import listen
from clairai.serve.launch import Launch
from clairai.serve.log import EngineLog
from clairai.serve.progress import progress
from clairai.serve.proxy import Outside, Running, running_proxy
from clairai.serve.supervise import Engine, OnDeath, Stop, Supervisor
from clairai.serve.voice import Voice
from clairai.sidecar.stopping import Stopping
from clairai.stream.health import Word
from clairai.stream.settings import ProxySettings

RING_S: Final = 5.0
Banner = Callable[[], Sequence[str]]


def run_service(
    launch: Launch,
    settings: ProxySettings,
    outside: Outside,
    voice: Voice,
    *,
    log: EngineLog | None,
    on_death: OnDeath,
    banner: Banner,
) -> None:
    """The proxy answers from the first moment on; whichever way this ends, all of it ends."""
    with Stopping() as stop, running_proxy(settings, listen(outside.bind)) as running:
        service = Service(launch, running, voice, stop, log=log, banner=banner)
        Supervisor(service, on_death=on_death).run(stop)


class Service:
    """What happens around an engine: shown here, told to the proxy."""

    def __init__(
        self,
        launch: Launch,
        running: Running,
        voice: Voice,
        stop: Stop,
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

    def await_ready(self, engine: Engine) -> bool:
        began_s = time.monotonic()
        with progress(self._voice.console, self._log, self.say) as shown:

            def tick() -> None:
                shown()
                self.check()
                stage = "starting" if self._log is None else self._log.stage()
                seconds = time.monotonic() - began_s
                self.tell(Word("starting", f"the engine is {stage}, {seconds:.0f} s"))

            if not engine.wait_ready(stop=self._stop, tick=tick):
                return False
        self._await_ring(engine)
        return True

    def _await_ring(self, engine: Engine) -> None:
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

    def tell(self, word: Word | None) -> None:
        self._running.proxy.health.tell(word)

    def say(self, line: str) -> None:
        self._voice.say(line)

    def check(self) -> None:
        self._running.front.check()
        if self._log is not None:
            self._log.trim()
