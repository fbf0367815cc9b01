"""Takes control messages of steering in the engine core; gives replies, and remembers refusals.

The core is where every request passes and the one process that all of an engine share: what a name
means is known here, and nowhere else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from clairai import wire, wire_steer, wire_weights
from clairai.errors import ClairaiError, RequestError, SteeringOffError
from clairai.probe.columns import Columns
from clairai.probe.files import loads as load_probe
from clairai.probe.model import Probe, turned
from clairai.steer.fields import close_to
from clairai.steer.files import dumps, loads
from clairai.steer.registry import Registry
from clairai.steer.rules import Rule
from clairai.steer.spec import Entry, describe, parse_entries
from clairai.steer.vector import Vector

REMEMBERED_REFUSALS: Final = 1024
_DECODER: Final = msgspec.msgpack.Decoder(wire.Control)
_REPLY: Final = msgspec.msgpack.Decoder(wire.ControlReply)
_ENCODER: Final = msgspec.msgpack.Encoder()
_JSON: Final = msgspec.json.Encoder()
_TIERS: Final = ("base", "prefill", "decode")
_OFF: Final = (
    'this engine cannot steer; start it with "steering": true or "vectors": [files] '
    "in the clairai settings"
)
# Rows that the worker alone can read would be unknown here.
_ELSEWHERE: Final = wire.Refusal(
    "unsupported", "the worker is in another process; send the rows in the message"
)

Workers = Callable[[bytes], list[bytes]]
Amend = Callable[[int, Sequence[Entry]], list[int]]
Guard = Callable[[bytes], None]
Bank = Callable[[], Columns | None]


class Desk:
    """One for each engine core; `registry` is None where rows cannot be steered."""

    def __init__(
        self,
        registry: Registry | None,
        probes: tuple[Probe, ...],
        amend: Amend | None = None,
        guard: Guard | None = None,
        bank: Bank = lambda: None,
    ) -> None:
        """`amend` steers the running answers of a stream otherwise; it says from where on each.

        `guard` raises if weights may not change now, by what their manifest brings. `bank` gives
        what the worker has, if it is in this process: then nobody has to send it here.
        """
        self._bank = bank
        self._registry = registry
        self._amend = amend
        self._guard = guard
        self._probes: Mapping[str, Probe] = {probe.name: probe for probe in probes}
        self._refusals: OrderedDict[int, wire_steer.Refused] = OrderedDict()
        self._lock = threading.Lock()  # requests come on another thread than control messages

    @property
    def registry(self) -> Registry:
        if self._registry is None:
            raise SteeringOffError(_OFF)
        return self._registry

    @property
    def is_steering(self) -> bool:
        return self._registry is not None

    def control(self, message: bytes, ask_workers: Workers) -> list[bytes]:
        """One reply for each rank, or our own; the workers answer what is not about steering."""
        try:
            control = _DECODER.decode(message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ask_workers(message)  # they say what is wrong with it
        if isinstance(control, wire_weights.Control):
            return [self._weighed(control, ask_workers)]
        if isinstance(control, wire.TurnProbes) and self._bank() is None:
            return [_ENCODER.encode(_ELSEWHERE)]
        if not isinstance(control, wire_steer.Control):
            replies = ask_workers(message)
            self._note(control, replies[0])
            return replies
        try:
            return [_ENCODER.encode(self._answer(control))]
        except ClairaiError as error:
            return [_ENCODER.encode(wire.Refusal(error.code, error.reason))]

    def thresholds(self, rules: Sequence[Rule]) -> tuple[float, ...]:
        """What each rule's score is compared with; RequestError if that is not known."""
        return tuple(map(self._threshold, rules))

    def _threshold(self, rule: Rule) -> float:
        probe = self._probes.get(rule.probe)
        if probe is None:
            raise RequestError(
                f"stop: no probe is named {rule.probe!r}; {close_to(rule.probe, self._probes)}"
            )
        threshold = probe.threshold if rule.threshold is None else rule.threshold
        if threshold is None:
            raise RequestError(
                f"stop: probe {rule.probe!r} has no threshold of its own; give one in the rule"
            )
        return threshold

    def note_refusal(self, stream: int, error: ClairaiError) -> None:
        with self._lock:
            self._refusals[stream] = wire_steer.Refused(error.code, error.reason)
            while len(self._refusals) > REMEMBERED_REFUSALS:
                self._refusals.popitem(last=False)

    def _answer(self, control: wire_steer.Control) -> wire_steer.Reply:
        match control:
            case wire_steer.WhyRefused(stream):
                with self._lock:
                    return self._refusals.pop(stream, wire_steer.Refused("", ""))
            case wire_steer.ListVectors():
                return self.registry.state()
            case wire_steer.GetVector(name):
                vector = self.registry.vector(name)
                return wire_steer.VectorFile(vector.name, vector.digest, dumps(vector))
            case wire_steer.PutVectors(files, mode):
                self.registry.put([loads(data, source="control message") for data in files], mode)
                return self.registry.state()
            case wire_steer.RemoveVectors(names):
                self.registry.remove(names)
                return self.registry.state()
            case _:
                return self._steer(control)

    def _steer(self, control: wire_steer.Control) -> wire_steer.Reply:
        match control:
            case wire_steer.SetSteering():
                given = {tier: getattr(control, tier) for tier in _TIERS}
                self.registry.set_tiers(
                    **{
                        tier: parse_entries(_read(text), what=tier)
                        for tier, text in given.items()
                        if text is not None
                    }
                )
                return self._tiers()
            case wire_steer.GetSteering():
                return self._tiers()
            case wire_steer.Amend(stream, steer):
                return self._amended(stream, parse_entries(_read(steer), what="steer"))
            case _:
                raise AssertionError(control)

    def _amended(self, stream: int, entries: tuple[Entry, ...]) -> wire_steer.Amended:
        if self._amend is None:
            raise SteeringOffError(_OFF)
        positions = self._amend(stream, entries)
        if not positions:
            raise RequestError(
                f"no request of stream {stream} is running; give the stream of one that is"
            )
        return wire_steer.Amended(tuple(positions), _JSON.encode(list(map(describe, entries))))

    def _tiers(self) -> wire_steer.SteeringState:
        tiers = self.registry.tiers()
        shown = {tier: _JSON.encode(list(map(describe, getattr(tiers, tier)))) for tier in _TIERS}
        return wire_steer.SteeringState(tiers.version, **shown)

    def _weighed(self, control: wire_weights.Control, ask_workers: Workers) -> bytes:
        try:
            if self._guard is not None and isinstance(control, wire_weights.CommitWeights):
                self._guard(control.manifest)
            return self._arrived(ask_workers(_ENCODER.encode(self._informed(control)))[0])
        except ClairaiError as error:
            return _ENCODER.encode(wire.Refusal(error.code, error.reason))

    def _informed(self, control: wire_weights.Control) -> wire_weights.Control:
        """With the vectors that can be replaced, whatever the asker said of them."""
        held = () if self._registry is None else self._registry.vectors()
        known = [
            wire_weights.KnownVector(vector.name, (len(vector.points), vector.width))
            for vector in held
        ]
        return msgspec.structs.replace(
            control, vectors=tuple(known), wants_rows=self._bank() is None
        )

    def _arrived(self, reply: bytes) -> bytes:
        """What came with new weights is known here too; the rest of the reply goes on."""
        committed = _REPLY.decode(reply)
        if not isinstance(committed, wire_weights.WeightsCommitted):
            return reply
        if committed.probe_rows is not None:
            self._learn(self._redirected(committed.probe_rows.names, committed.probe_rows.data))
        elif committed.bank_version is not None:
            self._look()
        version = None
        if committed.vector_rows:
            changed = [
                _with_rows(self.registry.vector(r.names[0]), r) for r in committed.vector_rows
            ]
            self.registry.put(changed, "replace")
            version = self.registry.version
        return _ENCODER.encode(
            msgspec.structs.replace(
                committed, probe_rows=None, vector_rows=(), vectors_version=version
            )
        )

    def _redirected(self, names: Sequence[str], data: memoryview) -> tuple[Probe, ...]:
        """The worker has checked the rows, and holds the same ones."""
        rows_PD = np.frombuffer(data, "<f4").reshape(len(names), -1)
        known = [at for at, name in enumerate(names) if name in self._probes]
        chosen_PD = rows_PD if len(known) == len(rows_PD) else rows_PD[known]
        return turned([self._probes[names[at]] for at in known], chosen_PD)

    def _learn(self, changed: Iterable[Probe]) -> None:
        self._know({**self._probes, **{probe.name: probe for probe in changed}})

    def _look(self) -> bool:
        """At the worker's bank; whether it is here to be seen."""
        columns = self._bank()
        if columns is not None:
            self._know(columns.by_name)
        return columns is not None

    def _know(self, probes: Mapping[str, Probe]) -> None:
        self._probes = probes
        if self._registry is not None:
            self._registry.set_probes(probes)

    def _note(self, control: wire.Control, reply: bytes) -> None:
        """Gates are made of probes: keep the bank's."""
        if not isinstance(_REPLY.decode(reply), wire.BankState | wire.BankVersion):
            return
        match control:
            case wire.TurnProbes():
                self._look()
            case wire.RedirectProbes() if self._look():
                return
            case wire.RedirectProbes(names, rows):
                self._learn(self._redirected(names, rows))
            case wire.AddProbes(files) | wire.ReplaceProbes(files):
                self._learn(load_probe(data, source="control message") for data in files)
            case wire.RemoveProbes(names):
                self._probes = {k: v for k, v in self._probes.items() if k not in names}
                self._learn(())
            case _:
                return


def _with_rows(vector: Vector, new: wire_weights.Rows) -> Vector:
    rows_PD = np.frombuffer(new.data, "<f4").reshape(len(vector.points), vector.width)
    return replace(vector, rows=dict(zip(vector.points, rows_PD, strict=True)))


def _read(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestError("entries must be a list in JSON") from None
