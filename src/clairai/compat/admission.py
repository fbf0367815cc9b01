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

from clairai.compat.capture_setup import CAPTURE_KEY, EncodedCapturePlan
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.engine.capture.capture_resolver import CAPTURE_OFF, CaptureResolver, RequestContext
from clairai.engine.core_control import CoreControl
from clairai.engine.publish.step_rows import RequestMark
from clairai.engine.rule_watcher import RuleWatcher
from clairai.engine.steer import steering_plan as courses
from clairai.engine.steer.cache_keys import BlockKeys
from clairai.engine.steer.resolve_steering import check_entries_act
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import TableClaim
from clairai.errors import CaptureOffError, ClairaiError, RequestError
from clairai.fields import request_fields as fields

# What the engine core leaves in extra_args for the worker.
MARK_KEY: Final = "clairai_mark"
STEERING_KEY: Final = "clairai_steering_plan"
_ID_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}")


class EncodedSteeringPlan(bytes):
    """A course as it travels; within this process it need not be read again."""

    plan: SteeringPlan
    keys: BlockKeys  # asked for every block

    @classmethod
    def seal(cls, plan: SteeringPlan) -> EncodedSteeringPlan:
        sealed = cls(courses.ENCODER.encode(plan))
        sealed.plan, sealed.keys = plan, BlockKeys(plan)
        return sealed

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)  # other processes get plain bytes, whoever carries them


class StreamOwner:
    """One request's claim on its stream, held by each of its `n` children in the engine."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.children: WeakSet[Any] = WeakSet()
        self.num_admitted = 0  # also those that have ended

    def is_live(self) -> bool:
        return any(not child.is_finished() for child in self.children)


@dataclass(frozen=True)
class PreparedRequest:
    """What a request that may enter holds on to."""

    ticket: StreamOwner
    claim: TableClaim | None
    watch: RuleWatcher | None
    seat: tuple[int, int]  # stream and choice


class Admission:
    """Marks requests of one engine core; refuses what cannot be done as it was asked."""

    def __init__(self, core_control: CoreControl, captures: CaptureResolver | None = None) -> None:
        """Without `captures` nothing is captured."""
        self._core_control, self._captures = core_control, captures
        self._secret = secrets.token_bytes(16)
        # A ticket goes when the scheduler lets go of its last child: no list to keep in step.
        self._tickets: WeakValueDictionary[int, StreamOwner] = WeakValueDictionary()

    def mark(self, request: Any) -> PreparedRequest:
        """Check the fields of an EngineCoreRequest and write the mark and the course into it."""
        wanted = fields.parse_fields(request.sampling_params.extra_args)
        parent, choice = split_request_id(request.request_id, request.external_req_id)
        stream = wanted.stream if wanted.stream is not None else self._mint(parent)
        try:
            watch = self._watch(wanted, request)
            plan = self._course(wanted, request)
            order = self._order(wanted, request, stream, plan)
            ticket = self._claim(stream, parent)
            claim = None if plan is None else self._core_control.registry.claim(plan)
        except ClairaiError as error:
            self._core_control.note_refusal(stream, error)
            raise
        # Children of one request, and requests of one call, share this object: never write to it.
        params = copy.copy(request.sampling_params)
        given = (stream, choice, request.external_req_id or request.request_id)
        params.extra_args = {**_without_our_keys(params.extra_args), MARK_KEY: list(given)}
        if plan is not None:
            params.extra_args[STEERING_KEY] = EncodedSteeringPlan.seal(plan)
        if order is not None:
            params.extra_args[CAPTURE_KEY] = EncodedCapturePlan.seal(order)
        if wanted.prompt_scores or (plan is not None and plan.is_stateful):
            # v1/core/kv_cache_manager.py, 0.26:228, 0.32:249: forwards the whole prompt
            params.skip_reading_prefix_cache = True
        request.sampling_params = params
        return PreparedRequest(ticket, claim, watch, (stream, choice))

    def admit(self, given: PreparedRequest, request: Any) -> None:
        """The engine took the request (v1/request.py): from now on it holds ticket and claim."""
        given.ticket.children.add(request)
        given.ticket.num_admitted += 1
        request.clairai_stream_owner = given.ticket
        request.clairai_request_mark = given.seat
        if given.watch is not None:
            request.clairai_watch = given.watch
        if given.claim is not None:
            finalize(request, given.claim.release)

    def reject(self, given: PreparedRequest) -> None:
        """The engine did not take it."""
        if given.claim is not None:
            given.claim.release()

    def _watch(self, wanted: fields.RequestFields, request: Any) -> RuleWatcher | None:
        if not wanted.stop:
            return None
        thresholds = self._core_control.thresholds(wanted.stop)
        prompt_len = len(request.prompt_token_ids or ())
        for rule in wanted.stop:
            if rule.steer:  # refused now, not when it goes off
                check_entries_act(rule.steer, prompt_len, prompt_len)
                self._core_control.registry.resolve(rule.steer, prompt_len=prompt_len)
        return RuleWatcher(wanted.stop, thresholds, prompt_len)

    def _course(self, wanted: fields.RequestFields, request: Any) -> SteeringPlan | None:
        if not self._core_control.is_steering and not wanted.steer:
            return None
        prompt_len = len(request.prompt_token_ids or ())
        plan = self._core_control.registry.resolve(wanted.steer, prompt_len=prompt_len)
        # EngineCoreRequest.resumable, v1/engine/__init__.py 0.32:143; 0.26 has none
        if plan is not None and getattr(request, "resumable", False):
            raise RequestError(
                "a request whose prompt comes in parts is not steered: where the prompt ends is "
                "not known; send the prompt whole"
            )
        return plan

    def _order(
        self, wanted: fields.RequestFields, request: Any, stream: int, plan: SteeringPlan | None
    ) -> CapturePlan | None:
        if self._captures is None:
            if wanted.capture is not None and wanted.capture.is_wanted:
                raise CaptureOffError(CAPTURE_OFF)
            return None
        prompt_len = len(request.prompt_token_ids or ())
        adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
        asked = RequestContext(stream, prompt_len, plan, adapter)
        order = self._captures.order(wanted.capture, asked)
        if order is not None and getattr(request, "resumable", False):
            raise RequestError(
                "a request whose prompt comes in parts is not captured: where the prompt ends is "
                "not known; send the prompt whole"
            )
        return order

    def _claim(self, stream: int, parent: str) -> StreamOwner:
        held = self._tickets.get(stream)
        if held is not None and held.parent == parent:
            return held
        if held is not None and held.is_live():
            raise RequestError(
                f"stream {stream} belongs to a request that is not finished; "
                f"give each request a stream of its own, or leave it out"
            )
        ticket = self._tickets[stream] = StreamOwner(parent)
        return ticket

    def _mint(self, parent: str) -> int:
        """All answers to one request share its stream; other requests cannot have it."""
        digest = hashlib.blake2b(parent.encode(), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest) or 1


def split_request_id(internal_id: str, external_id: str | None) -> tuple[str, int]:
    """The request as the engine knows it, and which of its `n` answers this is.

    With n > 1 vLLM calls the children `{index}_{parent}` (v1/engine/parallel_sampling.py, 0.26 and
    0.32) and the parent `{external}-{8 hex}` (v1/engine/input_processor.py). The external id is
    known here, so it is taken off exactly; nothing is searched for.
    """
    external = external_id or ""
    tails = [
        external,
        external + internal_id[-9:] if _ID_SUFFIX.fullmatch(internal_id[-9:]) else "",
    ]
    for tail in filter(None, tails):
        child = re.fullmatch(r"(?:(\d+)_)?" + re.escape(tail), internal_id)
        if child is not None:
            return tail, int(child[1] or 0)
    return internal_id, 0  # an id that vLLM did not derive from another: a request of its own


def read_mark(sampling_params: Any, req_id: str) -> tuple[RequestMark, str]:
    """The worker's side: the mark, and the id the caller of vLLM knows the request by."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    if MARK_KEY not in extra:
        # Not through the engine core's door (a warm-up request of vLLM's own): it gets an id
        # nobody can have asked for by chance.
        return RequestMark(fields.new_stream_id()), req_id
    stream, choice, request_id = extra[MARK_KEY]
    return RequestMark(int(stream), int(choice)), str(request_id)


def read_steering_plan(sampling_params: Any) -> SteeringPlan | None:
    """What steers the request."""
    return decode_steering_plan(
        (getattr(sampling_params, "extra_args", None) or {}).get(STEERING_KEY)
    )


def decode_steering_plan(sealed: bytes | None) -> SteeringPlan | None:
    """As it was sealed here, or read from what another process sealed."""
    if sealed is None or isinstance(sealed, EncodedSteeringPlan):
        return getattr(sealed, "plan", None)
    return courses.DECODER.decode(sealed)


def read_cache_keys(sampling_params: Any) -> BlockKeys | None:
    """The keys that the request's blocks have in the prefix cache."""
    sealed = (getattr(sampling_params, "extra_args", None) or {}).get(STEERING_KEY)
    if isinstance(sealed, EncodedSteeringPlan):
        return sealed.keys
    plan = read_steering_plan(sampling_params)
    return None if plan is None else BlockKeys(plan)


def _without_our_keys(extra_args: dict[str, Any] | None) -> dict[str, Any]:
    """Nobody else marks a request, whatever a client sends."""
    return {
        k: v
        for k, v in (extra_args or {}).items()
        if k not in (MARK_KEY, STEERING_KEY, CAPTURE_KEY)
    }
