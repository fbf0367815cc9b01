"""Admits requests to the engine: gives each its stream id, its steering plan and its capture plan.

EngineCore.preprocess_add_request   v1/engine/core.py   0.26:954   0.32:1089

Every request passes there, whichever entry point it came by. Runs in: the engine core, on the
thread that receives requests.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary, finalize

from clairai.compat.extra_args import with_plans
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.engine.capture.capture_resolver import CAPTURE_OFF, CaptureResolver, RequestContext
from clairai.engine.core_control import CoreControl
from clairai.engine.rule_watcher import RuleWatcher
from clairai.engine.steer.resolve_steering import check_entries_act
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import TableClaim
from clairai.engine.step import RequestMark
from clairai.engine.used_streams import UsedStreams
from clairai.errors import CaptureOffError, ClairaiError, RequestError
from clairai.fields.request_fields import RequestFields, parse_fields

_CHOICE: Final = re.compile(r"(?:(\d+)_)?")
_ID_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}")


class StreamOwner:
    """The request that a stream id belongs to; each of its choices in the engine refers to it."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.choices: WeakSet[Any] = WeakSet()
        self.num_admitted = 0  # including choices that have ended

    def is_live(self) -> bool:
        return any(not choice.is_finished() for choice in self.choices)


@dataclass(frozen=True)
class PreparedRequest:
    """What an admitted request keeps alive until it ends."""

    mark: RequestMark
    owner: StreamOwner
    claim: TableClaim | None
    rules: RuleWatcher | None
    is_captured: bool


class Admission:
    """Prepares the requests of one engine core; refuses those that cannot be served as asked."""

    def __init__(
        self,
        control: CoreControl,
        captures: CaptureResolver | None = None,
        used: UsedStreams | None = None,
        *,
        has_other_cores: bool = False,
    ) -> None:
        """Without `captures` nothing is captured. `has_other_cores`: they capture, too."""
        self._control, self._captures = control, captures
        self._has_other_cores = has_other_cores
        self._used = used or UsedStreams()
        self._secret = secrets.token_bytes(16)
        # An owner disappears with the last vLLM request that refers to it.
        self._owners: WeakValueDictionary[int, StreamOwner] = WeakValueDictionary()

    def prepare(self, request: Any) -> PreparedRequest:
        """Check an EngineCoreRequest's fields, and write mark and plans into its parameters."""
        fields = parse_fields(request.sampling_params.extra_args)
        parent, choice = split_request_id(request.request_id, request.external_req_id)
        stream = fields.stream or self._derive_stream(parent, choice)
        try:
            rules = self._make_rules(fields, request)
            steering = self._resolve_steering(fields, request)
            capture = self._resolve_capture(fields, request, stream, steering)
            owner = self._own_stream(stream, parent, choice)
            if capture is not None and self._has_other_cores:
                _require_drawn(fields)
            elif capture is not None and self._used.is_stored(stream, parent):
                raise _used_stream(stream, "has rows of another request in the folder of captures")
            claim = None if steering is None else self._control.registry.claim(steering)
        except ClairaiError as error:
            self._control.note_refusal(stream, error)
            raise
        mark = RequestMark(stream, choice)
        # The choices of one request, and the requests of one call, share the parameters.
        params = copy.copy(request.sampling_params)
        request_id = request.external_req_id or request.request_id
        params.extra_args = with_plans(params.extra_args, mark, request_id, steering, capture)
        if fields.prompt_scores or (steering is not None and steering.is_stateful):
            # v1/core/kv_cache_manager.py, 0.26:228, 0.32:249: forwards the whole prompt
            params.skip_reading_prefix_cache = True
        request.sampling_params = params
        return PreparedRequest(mark, owner, claim, rules, capture is not None)

    def accept(self, prepared: PreparedRequest, request: Any) -> None:
        """The engine made a Request (v1/request.py) of it, which keeps owner and claim alive."""
        owner, mark = prepared.owner, prepared.mark
        self._used.add(mark.stream, owner.parent, mark.choice, is_captured=prepared.is_captured)
        prepared.owner.choices.add(request)
        prepared.owner.num_admitted += 1
        request.clairai_stream_owner = prepared.owner
        request.clairai_request_mark = prepared.mark
        if prepared.rules is not None:
            request.clairai_rules = prepared.rules
        if prepared.claim is not None:
            finalize(request, prepared.claim.release)

    def reject(self, prepared: PreparedRequest) -> None:
        """The engine refused the request for a reason of its own."""
        if prepared.claim is not None:
            prepared.claim.release()

    def _make_rules(self, fields: RequestFields, request: Any) -> RuleWatcher | None:
        if not fields.stop:
            return None
        thresholds = self._control.thresholds(fields.stop)
        prompt_len = _prompt_len(request)
        for rule in fields.stop:
            if rule.steer:  # refuse it now rather than when the rule triggers
                check_entries_act(rule.steer, prompt_len, prompt_len)
                self._control.registry.resolve(rule.steer, prompt_len=prompt_len)
        return RuleWatcher(fields.stop, thresholds, prompt_len)

    def _resolve_steering(self, fields: RequestFields, request: Any) -> SteeringPlan | None:
        if not self._control.is_steering and not fields.steer:
            return None
        plan = self._control.registry.resolve(fields.steer, prompt_len=_prompt_len(request))
        if plan is not None:
            _require_whole_prompt(request, "steered")
        return plan

    def _resolve_capture(
        self, fields: RequestFields, request: Any, stream: int, steering: SteeringPlan | None
    ) -> CapturePlan | None:
        if self._captures is None:
            if fields.capture is not None and fields.capture.is_wanted:
                raise CaptureOffError(CAPTURE_OFF)
            return None
        adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
        context = RequestContext(
            stream, _prompt_len(request), steering, adapter, fields.label, fields.owner
        )
        plan = self._captures.resolve(fields.capture, context)
        if plan is not None:
            _require_whole_prompt(request, "captured")
        return plan

    def _own_stream(self, stream: int, parent: str, choice: int) -> StreamOwner:
        owner = self._owners.get(stream)
        is_live = owner is not None and owner.is_live()
        if is_live and owner is not None and owner.parent != parent:
            raise _used_stream(stream, "belongs to a request that is not finished")
        if not is_live and not self._used.is_free(stream, parent, choice):
            raise _used_stream(stream, "was used by a request that has ended")
        if owner is None or owner.parent != parent:
            owner = self._owners[stream] = StreamOwner(parent)
        return owner

    def _derive_stream(self, parent: str, choice: int) -> int:
        """The same stream for all choices of a request, and one that no other request can guess.

        With VLLM_DISABLE_REQUEST_ID_RANDOMIZATION a caller may use an id again: it gets another
        stream.
        """
        for attempt in itertools.count():
            text = f"{attempt} {parent}" if attempt else parent
            digest = hashlib.blake2b(text.encode(), digest_size=8, key=self._secret).digest()
            stream = int.from_bytes(digest) or 1
            owner = self._owners.get(stream)
            is_running = owner is not None and owner.parent == parent and owner.is_live()
            if is_running or self._used.is_free(stream, parent, choice):
                break
        return stream


def _require_drawn(fields: RequestFields) -> None:
    """Another engine core may capture under the same stream id, and nobody would know."""
    if fields.stream is not None and not fields.drawn:
        raise RequestError(
            "with several engine cores a request that is captured cannot choose its stream, which "
            "a request of another core may have; leave it out: the response says which it was given"
        )


def _used_stream(stream: int, why: str) -> RequestError:
    return RequestError(
        f"stream {stream} {why}; give each request a stream of its own, or leave it out"
    )


def _prompt_len(request: Any) -> int:
    return len(request.prompt_token_ids or ())


def _require_whole_prompt(request: Any, what: str) -> None:
    """EngineCoreRequest.resumable, v1/engine/__init__.py 0.32:143; 0.26 has none."""
    if getattr(request, "resumable", False):
        raise RequestError(
            f"a request whose prompt comes in parts is not {what}: where the prompt ends is "
            f"not known; send the prompt whole"
        )


def split_request_id(internal_id: str, external_id: str | None) -> tuple[str, int]:
    """The id of the whole request inside the engine, and which of its `n` choices this is.

    With n > 1 vLLM calls the choices `{index}_{parent}` (v1/engine/parallel_sampling.py, 0.26 and
    0.32) and the parent `{external}-{8 hex}` (v1/engine/input_processor.py). The external id is
    known here, so it is matched exactly; nothing is searched for.
    """
    external = external_id or ""
    suffix = internal_id[-9:]
    tails = [external, external + suffix if _ID_SUFFIX.fullmatch(suffix) else ""]
    for tail in filter(None, tails):
        matched = _CHOICE.fullmatch(internal_id.removesuffix(tail))
        if matched is not None and internal_id.endswith(tail):
            return tail, int(matched[1] or 0)
    return internal_id, 0  # vLLM did not derive this id from another: a request of its own
