"""Takes captured rows of a running engine; gives them to a folder, and on to an address.

The kinds `fs`, `npz` and `fsspec` of the entry points `clairai.capture_consumers`; each is called
with its options and what is known of the engine (`clairai.capture.consumers`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from clairai.errors import ClairaiError, ConfigError, StoreStoppedError
from clairai.points import quote
from clairai.store.block_queue import POLICIES
from clairai.store.commit_shards import LAYOUTS
from clairai.store.disk import LocalDisk
from clairai.store.row_block import RowBlock
from clairai.store.send_shards import ShardSender
from clairai.store.write import COMMITS, Writer, WriterLimits, WriterState

Policy = Literal["block", "drop", "spill"]
SEND_EVERY_S: Final = 2.0
CLOSE_S: Final = 60.0


class FolderConsumer:
    """A folder of captures and its one writer."""

    def __init__(self, kind: str, given: Mapping[str, Any], *, layout: str) -> None:
        chosen = policy_option(kind, given)
        self.policy: Policy = cast(Policy, chosen)
        self.where = folder_option(kind, given)
        self._writer = Writer(
            self.where,
            layout=layout,
            policy=chosen,
            commits=commits_option(kind, given),
            limits=limits_option(kind, given),
            spill_to=spill_option(kind, given),
        )

    @property
    def state(self) -> WriterState:
        return self._writer.state

    def begin(
        self, stream: int, *, tags: Mapping[str, Any] | None, steering: Mapping[str, Any] | None
    ) -> None:
        self._writer.begin(stream, tags=tags, steering=steering)

    def offer(self, block: RowBlock) -> bool:
        return self._writer.offer(block)

    def finish(self, stream: int) -> None:
        self._writer.finish(stream)

    def losses(self, stream: int) -> int:
        return self._writer.losses(stream)

    def flush(self, timeout_s: float) -> None:
        self._writer.flush(timeout_s)

    def close(self) -> None:
        self._writer.close(CLOSE_S)


class FsspecConsumer(FolderConsumer):
    """A folder, whose sealed shards a thread of its own sends on; the folder keeps all of it."""

    def __init__(self, kind: str, given: Mapping[str, Any], *, layout: str) -> None:
        url = given.get("url")
        if not isinstance(url, str):
            raise ConfigError(
                f'capture consumer {kind} needs "url": an address, as text, got {quote(url)}'
            )
        super().__init__(kind, given, layout=layout)
        try:
            self._sender = ShardSender(LocalDisk(self.where), url)
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
    def state(self) -> WriterState:
        state, refusal = self._writer.state, self._refusal
        return WriterState("stopped", refusal) if state.name == "writing" and refusal else state

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
    checked = check_options("fs", given, (*WRITER_OPTIONS, "layout"))
    return FolderConsumer("fs", checked, layout=layout_option("fs", checked))


def npz(given: Mapping[str, Any], _: object) -> FolderConsumer:
    """An .npz for each request and point, in a folder."""
    checked = check_options("npz", given, WRITER_OPTIONS)
    return FolderConsumer("npz", checked, layout="npz")


def fsspec(given: Mapping[str, Any], _: object) -> FsspecConsumer:
    """As `fs`, and the folder again at `url`, any address that fsspec knows."""
    checked = check_options("fsspec", given, (*WRITER_OPTIONS, "layout", "url"))
    return FsspecConsumer("fsspec", checked, layout=layout_option("fsspec", checked))


# MERGED
# Takes the options of a capture consumer as settings have them; gives a writer's arguments.


_MIB: Final = {
    "shard_mib": "shard_nbytes",
    "queue_mib": "queue_nbytes",
    "spill_mib": "spill_nbytes",
    "reserve_mib": "reserve_nbytes",
}
_MAX_MIB: Final = 1 << 20
_MAX_SEAL_S: Final = 3600.0
QUEUE_OPTIONS: Final = ("policy", "spill_to", "queue_mib", "spill_mib")
WRITER_OPTIONS: Final = (
    *QUEUE_OPTIONS,
    "folder",
    "shard_mib",
    "reserve_mib",
    "seal_after_s",
    "commits",
)


def check_options(kind: str, given: Mapping[str, Any], known: tuple[str, ...]) -> Mapping[str, Any]:
    """ConfigError if there are others than the known."""
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"capture consumer {kind}: unknown option {quote(unknown)}; known: {', '.join(known)}"
        )
    return given


def folder_option(kind: str, given: Mapping[str, Any]) -> str:
    path = given.get("folder")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f'capture consumer {kind} needs "folder": a path, as text, got {quote(path)}'
        )
    return os.path.abspath(path)


def layout_option(kind: str, given: Mapping[str, Any]) -> str:
    return _choice_option(kind, "layout", given.get("layout", LAYOUTS[0]), LAYOUTS)


def commits_option(kind: str, given: Mapping[str, Any]) -> str:
    return _choice_option(kind, "commits", given.get("commits", COMMITS[0]), COMMITS)


def policy_option(kind: str, given: Mapping[str, Any]) -> str:
    chosen = _choice_option(kind, "policy", given.get("policy", "drop"), POLICIES)
    if (chosen == "spill") != ("spill_to" in given):
        raise ConfigError(
            f'capture consumer {kind}: "policy": "spill" and "spill_to": a folder go together; '
            "give both, or none"
        )
    return chosen


def spill_option(kind: str, given: Mapping[str, Any]) -> str | None:
    path = given.get("spill_to")
    if path is not None and (not isinstance(path, str) or not path):
        raise ConfigError(f"capture consumer {kind}: spill_to must be a path, got {quote(path)}")
    return path


def limits_option(kind: str, given: Mapping[str, Any]) -> WriterLimits:
    sizes = {
        field: _mib(kind, name, given[name]) << 20 for name, field in _MIB.items() if name in given
    }
    if "seal_after_s" in given:
        return WriterLimits(**sizes, seal_after_s=_seconds(kind, given["seal_after_s"]))
    return WriterLimits(**sizes)


def _mib(kind: str, name: str, value: object) -> int:
    low = 0 if name == "reserve_mib" else 1
    if type(value) is int and low <= value <= _MAX_MIB:
        return value
    raise ConfigError(
        f"capture consumer {kind}: {name} must be a whole number of {low} to {_MAX_MIB}, "
        f"got {quote(value)}"
    )


def _seconds(kind: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 < value <= _MAX_SEAL_S:  # type: ignore[operator]  # false for NaN too
        return float(value)  # type: ignore[arg-type]
    raise ConfigError(
        f"capture consumer {kind}: seal_after_s must be above 0 and at most {_MAX_SEAL_S:g}, "
        f"got {quote(value)}"
    )


def _choice_option(kind: str, name: str, value: object, known: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in known:
        return value
    raise ConfigError(
        f"capture consumer {kind}: {name} must be one of {', '.join(known)}, got {quote(value)}"
    )
