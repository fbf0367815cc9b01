"""Takes a request as it enters the engine core; gives it marked with its stream id and choice,
with the course that steers it and the order of what is captured of it.

This is the one place every request passes, whichever entry point it came from
(EngineCore.preprocess_add_request, v1/engine/core.py, 0.26:954, 0.32:1089).
"""

from __future__ import annotations

import copy
import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary, finalize

from clairai import wanted as fields
from clairai.capture.order import Order
from clairai.capture.resolve import CAPTURE_OFF, Asked, Resolver
from clairai.compat.captures import ORDER, SealedOrder
from clairai.errors import CaptureOffError, ClairaiError, RequestError
from clairai.steer import course as courses
from clairai.steer.amend import check_acts
from clairai.steer.course import Course
from clairai.steer.desk import Desk
from clairai.steer.keys import BlockKeys
from clairai.steer.registry import Claim
from clairai.steer.watch import Watch
from clairai.tap.rows import Mark

# What the engine core leaves in extra_args for the worker.
MARK: Final = "clairai_mark"
COURSE: Final = "clairai_course"
_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}")


class Sealed(bytes):
    """A course as it travels; within this process it need not be read again."""

    course: Course
    keys: BlockKeys  # asked for every block

    @classmethod
    def seal(cls, course: Course) -> Sealed:
        sealed = cls(courses.ENCODER.encode(course))
        sealed.course, sealed.keys = course, BlockKeys(course)
        return sealed

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)  # other processes get plain bytes, whoever carries them


class Ticket:
    """One request's claim on its stream, held by each of its `n` children in the engine."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.children: WeakSet[Any] = WeakSet()
        self.num_admitted = 0  # also those that have ended

    def is_live(self) -> bool:
        return any(not child.is_finished() for child in self.children)


@dataclass(frozen=True)
class Pass:
    """What a request that may enter holds on to."""

    ticket: Ticket
    claim: Claim | None
    watch: Watch | None
    seat: tuple[int, int]  # stream and choice


class Reception:
    """Marks requests of one engine core; refuses what cannot be done as it was asked."""

    def __init__(self, desk: Desk, captures: Resolver | None = None) -> None:
        """Without `captures` nothing is captured."""
        self._desk, self._captures = desk, captures
        self._secret = secrets.token_bytes(16)
        # A ticket goes when the scheduler lets go of its last child: no list to keep in step.
        self._tickets: WeakValueDictionary[int, Ticket] = WeakValueDictionary()

    def mark(self, request: Any) -> Pass:
        """Check the fields of an EngineCoreRequest and write the mark and the course into it."""
        wanted = fields.parse(request.sampling_params.extra_args)
        parent, choice = parent_and_choice(request.request_id, request.external_req_id)
        stream = wanted.stream if wanted.stream is not None else self._mint(parent)
        try:
            watch = self._watch(wanted, request)
            course = self._course(wanted, request)
            order = self._order(wanted, request, stream, course)
            ticket = self._claim(stream, parent)
            claim = None if course is None else self._desk.registry.claim(course)
        except ClairaiError as error:
            self._desk.note_refusal(stream, error)
            raise
        # Children of one request, and requests of one call, share this object: never write to it.
        params = copy.copy(request.sampling_params)
        given = (stream, choice, request.external_req_id or request.request_id)
        params.extra_args = {**_others(params.extra_args), MARK: list(given)}
        if course is not None:
            params.extra_args[COURSE] = Sealed.seal(course)
        if order is not None:
            params.extra_args[ORDER] = SealedOrder.seal(order)
        if wanted.prompt_scores or (course is not None and course.is_stateful):
            # v1/core/kv_cache_manager.py, 0.26:228, 0.32:249: forwards the whole prompt
            params.skip_reading_prefix_cache = True
        request.sampling_params = params
        return Pass(ticket, claim, watch, (stream, choice))

    def admit(self, given: Pass, request: Any) -> None:
        """The engine took the request (v1/request.py): from now on it holds ticket and claim."""
        given.ticket.children.add(request)
        given.ticket.num_admitted += 1
        request.clairai_ticket = given.ticket
        request.clairai_seat = given.seat
        if given.watch is not None:
            request.clairai_watch = given.watch
        if given.claim is not None:
            finalize(request, given.claim.release)

    def turn_away(self, given: Pass) -> None:
        """The engine did not take it."""
        if given.claim is not None:
            given.claim.release()

    def _watch(self, wanted: fields.Wanted, request: Any) -> Watch | None:
        if not wanted.stop:
            return None
        thresholds = self._desk.thresholds(wanted.stop)
        prompt_len = len(request.prompt_token_ids or ())
        for rule in wanted.stop:
            if rule.steer:  # refused now, not when it goes off
                check_acts(rule.steer, prompt_len, prompt_len)
                self._desk.registry.resolve(rule.steer, prompt_len=prompt_len)
        return Watch(wanted.stop, thresholds, prompt_len)

    def _course(self, wanted: fields.Wanted, request: Any) -> Course | None:
        if not self._desk.is_steering and not wanted.steer:
            return None
        prompt_len = len(request.prompt_token_ids or ())
        course = self._desk.registry.resolve(wanted.steer, prompt_len=prompt_len)
        # EngineCoreRequest.resumable, v1/engine/__init__.py 0.32:143; 0.26 has none
        if course is not None and getattr(request, "resumable", False):
            raise RequestError(
                "a request whose prompt comes in parts is not steered: where the prompt ends is "
                "not known; send the prompt whole"
            )
        return course

    def _order(
        self, wanted: fields.Wanted, request: Any, stream: int, course: Course | None
    ) -> Order | None:
        if self._captures is None:
            if wanted.capture is not None and wanted.capture.is_wanted:
                raise CaptureOffError(CAPTURE_OFF)
            return None
        prompt_len = len(request.prompt_token_ids or ())
        adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
        asked = Asked(stream, prompt_len, course, adapter)
        order = self._captures.order(wanted.capture, asked)
        if order is not None and getattr(request, "resumable", False):
            raise RequestError(
                "a request whose prompt comes in parts is not captured: where the prompt ends is "
                "not known; send the prompt whole"
            )
        return order

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


def read_course(sampling_params: Any) -> Course | None:
    """What steers the request."""
    return read_sealed((getattr(sampling_params, "extra_args", None) or {}).get(COURSE))


def read_sealed(sealed: bytes | None) -> Course | None:
    """As it was sealed here, or read from what another process sealed."""
    if sealed is None or isinstance(sealed, Sealed):
        return getattr(sealed, "course", None)
    return courses.DECODER.decode(sealed)


def read_keys(sampling_params: Any) -> BlockKeys | None:
    """The keys that the request's blocks have in the prefix cache."""
    sealed = (getattr(sampling_params, "extra_args", None) or {}).get(COURSE)
    if isinstance(sealed, Sealed):
        return sealed.keys
    course = read_course(sampling_params)
    return None if course is None else BlockKeys(course)


def _others(extra_args: dict[str, Any] | None) -> dict[str, Any]:
    """Nobody else marks a request, whatever a client sends."""
    return {k: v for k, v in (extra_args or {}).items() if k not in (MARK, COURSE, ORDER)}
