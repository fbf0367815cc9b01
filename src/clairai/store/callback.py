"""The capture consumer that calls a function with captured rows: the kind `callback`.

An entry point of the group `clairai.capture_consumers`. The engine's settings name the function,
`"call": "package.module:name"`; it runs on a thread of its own in the engine's process.

Runs in: the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, StoreStoppedError, quote
from clairai.store.block_queue import BlockQueue, Policy, QueuedBlock, RowCounts, SpillFile
from clairai.store.folder_consumers import (
    QUEUE_OPTIONS,
    check_options,
    limits_option,
    policy_option,
    spill_option,
)
from clairai.store.row_block import RequestNote, RowBlock, count_rows
from clairai.store.write import CLOSE_S, WriterState


@dataclass(frozen=True)
class Delivery:
    """What the function is called with: rows of any requests at one point."""

    about: Any  # the engine: model, weights, dtype, width, points
    block: RowBlock
    notes: Mapping[int, RequestNote]  # tags and steering of the requests in it

    @property
    def rows(self) -> NDArray[np.void]:
        """`stream`, `choice`, `position`, `token_id`, `phase` and `flags` of each row."""
        return self.block.rows_N

    def values(self) -> NDArray[np.float32]:
        """Decode the rows, one line each."""
        origin = self.block.origin
        return origin.make_encoder().decode(dict(self.block.arrays), width=origin.width)


CallbackFunction = Callable[[Delivery], object]


class CallbackConsumer:
    """Calls a function with the blocks of a queue, on a thread of its own."""

    def __init__(
        self,
        function: CallbackFunction,
        where: str,
        *,
        about: object,
        queue: BlockQueue,
        policy: Policy,
        spill: SpillFile | None = None,
    ) -> None:
        self.policy, self.where, self.state = policy, where, WriterState()
        self._function, self._about = function, about
        self._queue, self._spill = queue, spill
        self._thread = threading.Thread(target=self._call_all, name="clairai-call", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> RowCounts:
        return self._queue.counts

    def begin(
        self,
        stream: int,
        *,
        tags: Mapping[str, Any] | None,
        steering: Mapping[str, Any] | None,
        owner: str | None = None,
    ) -> None:
        self._queue.begin(stream, RequestNote.of(tags, steering, owner))

    def offer(self, block: RowBlock) -> bool:
        return self._queue.put(block)

    def finish(self, stream: int) -> None:
        self._queue.end(stream)

    def losses(self, stream: int) -> int:
        return self._queue.losses(stream)

    def flush(self, timeout_s: float) -> None:
        done = threading.Event()
        self._queue.put_marker(done)
        if not done.wait(timeout_s):
            raise StoreStoppedError(f"{self.where} took longer than {timeout_s:g} s")

    def close(self) -> None:
        """Call the function with all that was accepted. Raises StoreStoppedError if some failed."""
        self._queue.close()
        self._queue.put_marker(None)
        self._thread.join(CLOSE_S)
        counts = self._queue.counts
        if self._spill is not None and not self._thread.is_alive():
            self._spill.close()
        if missed := counts.lost + counts.pending:
            raise StoreStoppedError(f"{missed} accepted rows are lost: {self.state.reason}")

    def _call_all(self) -> None:
        """Run the thread `clairai-call`."""
        while True:
            for item in self._queue.get(None):
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, QueuedBlock):
                    self._call(item)

    def _call(self, item: QueuedBlock) -> None:
        try:
            self._function(Delivery(self._about, item.block, item.notes))
        except Exception as error:  # the function is a user's; its next call may succeed
            cause = f"{type(error).__name__}: {quote(str(error), 200)}"
            failed = WriterState("stopped", f"{self.where} failed, {cause}")
            self.state = failed.after(self.state)
            self._queue.count_lost(count_rows(item.block))
        else:
            self.state = WriterState().after(self.state)
            self._queue.count_committed(item.block.num_rows)


def callback(options: Mapping[str, Any], about: object) -> CallbackConsumer:
    """Call a function with the rows: `call`, `policy` and the queue's bounds."""
    check_options("callback", options, (*QUEUE_OPTIONS, "call"))
    policy = policy_option("callback", options)
    limits = limits_option("callback", options)
    function = _import_function(options.get("call"))
    folder = spill_option("callback", options)
    spill = None if folder is None else SpillFile(folder, limits.spill_nbytes)
    return CallbackConsumer(
        function,
        str(options["call"]),
        about=about,
        queue=BlockQueue(policy, limits.queue_nbytes, spill),
        policy=policy,
        spill=spill,
    )


callback.in_engine = True  # type: ignore[attr-defined]  # so that the function sees the engine's objects


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
