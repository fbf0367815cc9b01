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

from clairai import wire
from clairai.compat.amends import amend_one
from clairai.compat.core import desk_of
from clairai.errors import ClairaiError
from clairai.ring.attach import Reader
from clairai.ring.reader import Record
from clairai.steer.rules import Rule
from clairai.steer.watch import Watch

WAIT_S: Final = 2.0  # for a row that the GPU has computed; it takes some 50 us
_LOOKOUT: Final = "clairai_lookout"
_RULED: Final = "clairai_rules"
_WHOSE: Final = ("stream", "choice", "position")
_log: Final = logging.getLogger("clairai.stops")

Seat = tuple[int, int]  # stream and choice


class Lookout:
    """Reads the ring in the engine core while requests with rules run."""

    def __init__(self, attach: Callable[[], Reader], steer: Callable[[Any, Rule], None]) -> None:
        self._attach = attach
        self._steer = steer
        self._reader: Reader | None = None
        self._watches: dict[Seat, Watch] = {}

    def enter(self, seat: Seat, watch: Watch) -> None:
        if self._reader is None:  # begin with what comes now: nobody waits for the rest
            self._reader = self._attach()
        self._watches[seat] = watch

    def leave(self, seat: Seat) -> None:
        """Also called when a request is collected; whoever is being judged has not left."""
        self._watches.pop(seat, None)
        if not self._watches:
            self.close()

    def judge(self, seat: Seat, position: int) -> None:
        """Have the rules see the scores of everything up to this position."""
        watch = self._watches[seat]
        deadline_s = time.monotonic() + WAIT_S
        while watch.end is None and watch.next_position <= position:
            if not self._poll() and not self._wait(deadline_s):
                watch.give_up("its scores did not come")

    def react(self, request: Any) -> str | None:
        """Do what the rules ask for; why the answer ends, None if it goes on."""
        watch: Watch = request.clairai_watch
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

    def _read(self, record: Record, reader: Reader) -> None:
        names = [probe.name for probe in reader.bank(record.bank_version).probes]
        watched = np.fromiter({stream for stream, _ in self._watches}, np.uint64)
        rows = record.rows
        # Only rows that a rule looks at are looked at one by one.
        is_watched_R = (rows["phase"] == wire.DECODE) & np.isin(rows["stream"], watched)
        for index in np.flatnonzero(is_watched_R):
            stream, choice, position = (int(rows[index][f]) for f in _WHOSE)
            watch = self._watches.get((stream, choice))
            if watch is not None:
                scores = record.scores_RC[index].tolist()
                watch.see(position, dict(zip(names, scores, strict=True)))


def with_watch(original: Any) -> Any:
    """`EngineCore.add_request(request, ...)`: on the core's own thread, between two steps."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        watch = getattr(request, "clairai_watch", None)
        if watch is not None:
            _ask_of_every_token()
            request.clairai_lookout = _lookout(self)
            request.clairai_lookout.enter(request.clairai_seat, watch)
            # Also for one that is aborted: nobody asks then whether it has ended.
            finalize(request, request.clairai_lookout.leave, request.clairai_seat)
        return original(self, request, *args, **kwargs)

    return add_request


def _ask_of_every_token() -> None:
    """Not before a request has rules: it is on the way of every token of all the others too."""
    from vllm.v1.core.sched import scheduler  # looks it up by name at every call

    if not hasattr(scheduler.check_stop, _RULED):
        scheduler.check_stop = with_rules(scheduler.check_stop)


def with_rules(original: Any) -> Any:
    """`check_stop(request, max_model_len)`, called after every token."""

    @functools.wraps(original)
    def check_stop(request: Any, max_model_len: int) -> bool:
        has_ended = bool(original(request, max_model_len))
        if getattr(request, "clairai_watch", None) is None:
            return has_ended
        # The newest token has no row yet: the one before it has.
        lookout, seat = request.clairai_lookout, request.clairai_seat
        lookout.judge(seat, request.num_tokens - 2)
        reason = lookout.react(request)
        if not has_ended and reason is not None:
            request.status = type(request.status).FINISHED_STOPPED  # v1/request.py RequestStatus
            request.stop_reason = reason
        return has_ended or reason is not None

    setattr(check_stop, _RULED, True)
    return check_stop


def _lookout(core: Any) -> Lookout:
    found: Lookout | None = vars(core).get(_LOOKOUT)
    if found is None:

        def steer(request: Any, rule: Rule) -> None:
            amend_one(core, desk_of(core).registry, request, rule.steer)

        found = vars(core)[_LOOKOUT] = Lookout(lambda: _attached(core), steer)
    return found


def _attached(core: Any) -> Reader:
    message = msgspec.msgpack.encode(wire.Describe())
    replies = core.model_executor.collective_rpc("clairai_control", None, (message,))
    described = msgspec.msgpack.decode(replies[0], type=wire.Description)
    return Reader.attach(Path(described.socket), start="newest")
