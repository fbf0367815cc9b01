"""Takes captured rows of a running engine; gives them to a function, in the engine's own process.

The kind `callback` of the entry points `clairai.capture_consumers`. The function is named in the
engine's settings, `"call": "package.module:name"`, and runs on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, StoreStoppedError
from clairai.points import quote
from clairai.store import folder_consumers
from clairai.store.block_queue import BlockQueue, SpillFile
from clairai.store.codecs.registry import named
from clairai.store.folder_consumers import CLOSE_S, Policy
from clairai.store.row_block import NotedBlock, RequestNote, RowBlock
from clairai.store.write import WriterState

_WRITING: Final = WriterState()


@dataclass(frozen=True)
class Delivery:
    """What the function is called with: rows of any requests at one point."""

    about: Any  # the engine: model, weights, dtype, width, points
    block: RowBlock
    notes: Mapping[int, RequestNote]  # tags and steering of the requests in it

    @property
    def rows(self) -> NDArray[np.void]:
        """Of each row `stream`, `choice`, `position`, `token_id`, `phase`, `flags`."""
        return self.block.rows_N

    def values(self) -> NDArray[np.float32]:
        """The rows decoded, one line each."""
        origin = self.block.origin
        encoder = named(origin.encoder, msgspec.json.decode(origin.parameters))
        return encoder.decode(dict(self.block.arrays), width=origin.width)


CallbackFunction = Callable[[Delivery], object]


class CallbackConsumer:
    """A function and the queue in front of it."""

    def __init__(
        self,
        function: CallbackFunction,
        where: str,
        *,
        about: object,
        intake: BlockQueue,
        policy: Policy,
        spill: SpillFile | None = None,
    ) -> None:
        self.policy, self.where, self.state = policy, where, _WRITING
        self._function, self._about = function, about
        self._intake, self._spill = intake, spill
        self._notes: dict[int, RequestNote] = {}
        self._thread = threading.Thread(target=self._call_all, name="clairai-call", daemon=True)
        self._thread.start()

    def begin(
        self, stream: int, *, tags: Mapping[str, Any] | None, steering: Mapping[str, Any] | None
    ) -> None:
        self._notes[stream] = RequestNote.of(tags, steering)

    def offer(self, block: RowBlock) -> bool:
        streams = np.unique(block.rows_N["stream"]).tolist()
        notes = {stream: self._notes[stream] for stream in streams if stream in self._notes}
        return self._intake.put(NotedBlock(block, notes))

    def finish(self, stream: int) -> None:
        self._notes.pop(stream, None)

    def losses(self, stream: int) -> int:
        return self._intake.losses(stream)

    def flush(self, timeout_s: float) -> None:
        done = threading.Event()
        self._intake.put_other(done)
        if not done.wait(timeout_s):
            raise StoreStoppedError(f"{self.where} took longer than {timeout_s:g} s")

    def close(self) -> None:
        """The function gets what was accepted; StoreStoppedError if it failed with some of it."""
        self._intake.close()
        self._intake.put_other(None)
        self._thread.join(CLOSE_S)
        counts = self._intake.counts
        if self._spill is not None and not self._thread.is_alive():
            self._spill.close()
        if missed := counts.lost + counts.pending:
            raise StoreStoppedError(f"{missed} accepted rows are lost: {self.state.reason}")

    def _call_all(self) -> None:
        while True:
            for item in self._intake.get(None):
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, NotedBlock):
                    self._call(item)

    def _call(self, given: NotedBlock) -> None:
        try:
            self._function(Delivery(self._about, given.block, given.notes))
        except Exception as error:  # it is not ours, and the next rows may go well
            said = f"{type(error).__name__}: {quote(str(error), 200)}"
            self.state = WriterState("stopped", f"{self.where} failed, {said}")
            self._intake.lose(given.streams())
        else:
            self.state = _WRITING
            self._intake.committed(given.num_rows)


def callback(given: Mapping[str, Any], about: object) -> CallbackConsumer:
    """`call`, `policy` and the queue's bounds."""
    checked = folder_consumers.check_options(
        "callback", given, (*folder_consumers.QUEUE_OPTIONS, "call")
    )
    policy = folder_consumers.policy_option("callback", checked)
    limits = folder_consumers.limits_option("callback", checked)
    function = _import_function(checked.get("call"))
    folder = folder_consumers.spill_option("callback", checked)
    spill = None if folder is None else SpillFile(folder, limits.spill_nbytes)
    return CallbackConsumer(
        function,
        str(checked["call"]),
        about=about,
        intake=BlockQueue(policy, limits.queue_nbytes, spill),
        policy=cast(Policy, policy),
        spill=spill,
    )


callback.in_engine = True  # type: ignore[attr-defined]  # where the function's own objects are


def _import_function(name: object) -> CallbackFunction:
    module, colon, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not (module and colon and attribute):
        raise ConfigError(
            f'capture consumer callback needs "call": "package.module:name", got {quote(name)}'
        )
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"capture consumer callback: {quote(name)} cannot be imported, {error}"
        ) from None
    if not callable(found):
        raise ConfigError(f"capture consumer callback: {quote(name)} is no function")
    return cast(CallbackFunction, found)
