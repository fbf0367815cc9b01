"""The capture consumers that write to a folder: the kinds `fs`, `npz` and `fsspec`.

Each kind is an entry point of the group `clairai.capture_consumers`: a function of the consumer's
options and of what is known about the engine (`clairai.capture.consumers`). The functions that read
single options are used by `callback` too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, cast

from clairai.errors import ClairaiError, ConfigError, StoreStoppedError, quote
from clairai.store.block_queue import POLICIES, Policy
from clairai.store.commit_shards import LAYOUTS
from clairai.store.disk import UnmappedDisk
from clairai.store.send_shards import ShardSender
from clairai.store.write import CLOSE_S, COMMITS, Writer, WriterLimits, WriterState

SEND_EVERY_S: Final = 2.0
SEND_SILENT_S: Final = 60.0  # an address that takes no shard for so long is said to be stopped
QUEUE_OPTIONS: Final = ("policy", "spill_to", "queue_mib", "spill_mib")
FOLDER_OPTIONS: Final = (
    *QUEUE_OPTIONS,
    *("folder", "shard_mib", "reserve_mib", "seal_after_s", "commits"),
)
_SIZE_OPTIONS: Final = {
    "shard_mib": "shard_nbytes",
    "queue_mib": "queue_nbytes",
    "spill_mib": "spill_nbytes",
    "reserve_mib": "reserve_nbytes",
}
_MAX_MIB: Final = 1 << 20
_MAX_SEAL_S: Final = 3600.0


class FolderConsumer(Writer):
    """A folder of captures and its one writer."""

    def __init__(self, kind: str, options: Mapping[str, Any], *, layout: str) -> None:
        self.policy: Policy = policy_option(kind, options)
        self.where = folder_option(kind, options)
        super().__init__(
            self.where,
            layout=layout,
            policy=self.policy,
            commits=commits_option(kind, options),
            limits=limits_option(kind, options),
            spill_to=spill_option(kind, options),
        )


class FsspecConsumer(FolderConsumer):
    """A folder whose committed shards a thread also sends to an address; the folder keeps them."""

    def __init__(self, kind: str, options: Mapping[str, Any], *, layout: str) -> None:
        url = options.get("url")
        if not isinstance(url, str):
            raise ConfigError(
                f'capture consumer {kind} needs "url": an address, as text, got {quote(url)}'
            )
        super().__init__(kind, options, layout=layout)
        try:
            self._sender = ShardSender(UnmappedDisk(self.where), url)
        except BaseException:
            super().close()
            raise
        self._send_error = ""  # why the last round of sending failed; empty if it did not
        self._send_state = WriterState()
        self._sending_since_s: float | None = None  # the shard that is under way
        self._num_rounds = 0  # rounds of sending that have ended
        self._changed = threading.Condition()
        self._is_asked = self._is_stopping = False
        self._send_thread = threading.Thread(
            target=self._send_all, name="clairai-send", daemon=True
        )
        self._send_thread.start()

    @property
    def state(self) -> WriterState:
        state = super().state
        if state.name != "writing":
            return state
        since_s = self._sending_since_s
        silent_s = 0.0 if since_s is None else time.monotonic() - since_s
        if silent_s < SEND_SILENT_S:
            return self._send_state if self._send_error else state
        reason = f"the address has taken nothing for {SEND_SILENT_S:g} s and more"
        return WriterState("stopped", reason, time.time() - silent_s)

    def flush(self, timeout_s: float = CLOSE_S) -> None:
        """Return when everything accepted so far is committed and at the address."""
        deadline_s = time.monotonic() + timeout_s
        super().flush(timeout_s)
        if not self._wait_until_sent(deadline_s) or self._send_error:
            why = self._send_error or f"the address took longer than {timeout_s:g} s"
            raise StoreStoppedError(f"rows are committed here and not at the address: {why}")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Commit and send; what the address has not taken stays in the folder, to be sent later."""
        try:
            super().close(timeout_s)
        finally:
            self._wait_until_sent(time.monotonic() + CLOSE_S)
            with self._changed:
                self._is_stopping = True
                self._changed.notify_all()
            self._send_thread.join(CLOSE_S)

    def _wait_until_sent(self, deadline_s: float) -> bool:
        """Return whether a round that began after this call has ended by then."""
        with self._changed:
            wanted = self._num_rounds + 2  # a round under way may have looked too early
            while self._num_rounds < wanted:
                self._is_asked = True
                self._changed.notify_all()
                if not self._changed.wait(deadline_s - time.monotonic()):
                    return False
        return True

    def _send_all(self) -> None:
        """Run the thread `clairai-send`."""
        while not self._is_stopping:
            self._send_error = self._send_round()
            state = WriterState("stopped", self._send_error) if self._send_error else WriterState()
            self._send_state = state.after(self._send_state)
            with self._changed:
                self._num_rounds += 1
                self._changed.notify_all()
                if not self._is_asked:
                    self._changed.wait_for(
                        lambda: self._is_asked or self._is_stopping, SEND_EVERY_S
                    )
                self._is_asked = False

    def _send_round(self) -> str:
        """Send every shard that was not sent. Returns why that failed, or an empty text."""
        self._sending_since_s = time.monotonic()
        try:
            for _ in self._sender.send():
                self._sending_since_s = time.monotonic()
        except ClairaiError as error:
            return error.reason
        except OSError as error:
            return f"the folder cannot be read, {error.strerror}"
        except Exception as error:  # without this the thread would end and nobody would know
            return f"sending failed, {type(error).__name__}: {quote(str(error), 200)}"
        finally:
            self._sending_since_s = None
        return ""


def fs(options: Mapping[str, Any], _: object) -> FolderConsumer:
    """Write sealed shards to a folder: `folder`, `layout`, `policy` and the writer's bounds."""
    check_options("fs", options, (*FOLDER_OPTIONS, "layout"))
    return FolderConsumer("fs", options, layout=layout_option("fs", options))


def npz(options: Mapping[str, Any], _: object) -> FolderConsumer:
    """Write an .npz for each request and point to a folder."""
    check_options("npz", options, FOLDER_OPTIONS)
    return FolderConsumer("npz", options, layout="npz")


def fsspec(options: Mapping[str, Any], _: object) -> FsspecConsumer:
    """Write as `fs` does, and copy the folder to `url`, any address that fsspec knows."""
    check_options("fsspec", options, (*FOLDER_OPTIONS, "layout", "url"))
    return FsspecConsumer("fsspec", options, layout=layout_option("fsspec", options))


# Options of a consumer, as the engine's settings have them


def check_options(kind: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ConfigError for an option that is not known."""
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"capture consumer {kind}: unknown option {quote(unknown)}; known: {', '.join(known)}"
        )


def folder_option(kind: str, options: Mapping[str, Any]) -> str:
    path = options.get("folder")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f'capture consumer {kind} needs "folder": a path, as text, got {quote(path)}'
        )
    return os.path.abspath(path)


def layout_option(kind: str, options: Mapping[str, Any]) -> str:
    return _choice_option(kind, "layout", options.get("layout", LAYOUTS[0]), LAYOUTS)


def commits_option(kind: str, options: Mapping[str, Any]) -> str:
    return _choice_option(kind, "commits", options.get("commits", COMMITS[0]), COMMITS)


def policy_option(kind: str, options: Mapping[str, Any]) -> Policy:
    policy = _choice_option(kind, "policy", options.get("policy", "drop"), POLICIES)
    if (policy == "spill") != ("spill_to" in options):
        raise ConfigError(
            f'capture consumer {kind}: "policy": "spill" and "spill_to": a folder go together; '
            "give both, or none"
        )
    return cast(Policy, policy)


def spill_option(kind: str, options: Mapping[str, Any]) -> str | None:
    path = options.get("spill_to")
    if path is not None and (not isinstance(path, str) or not path):
        raise ConfigError(f"capture consumer {kind}: spill_to must be a path, got {quote(path)}")
    return path


def limits_option(kind: str, options: Mapping[str, Any]) -> WriterLimits:
    sizes = {
        field: _check_mib(kind, name, options[name]) << 20
        for name, field in _SIZE_OPTIONS.items()
        if name in options
    }
    if "seal_after_s" in options:
        return WriterLimits(**sizes, seal_after_s=_check_seconds(kind, options["seal_after_s"]))
    return WriterLimits(**sizes)


def _check_mib(kind: str, name: str, value: object) -> int:
    low = 0 if name == "reserve_mib" else 1
    if type(value) is int and low <= value <= _MAX_MIB:
        return value
    raise ConfigError(
        f"capture consumer {kind}: {name} must be a whole number of {low} to {_MAX_MIB}, "
        f"got {quote(value)}"
    )


def _check_seconds(kind: str, value: object) -> float:
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
