"""Makes the `clairai` fields of a response: what was applied, which weights, what was captured.

Runs in: the API server. The client does not learn where captured rows lie on this machine: it gets
an id to fetch them by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from clairai.errors import ClairaiError
from clairai.server.engine_rpc import EngineRpc
from clairai.server.steering_preview import SteeringPreview
from clairai.wire.capture_messages import Captured

WAIT_S: Final = 2.0
_MIN_PAUSE_S: Final = 0.005
_MAX_PAUSE_S: Final = 0.1
# The state of a request is the first of these that one of its answers is in.
_STATES: Final = ("failed", "open", "writing", "kept", "discarded")
_UNSETTLED: Final = ("open", "writing")

AskCaptures = Callable[[], Awaitable[Sequence[Captured]]]


class ResponseFields:
    """The `clairai` fields of one response."""

    def __init__(
        self,
        engine: EngineRpc,
        stream: int | None,
        preview: SteeringPreview,
        *,
        asks_for_capture: bool,
        label: str | None = None,
    ) -> None:
        """`stream` is None for a request that becomes several in the engine."""
        self._label = label
        self._engine, self._stream, self._preview = engine, stream, preview
        self.has_capture = stream is not None and asks_for_capture
        # Hashes inline vectors in a thread, while the engine works.
        self._completing = (
            asyncio.ensure_future(asyncio.to_thread(preview.complete)) if preview.inline else None
        )

    @property
    def is_empty(self) -> bool:
        """True if nothing will be added to the response."""
        is_silent = self._preview.applied is None and self._label is None
        return is_silent and not self.has_capture and not self._engine.weight_versions.can_change

    async def first(self) -> dict[str, Any] | None:
        """At the first token: what is applied, the capture's id, the version of the weights."""
        applied = self._preview.applied if self._completing is None else await self._completing
        fields = dict(applied or {})
        if self._label is not None:
            fields["label"] = self._label
        if self._stream is not None and self.has_capture:
            fields["capture"] = capture_fields(self._stream, ())
        try:
            version = await self._engine.weight_versions.version_of(self._stream)
        except Exception:  # whatever vLLM raises when the engine has ended: the answer is here
            version = None
        return fields | ({} if version is None else {"weights": version}) or None

    async def last(self) -> dict[str, Any] | None:
        """When the request has ended: what became of the captured rows."""
        stream = self._stream
        if stream is None or not self.has_capture:
            return None
        try:
            captured = await wait_settled(lambda: self._engine.captured(stream, is_ended=True))
        except Exception:  # whatever vLLM raises when the engine has ended: the answer is here
            reason = "the engine did not say what became of its rows; look into the folder"
            failed = {"state": "failed", "reason": reason}
            return {"capture": {**capture_fields(stream, ()), **failed}}
        return {"capture": capture_fields(stream, captured)}

    async def why_refused(self) -> ClairaiError | None:
        """Why the core refused the request; None if it did not, or cannot be asked."""
        if self._stream is None:
            return None
        try:
            return await self._engine.why_refused(self._stream)
        except Exception:  # whatever vLLM raises when the engine has ended: its own answer says so
            return None

    async def close(self) -> None:
        if self._completing is not None:
            await asyncio.gather(self._completing, return_exceptions=True)


def capture_fields(stream: int, captured: Sequence[Captured]) -> dict[str, Any]:
    """`rows` were given to the consumers, `lost` are missing at any of them."""
    states = [one.state for one in captured] or ["open"]
    fields: dict[str, Any] = {
        "id": f"{stream:016x}",
        "state": min(states, key=_STATES.index),
        "rows": sum(one.rows for one in captured),
        "lost": sum(one.lost for one in captured),
        "discarded": sum(one.discarded for one in captured),
    }
    reason = next((one.reason for one in captured if one.reason), "")
    return {**fields, "reason": reason} if reason else fields


def is_settled(captured: Sequence[Captured]) -> bool:
    """True if waiting longer would change nothing."""
    return bool(captured) and not any(one.state in _UNSETTLED for one in captured)


async def wait_settled(ask: AskCaptures) -> Sequence[Captured]:
    """What the engine says once all rows are safe, or after WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    pause_s = _MIN_PAUSE_S
    captured = await ask()
    while not is_settled(captured) and time.monotonic() < deadline_s:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        captured = await ask()
    return captured
