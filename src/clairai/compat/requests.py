"""Takes a request as it enters the engine core; gives it marked with its stream id and choice.

This is the one place every request passes, whichever entry point it came from
(EngineCore.preprocess_add_request, v1/engine/core.py, 0.26:954, 0.32:1089).
"""

from __future__ import annotations

import copy
import hashlib
import re
import secrets
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

from clairai import wanted as fields
from clairai.errors import RequestError
from clairai.tap.rows import Mark

# What the engine core leaves in extra_args for the worker.
MARK: Final = "clairai_mark"
_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}")


class Ticket:
    """One request's claim on its stream, held by each of its `n` children in the engine."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.children: WeakSet[Any] = WeakSet()

    def is_live(self) -> bool:
        return any(not child.is_finished() for child in self.children)


class Reception:
    """Marks requests of one engine core; refuses a stream id that is in use."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        # A ticket goes when the scheduler lets go of its last child: no list to keep in step.
        self._tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()

    def mark(self, request: Any) -> Ticket:
        """Check the fields of an EngineCoreRequest and write the mark into it."""
        params = request.sampling_params
        wanted = fields.parse(params.extra_args)
        parent, choice = parent_and_choice(request.request_id, request.external_req_id)
        stream = wanted.stream if wanted.stream is not None else self._mint(parent)
        ticket = self._claim(stream, parent)
        # Children of one request, and requests of one call, share this object: never write to it.
        params = copy.copy(params)
        params.extra_args = dict(params.extra_args or {}) | {
            MARK: [stream, choice, request.external_req_id or request.request_id]
        }
        if wanted.prompt_scores:
            # v1/core/kv_cache_manager.py, 0.26:228, 0.32:249: forwards the whole prompt
            params.skip_reading_prefix_cache = True
        request.sampling_params = params
        return ticket

    def admit(self, ticket: Ticket, request: Any) -> None:
        """The engine took the request (v1/request.py): from now on it holds the ticket."""
        ticket.children.add(request)
        request.clairai_ticket = ticket

    def _claim(self, stream: int, parent: str) -> Ticket:
        held = self._tickets.get(stream)
        if held is not None and held.parent == parent:
            return held
        if held is not None and held.is_live():
            raise RequestError(
                f"stream {stream} belongs to a request that is not finished; "
                f"give each request a stream of its own, or leave it out"
            )
        ticket = self._tickets[stream] = Ticket(parent)
        return ticket

    def _mint(self, parent: str) -> int:
        """All answers to one request share its stream; other requests cannot have it."""
        digest = hashlib.blake2b(parent.encode(), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest) or 1


def parent_and_choice(internal_id: str, external_id: str | None) -> tuple[str, int]:
    """The request as the engine knows it, and which of its `n` answers this is.

    With n > 1 vLLM calls the children `{index}_{parent}` (v1/engine/parallel_sampling.py, 0.26 and
    0.32) and the parent `{external}-{8 hex}` (v1/engine/input_processor.py). The external id is
    known here, so it is taken off exactly; nothing is searched for.
    """
    external = external_id or ""
    tails = [external, external + internal_id[-9:] if _SUFFIX.fullmatch(internal_id[-9:]) else ""]
    for tail in filter(None, tails):
        child = re.fullmatch(r"(?:(\d+)_)?" + re.escape(tail), internal_id)
        if child is not None:
            return tail, int(child[1] or 0)
    return internal_id, 0  # an id that vLLM did not derive from another: a request of its own


def read_mark(sampling_params: Any, req_id: str) -> tuple[Mark, str]:
    """The worker's side: the mark, and the id the caller of vLLM knows the request by."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    if MARK not in extra:
        # Not through the engine core's door (a warm-up request of vLLM's own): it gets an id
        # nobody can have asked for by chance.
        return Mark(fields.mint()), req_id
    stream, choice, request_id = extra[MARK]
    return Mark(int(stream), int(choice)), str(request_id)
