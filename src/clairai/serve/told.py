"""Takes a request that the engine answers; gives what its answer says of it, first and last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from clairai.errors import ClairaiError
from clairai.serve.editions import Editions
from clairai.serve.handle import handle, settled, unknown
from clairai.serve.mirror import Mirror
from clairai.serve.reply import Echo
from clairai.wire_capture import Captured


class Core(Protocol):
    """The engine core, as it is seen from here."""

    mirror: Mirror
    editions: Editions

    async def why_refused(self, stream: int) -> ClairaiError | None: ...

    async def captured(self, stream: int, *, is_ended: bool) -> Sequence[Captured]: ...


async def begun(
    core: Core, stream: int | None, applied: dict[str, Any] | None, *, is_captured: bool
) -> dict[str, Any] | None:
    """Asked with the first token: what is applied, where rows are kept, which weights made it."""
    told = dict(applied or {})
    if stream is not None and is_captured:
        told["capture"] = handle(stream, ())
    try:
        version = await core.editions.version_of(stream)
    except Exception:  # whatever vLLM raises of an engine that has ended: the answer is there
        return told or None
    return told | ({} if version is None else {"weights": version}) or None


def ended(core: Core, stream: int) -> Echo:
    """What became of its rows; asked when the request has ended."""

    async def result() -> dict[str, Any] | None:
        try:
            found = await settled(lambda: core.captured(stream, is_ended=True))
        except Exception:  # whatever vLLM raises of an engine that has ended: the answer is there
            return {"capture": unknown(stream)}
        return {"capture": handle(stream, found)}

    return result
