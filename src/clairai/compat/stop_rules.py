"""Enforces the rules of running requests: ends an answer, or changes its steering, by its scores.

EngineCore.add_request   v1/engine/core.py            0.26:431   0.32:508
check_stop               v1/core/sched/scheduler.py   0.26:55    0.32:55    (imported there by name)

The scheduler calls `check_stop` after every sampled token. The forward that sampled it also scored
the token before it, so those scores are in the ring or about to be. They are waited for: an answer
ends at the same token however fast the ring is read. Runs in: the engine core.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import finalize

import msgspec
import numpy as np

from clairai.compat.change_steering import change_request_steering
from clairai.compat.engine_core import get_core_control
from clairai.compat.failed_requests import watch_for_failures
from clairai.compat.pipeline_stages import put_publisher_first
from clairai.engine.rule_watcher import RuleWatcher
from clairai.engine.step import RequestMark
from clairai.errors import ClairaiError
from clairai.fields.rules import StopRule
from clairai.match.choice_scores import ScoreColumns, ScoreRow
from clairai.ring.attach import RingReader
from clairai.ring.reader import Record
from clairai.wire import control_messages, ring_messages

SCORE_WAIT_S: Final = 2.0  # for scores that the GPU has computed; they take some 50 us
_ENFORCER: Final = "clairai_rule_enforcer"
_CHECKS_RULES: Final = "clairai_checks_rules"
_ROW_FIELDS: Final = ("stream", "choice", "position", "token_id")
_log: Final = logging.getLogger("clairai.stops")


class RuleEnforcer:
    """Reads the ring in the engine core while requests with rules run."""

    def __init__(
        self, attach: Callable[[], RingReader], steer: Callable[[Any, StopRule], None]
    ) -> None:
        self._attach = attach
        self._steer = steer
        self._reader: RingReader | None = None
        self._rules: dict[RequestMark, RuleWatcher] = {}
        self._bank: ring_messages.Bank | None = None
        self._columns = ScoreColumns((), ())

    def add(self, mark: RequestMark, rules: RuleWatcher) -> None:
        if self._reader is None:  # only records from now on matter
            self._reader = self._attach()
        self._rules[mark] = rules

    def remove(self, mark: RequestMark, rules: RuleWatcher) -> None:
        """The request is gone. Another one may have taken its stream since: that one stays."""
        if self._rules.get(mark) is rules:
            del self._rules[mark]
        if not self._rules:
            self.close()

    def check(self, mark: RequestMark, token_ids: Sequence[int]) -> None:
        """Apply the request's rules to all of its tokens but the newest, which has no score yet."""
        rules = self._rules.get(mark)
        if rules is None:
            return  # it could not be watched, and ends
        deadline_s = time.monotonic() + SCORE_WAIT_S
        while not rules.check(token_ids):
            if not self._poll() and not self._wait(deadline_s):
                rules.give_up("its scores did not come")

    def apply_actions(self, request: Any) -> str | None:
        """Carry out the rules that triggered; why the answer ends, None if it goes on."""
        rules: RuleWatcher = request.clairai_rules
        while rules.alarms:
            alarm = rules.alarms.pop(0)
            _log.warning("%s: %s, position %d", alarm.rule.action, alarm.reason, alarm.position)
            if alarm.rule.action == "steer" and not request.is_finished():
                try:
                    self._steer(request, alarm.rule)
                except ClairaiError as error:
                    rules.give_up(error.reason)
        return rules.end

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _wait(self, deadline_s: float) -> bool:
        assert self._reader is not None
        left_s = deadline_s - time.monotonic()
        return left_s > 0 and self._reader.wait(left_s) and self._reader.is_alive()

    def _poll(self) -> bool:
        assert self._reader is not None
        records = self._reader.poll()
        for record in records:
            self._read(record, self._reader)
        return bool(records)

    def _read(self, record: Record, reader: RingReader) -> None:
        rows = record.rows
        streams = np.fromiter({mark.stream for mark in self._rules}, np.uint64)
        # Most rows belong to requests without rules: leave them out before the loop in Python.
        is_watched_R = (rows["phase"] == ring_messages.DECODE) & np.isin(rows["stream"], streams)
        indices = np.flatnonzero(is_watched_R)
        if not len(indices):
            return
        bank = reader.bank(record.bank_version)
        if bank is not self._bank:
            self._bank = bank
            self._columns = ScoreColumns(tuple(probe.name for probe in bank.probes), ())
        fields = (rows[name][indices].tolist() for name in _ROW_FIELDS)
        scores = record.scores_RC[indices].tolist()
        for stream, choice, position, token_id, values in zip(*fields, scores, strict=True):
            rules = self._rules.get(RequestMark(stream, choice))
            if rules is not None:
                rules.add_row(position, ScoreRow(token_id, self._columns, values))


def wrap_add_request(original: Any) -> Any:
    """Wrap `EngineCore.add_request(request, ...)`, which the core's own thread calls."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(request, "clairai_rules", None) is not None:
            _watch_rules(self, request)
        if hasattr(request, "clairai_request_mark"):
            watch_for_failures(self, functools.partial(_note_failure, self))
        return original(self, request, *args, **kwargs)

    return add_request


def _note_failure(core: Any, request: Any, error: ClairaiError) -> None:
    get_core_control(core).note_refusal(request.clairai_request_mark.stream, error)


def _watch_rules(core: Any, request: Any) -> None:
    """An answer whose rules cannot be watched ends with its first token, and says why."""
    rules, mark = request.clairai_rules, request.clairai_request_mark
    _install_check_stop()
    enforcer = request.clairai_rule_enforcer = _get_enforcer(core)
    try:
        enforcer.add(mark, rules)
    except Exception as error:
        _give_up(rules, error)
    # vLLM asks no more about an aborted request, so its end is taken from its deletion.
    finalize(request, enforcer.remove, mark, rules)


def _give_up(rules: RuleWatcher, error: Exception) -> None:
    _log.error("a stop rule cannot be checked", exc_info=error)
    rules.give_up(error.reason if isinstance(error, ClairaiError) else type(error).__name__)


def _install_check_stop() -> None:
    """Only when a request has rules: vLLM calls it for every token of every request."""
    from vllm.v1.core.sched import scheduler  # looks check_stop up by name at every call

    if not hasattr(scheduler.check_stop, _CHECKS_RULES):
        scheduler.check_stop = wrap_check_stop(scheduler.check_stop)


def wrap_check_stop(original: Any) -> Any:
    """Wrap `check_stop(request, max_model_len)`, called after every token."""

    @functools.wraps(original)
    def check_stop(request: Any, max_model_len: int) -> bool:
        has_ended = bool(original(request, max_model_len))
        if getattr(request, "clairai_rules", None) is None:
            return has_ended
        enforcer: RuleEnforcer = request.clairai_rule_enforcer
        try:
            # Request.all_token_ids: v1/request.py 0.26:178 0.32:194
            enforcer.check(request.clairai_request_mark, request.all_token_ids)
            reason = enforcer.apply_actions(request)
        except Exception as error:  # of this request: the scheduler goes on with the others
            _give_up(request.clairai_rules, error)
            reason = request.clairai_rules.end
        if not has_ended and reason is not None:
            request.status = type(request.status).FINISHED_STOPPED  # v1/request.py RequestStatus
            request.stop_reason = reason
        return has_ended or reason is not None

    setattr(check_stop, _CHECKS_RULES, True)
    return check_stop


def _get_enforcer(core: Any) -> RuleEnforcer:
    found: RuleEnforcer | None = vars(core).get(_ENFORCER)
    if found is None:

        def steer(request: Any, rule: StopRule) -> None:
            change_request_steering(core, get_core_control(core).registry, request, rule.steer)

        found = vars(core)[_ENFORCER] = RuleEnforcer(lambda: _attach_reader(core), steer)
    return found


def _attach_reader(core: Any) -> RingReader:
    message = msgspec.msgpack.encode(control_messages.Describe())
    replies = core.model_executor.collective_rpc(control_messages.CONTROL_METHOD, None, (message,))
    first, *_ = put_publisher_first(core.vllm_config, replies)
    described = msgspec.msgpack.decode(first, type=control_messages.Description)
    return RingReader.attach(Path(described.socket), start="newest")
