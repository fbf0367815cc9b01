"""Takes captured rows of a running engine; gives them to a folder, and on to an address.

The kinds `fs`, `npz` and `fsspec` of the entry points `clairai.capture_consumers`; each is called
with its options and what is known of the engine (`clairai.capture.consumers`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from clairai.errors import ClairaiError, ConfigError, StoreStoppedError
from clairai.points import quote
from clairai.store import options
from clairai.store.disk import LocalDisk
from clairai.store.limits import State
from clairai.store.rows import Block
from clairai.store.sending import Sender
from clairai.store.writer import Writer

Policy = Literal["block", "drop", "spill"]
SEND_EVERY_S: Final = 2.0
CLOSE_S: Final = 60.0


class FolderConsumer:
    """A folder of captures and its one writer."""

    def __init__(self, kind: str, given: Mapping[str, Any], *, layout: str) -> None:
        chosen = options.policy(kind, given)
        self.policy: Policy = cast(Policy, chosen)
        self.where = options.folder(kind, given)
        self._writer = Writer(
            self.where,
            layout=layout,
            policy=chosen,
            commits=options.commits(kind, given),
            limits=options.limits(kind, given),
            spill_to=options.spill_to(kind, given),
        )

    @property
    def state(self) -> State:
        return self._writer.state

    def begin(
        self, stream: int, *, tags: Mapping[str, Any] | None, steering: Mapping[str, Any] | None
    ) -> None:
        self._writer.begin(stream, tags=tags, steering=steering)

    def offer(self, block: Block) -> bool:
        return self._writer.offer(block)

    def finish(self, stream: int) -> None:
        self._writer.finish(stream)

    def losses(self, stream: int) -> int:
        return self._writer.losses(stream)

    def flush(self, timeout_s: float) -> None:
        self._writer.flush(timeout_s)

    def close(self) -> None:
        self._writer.close(CLOSE_S)


class AddressConsumer(FolderConsumer):
    """A folder, whose sealed shards a thread of its own sends on; the folder keeps all of it."""

    def __init__(self, kind: str, given: Mapping[str, Any], *, layout: str) -> None:
        url = given.get("url")
        if not isinstance(url, str):
            raise ConfigError(
                f'capture consumer {kind} needs "url": an address, as text, got {quote(url)}'
            )
        super().__init__(kind, given, layout=layout)
        try:
            self._sender = Sender(LocalDisk(self.where), url)
        except BaseException:
            super().close()
            raise
        self._refusal = ""  # why the address did not take the last shard
        self._rounds = 0  # of looking for what to send that have ended
        self._changed = threading.Condition()
        self._is_asked = self._is_ending = False
        self._thread = threading.Thread(target=self._send, name="clairai-send", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        state, refusal = self._writer.state, self._refusal
        return State("stopped", refusal) if state.name == "writing" and refusal else state

    def flush(self, timeout_s: float) -> None:
        """All that was accepted is committed, and at the address."""
        deadline_s = time.monotonic() + timeout_s
        super().flush(timeout_s)
        if not self._has_sent(deadline_s) or self._refusal:
            why = self._refusal or f"the address took longer than {timeout_s:g} s"
            raise StoreStoppedError(f"rows are committed here and not at the address: {why}")

    def close(self) -> None:
        """What the address does not take until the end is in the folder, and sent another time."""
        try:
            super().close()
        finally:
            self._has_sent(time.monotonic() + CLOSE_S)
            with self._changed:
                self._is_ending = True
                self._changed.notify_all()
            self._thread.join(CLOSE_S)

    def _has_sent(self, deadline_s: float) -> bool:
        """Whether a round that began after this call has ended by then."""
        with self._changed:
            wanted = self._rounds + 2  # one may be under way, and have looked before
            while self._rounds < wanted:
                self._is_asked = True
                self._changed.notify_all()
                if not self._changed.wait(deadline_s - time.monotonic()):
                    return False
        return True

    def _send(self) -> None:
        while not self._is_ending:
            self._refusal = self._round()
            with self._changed:
                self._rounds += 1
                self._changed.notify_all()
                if not self._is_asked:
                    self._changed.wait_for(lambda: self._is_asked or self._is_ending, SEND_EVERY_S)
                self._is_asked = False

    def _round(self) -> str:
        """Send all there is; why not, if not."""
        try:
            for _ in self._sender.send():
                pass
        except ClairaiError as error:
            return error.reason
        except OSError as error:
            return f"the folder cannot be read, {error.strerror}"
        return ""


def fs(given: Mapping[str, Any], _: object) -> FolderConsumer:
    """Sealed shards in a folder: `folder`, `layout`, `policy` and the writer's bounds."""
    checked = options.checked("fs", given, (*options.WRITER, "layout"))
    return FolderConsumer("fs", checked, layout=options.layout("fs", checked))


def npz(given: Mapping[str, Any], _: object) -> FolderConsumer:
    """An .npz for each request and point, in a folder."""
    checked = options.checked("npz", given, options.WRITER)
    return FolderConsumer("npz", checked, layout="npz")


def fsspec(given: Mapping[str, Any], _: object) -> AddressConsumer:
    """As `fs`, and the folder again at `url`, any address that fsspec knows."""
    checked = options.checked("fsspec", given, (*options.WRITER, "layout", "url"))
    return AddressConsumer("fsspec", checked, layout=options.layout("fsspec", checked))
