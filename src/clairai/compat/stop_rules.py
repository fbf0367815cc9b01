"""Takes requests with stop rules; gives each the end its rules ask for, in the engine's own words.

EngineCore.add_request   v1/engine/core.py            0.26:431   0.32:508
check_stop               v1/core/sched/scheduler.py   0.26:55    0.32:55    (imported there by name)

The scheduler asks after every sampled token whether the request has ended. The scores of the token
before it were made by the same forward, so they are in the ring, or about to be: they are waited
for, and the answer ends at the same token however fast anybody reads.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from weakref import finalize

import msgspec
import numpy as np

from clairai.compat.change_steering import change_request_steering
from clairai.compat.engine_core import get_core_control
from clairai.engine.rule_watcher import RuleWatcher
from clairai.errors import ClairaiError
from clairai.fields.rules import StopRule
from clairai.ring.attach import RingReader
from clairai.ring.reader import Record
from clairai.wire import ring_messages

SCORE_WAIT_S: Final = 2.0  # for a row that the GPU has computed; it takes some 50 us
_MONITOR: Final = "clairai_rule_monitor"
_CHECKS_RULES: Final = "clairai_rules"
_ROW_FIELDS: Final = ("stream", "choice", "position")
_log: Final = logging.getLogger("clairai.stops")

StreamChoice = tuple[int, int]  # stream and choice


class RuleMonitor:
    """Reads the ring in the engine core while requests with rules run."""

    def __init__(
        self, attach: Callable[[], RingReader], steer: Callable[[Any, StopRule], None]
    ) -> None:
        self._attach = attach
        self._steer = steer
        self._reader: RingReader | None = None
        self._watches: dict[StreamChoice, RuleWatcher] = {}

    def enter(self, seat: StreamChoice, watch: RuleWatcher) -> None:
        if self._reader is None:  # begin with what comes now: nobody waits for the rest
            self._reader = self._attach()
        self._watches[seat] = watch

    def leave(self, seat: StreamChoice) -> None:
        """Also called when a request is collected; whoever is being judged has not left."""
        self._watches.pop(seat, None)
        if not self._watches:
            self.close()

    def judge(self, seat: StreamChoice, position: int) -> None:
        """Have the rules see the scores of everything up to this position."""
        watch = self._watches[seat]
        deadline_s = time.monotonic() + SCORE_WAIT_S
        while watch.end is None and watch.next_position <= position:
            if not self._poll() and not self._wait(deadline_s):
                watch.give_up("its scores did not come")

    def apply_actions(self, request: Any) -> str | None:
        """Do what the rules ask for; why the answer ends, None if it goes on."""
        watch: RuleWatcher = request.clairai_watch
        while watch.alarms:
            alarm = watch.alarms.pop(0)
            _log.warning("%s: %s, position %d", alarm.rule.action, alarm.reason, alarm.position)
            if alarm.rule.action == "steer" and not request.is_finished():
                try:
                    self._steer(request, alarm.rule)
                except ClairaiError as error:
                    watch.give_up(error.reason)
        return watch.end

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
        names = [probe.name for probe in reader.bank(record.bank_version).probes]
        watched = np.fromiter({stream for stream, _ in self._watches}, np.uint64)
        rows = record.rows
        # Only rows that a rule looks at are looked at one by one.
        is_watched_R = (rows["phase"] == ring_messages.DECODE) & np.isin(rows["stream"], watched)
        for index in np.flatnonzero(is_watched_R):
            stream, choice, position = (int(rows[index][f]) for f in _ROW_FIELDS)
            watch = self._watches.get((stream, choice))
            if watch is not None:
                scores = record.scores_RC[index].tolist()
                watch.see(position, dict(zip(names, scores, strict=True)))


def wrap_add_request(original: Any) -> Any:
    """`EngineCore.add_request(request, ...)`: on the core's own thread, between two steps."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        watch = getattr(request, "clairai_watch", None)
        if watch is not None:
            _install_check_stop()
            request.clairai_rule_monitor = _get_monitor(self)
            request.clairai_rule_monitor.enter(request.clairai_request_mark, watch)
            # Also for one that is aborted: nobody asks then whether it has ended.
            finalize(request, request.clairai_rule_monitor.leave, request.clairai_request_mark)
        return original(self, request, *args, **kwargs)

    return add_request


def _install_check_stop() -> None:
    """Not before a request has rules: it is on the way of every token of all the others too."""
    from vllm.v1.core.sched import scheduler  # looks it up by name at every call

    if not hasattr(scheduler.check_stop, _CHECKS_RULES):
        scheduler.check_stop = wrap_check_stop(scheduler.check_stop)


def wrap_check_stop(original: Any) -> Any:
    """`check_stop(request, max_model_len)`, called after every token."""

    @functools.wraps(original)
    def check_stop(request: Any, max_model_len: int) -> bool:
        has_ended = bool(original(request, max_model_len))
        if getattr(request, "clairai_watch", None) is None:
            return has_ended
        # The newest token has no row yet: the one before it has.
        lookout, seat = request.clairai_rule_monitor, request.clairai_request_mark
        lookout.judge(seat, request.num_tokens - 2)
        reason = lookout.apply_actions(request)
        if not has_ended and reason is not None:
            request.status = type(request.status).FINISHED_STOPPED  # v1/request.py RequestStatus
            request.stop_reason = reason
        return has_ended or reason is not None

    setattr(check_stop, _CHECKS_RULES, True)
    return check_stop


def _get_monitor(core: Any) -> RuleMonitor:
    found: RuleMonitor | None = vars(core).get(_MONITOR)
    if found is None:

        def steer(request: Any, rule: StopRule) -> None:
            change_request_steering(core, get_core_control(core).registry, request, rule.steer)

        found = vars(core)[_MONITOR] = RuleMonitor(lambda: _attach_reader(core), steer)
    return found


def _attach_reader(core: Any) -> RingReader:
    message = msgspec.msgpack.encode(ring_messages.Describe())
    replies = core.model_executor.collective_rpc("clairai_control", None, (message,))
    described = msgspec.msgpack.decode(replies[0], type=ring_messages.Description)
    return RingReader.attach(Path(described.socket), start="newest")
