"""The heartbeat of vLLM's engine core: it beats when the core's busy loop goes round.

EngineCoreProc.run_busy_loop           v1/engine/core.py       0.26:1358   0.32:1547
DPEngineCoreProc.run_busy_loop         v1/engine/core.py       0.26:2024   0.32:2328
EngineCoreProc.input_queue             v1/engine/core.py       0.26:1014   0.32:1147
EngineCoreProc._invoke_utility_method  v1/engine/core.py       0.26:1534   0.32:1736
EngineCoreRequestType.WAKEUP           v1/engine/__init__.py   0.26 and 0.32

The loop empties its input queue before every step and waits for it when it has nothing to do. A
thread puts an entry without meaning (vLLM's own `WAKEUP`) into that queue twice a second, and beats
when it was taken. So a step costs nothing more, and a step that does not end stops the beat: the
core waits in it for its workers and their devices. Installed only under a launcher that watches.

Runs in: the engine core.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec

from clairai.local.heartbeat import Heartbeat, has_heartbeat
from clairai.wire.control_messages import CONTROL_METHOD, Control
from clairai.wire.weights_messages import RankControl, WeightsControl

ROUND_S: Final = 0.5
_DECODER: Final = msgspec.msgpack.Decoder(Control)
_HEARTBEAT: Final = "clairai_heartbeat"


def install_heartbeat(core_class: Any, wake_up: tuple[Any, Any]) -> None:
    """Wrap `EngineCoreProc` and what derives from it: a core beats from its first round on.

    `wake_up` is the entry without meaning that is put into its queue.
    Not its `__init__`, which already runs when vLLM loads the plugin in the core's process.
    """
    for kind in (core_class, *core_class.__subclasses__()):
        if "run_busy_loop" in vars(kind):
            kind.run_busy_loop = _wrap_busy_loop(kind.run_busy_loop, wake_up)


def _wrap_busy_loop(original: Any, wake_up: tuple[Any, Any]) -> Any:
    @functools.wraps(original)
    def run_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _HEARTBEAT not in vars(self):
            _start_heartbeat(self, wake_up)
        return original(self, *args, **kwargs)

    return run_busy_loop


def _start_heartbeat(core: Any, wake_up: tuple[Any, Any]) -> None:
    heartbeat = Heartbeat.open("engine-core")
    if heartbeat is None:
        return
    setattr(core, _HEARTBEAT, heartbeat)
    original = core._invoke_utility_method

    @functools.wraps(original)
    def invoke(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "collective_rpc":  # `expect_long_call` knows which of these take long
            return original(name, *args, **kwargs)
        with heartbeat.during_call():  # may load an adapter, or go to sleep
            return original(name, *args, **kwargs)

    core._invoke_utility_method = invoke
    loop = LoopHeartbeat(heartbeat, core.input_queue, wake_up)
    threading.Thread(target=loop.run, name="clairai-heartbeat", daemon=True).start()


def expect_long_call(core: Any, method: Any, args: Any) -> AbstractContextManager[None]:
    """Around `EngineCore.collective_rpc`: new weights may take minutes, other control may not."""
    heartbeat: Heartbeat | None = vars(core).get(_HEARTBEAT)
    if heartbeat is None or (method == CONTROL_METHOD and not _is_about_weights(args)):
        return contextlib.nullcontext()
    return heartbeat.during_call()


def _is_about_weights(args: Any) -> bool:
    try:
        return isinstance(_DECODER.decode(args[0]), WeightsControl | RankControl)
    except (msgspec.MsgspecError, TypeError, IndexError, UnicodeDecodeError, RecursionError):
        return False  # the workers say what is wrong with it


class LoopHeartbeat:
    """Beats whenever `queue` has given away the entry that was put into it last."""

    def __init__(self, heartbeat: Heartbeat, queue: Any, entry: tuple[Any, Any]) -> None:
        self._heartbeat, self._queue, self._kind = heartbeat, queue, entry
        self._last: tuple[Any, Any] | None = None
        self._round = threading.Event()

    def run(self) -> None:
        while True:
            self.go_round()
            self._round.wait(ROUND_S)

    def go_round(self) -> None:
        """Beat and put the next entry, unless the last one still waits."""
        if self._is_waiting():
            return
        if self._last is not None:
            self._heartbeat.beat()
        self._last = (self._kind[0], self._kind[1])  # a new object: it is found by identity
        self._queue.put_nowait(self._last)

    def _is_waiting(self) -> bool:
        with self._queue.mutex:
            return any(entry is self._last for entry in self._queue.queue)


def register_worker() -> None:
    """A worker in a process of its own is watched too; the core's step waits for it."""
    if not has_heartbeat(os.getpid()):
        Heartbeat.open("worker")
