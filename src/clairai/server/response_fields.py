"""Takes what the engine says of a request's captured rows; gives what its client is told of them.

Where the rows lie on this machine is not the client's to know: it gets an id to ask for them by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from clairai.errors import ClairaiError
from clairai.server.core_cache import CoreCache
from clairai.server.response_writer import ResponseFields
from clairai.server.weight_versions import WeightVersions
from clairai.wire.capture_messages import Captured

WAIT_S: Final = 2.0
_FIRST_WAIT_S: Final = 0.005
_LAST_WAIT_S: Final = 0.1
# The first that any of the answers is in is the state of all of them.
_ORDER: Final = ("failed", "open", "writing", "kept", "discarded")
_UNSETTLED: Final = ("open", "writing")

AskCaptures = Callable[[], Awaitable[Sequence[Captured]]]


def capture_fields(stream: int, found: Sequence[Captured]) -> dict[str, Any]:
    """`rows` is what was given to the consumers, `lost` what is missing at any of them."""
    states = [one.state for one in found] or ["open"]
    told: dict[str, Any] = {
        "id": f"{stream:016x}",
        "state": min(states, key=_ORDER.index),
        "rows": sum(one.rows for one in found),
        "lost": sum(one.lost for one in found),
        "discarded": sum(one.discarded for one in found),
    }
    reason = next((one.reason for one in found if one.reason), "")
    return {**told, "reason": reason} if reason else told


def unknown_capture_fields(stream: int) -> dict[str, Any]:
    """Of an engine that cannot be asked any more."""
    reason = "the engine did not say what became of its rows; look into the folder"
    return {**capture_fields(stream, ()), "state": "failed", "reason": reason}


def is_settled(found: Sequence[Captured]) -> bool:
    """Whether nothing more will become of it by waiting."""
    return bool(found) and not any(one.state in _UNSETTLED for one in found)


async def wait_settled(ask: AskCaptures) -> Sequence[Captured]:
    """What is said when rows are safe, or what is said after WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    pause_s = _FIRST_WAIT_S
    found = await ask()
    while not is_settled(found) and time.monotonic() < deadline_s:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_WAIT_S)
        found = await ask()
    return found


# MERGED
# Takes a request that the engine answers; gives what its answer says of it, first and last.


class CoreAccess(Protocol):
    """The engine core, as it is seen from here."""

    core_cache: CoreCache
    weight_versions: WeightVersions

    async def why_refused(self, stream: int) -> ClairaiError | None: ...

    async def captured(self, stream: int, *, is_ended: bool) -> Sequence[Captured]: ...


async def first_fields(
    core: CoreAccess, stream: int | None, applied: dict[str, Any] | None, *, is_captured: bool
) -> dict[str, Any] | None:
    """Asked with the first token: what is applied, where rows are kept, which weights made it."""
    told = dict(applied or {})
    if stream is not None and is_captured:
        told["capture"] = capture_fields(stream, ())
    try:
        version = await core.weight_versions.version_of(stream)
    except Exception:  # whatever vLLM raises of an engine that has ended: the answer is there
        return told or None
    return told | ({} if version is None else {"weights": version}) or None


def last_fields(core: CoreAccess, stream: int) -> ResponseFields:
    """What became of its rows; asked when the request has ended."""

    async def result() -> dict[str, Any] | None:
        try:
            found = await wait_settled(lambda: core.captured(stream, is_ended=True))
        except Exception:  # whatever vLLM raises of an engine that has ended: the answer is there
            return {"capture": unknown_capture_fields(stream)}
        return {"capture": capture_fields(stream, found)}

    return result
