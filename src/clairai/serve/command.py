"""Takes a model and what to tap; serves it with vLLM in the foreground until told to stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from clairai.errors import EngineGoneError
from clairai.offline import config
from clairai.points import MAX_LAYER
from clairai.probe.files import load_many
from clairai.serve.engine import LOOK_PAUSE_S, EngineProcess
from clairai.serve.launch import Bind, Launch
from clairai.settings import Settings, plan
from clairai.sidecar.run import say
from clairai.sidecar.stopping import Stopping


def serve(
    model: str,
    bind: Bind,
    *,
    points: Sequence[str],
    probes: Sequence[str],
    arguments: Sequence[str],
) -> None:
    """The command `clairai serve`; vLLM's log is shown as vLLM shows it."""
    additional = config(points=points, probes=probes)
    _check(Settings.parse(additional["clairai"]))
    launch = Launch(model, additional, bind, tuple(arguments))
    with Stopping() as stop, EngineProcess(launch) as engine:
        if engine.wait_ready(stop=stop):
            say(f"clairai: serving {model} on {bind.url}; in another terminal: clairai sidecar")
            watch_over(engine, stop)


def watch_over(engine: EngineProcess, stop: Callable[[], bool]) -> None:
    """Return when told to; EngineGoneError if the engine ends first."""
    while not stop():
        if not engine.is_alive():
            raise EngineGoneError(engine.epitaph())
        time.sleep(LOOK_PAUSE_S)


def _check(settings: Settings) -> None:
    """Find now what the engine would only find after it has loaded."""
    if settings.points:
        for source in settings.probes:
            load_many(source)
    else:  # also where the seeds' variables say what to tap
        plan(settings, num_layers=MAX_LAYER + 1, environ=os.environ)
