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

from clairai.engine.steer.steering_registry import SteeringRegistry
from clairai.errors import ClairaiError, RequestError, SteeringOffError
from clairai.fields.catalog import rule_threshold
from clairai.fields.rules import StopRule
from clairai.fields.steer import SteerEntry, parse_entries
from clairai.probe.bank import EngineBank
from clairai.probe.files import loads as load_probe
from clairai.probe.model import Probe, replace_checked_directions
from clairai.vector.files import loads
from clairai.vector.model import Vector
from clairai.vector.safetensors_format import dumps
from clairai.wire import ring_messages, steering_messages, weights_messages

REMEMBERED_REFUSALS: Final = 1024
_DECODER: Final = msgspec.msgpack.Decoder(ring_messages.Control)
_REPLY_DECODER: Final = msgspec.msgpack.Decoder(ring_messages.ControlReply)
_ENCODER: Final = msgspec.msgpack.Encoder()
_JSON_ENCODER: Final = msgspec.json.Encoder()
_TIER_NAMES: Final = ("base", "prefill", "decode")
_STEERING_OFF: Final = (
    'this engine cannot steer; start it with "steering": true or "vectors": [files] '
    "in the clairai settings"
)
# Rows that the worker alone can read would be unknown here.
_WORKER_ELSEWHERE: Final = ring_messages.Refusal(
    "unsupported", "the worker is in another process; send the rows in the message"
)

AskWorkers = Callable[[bytes], list[bytes]]
AmendStream = Callable[[int, Sequence[SteerEntry]], list[int]]
CheckWeights = Callable[[bytes], None]
ReadBank = Callable[[], EngineBank | None]


class CoreControl:
    """One for each engine core; `registry` is None where rows cannot be steered."""

    def __init__(
        self,
        registry: SteeringRegistry | None,
        probes: tuple[Probe, ...],
        amend: AmendStream | None = None,
        guard: CheckWeights | None = None,
        bank: ReadBank = lambda: None,
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
        self._refusals: OrderedDict[int, steering_messages.RefusalReason] = OrderedDict()
        self._lock = threading.Lock()  # requests come on another thread than control messages

    @property
    def registry(self) -> SteeringRegistry:
        if self._registry is None:
            raise SteeringOffError(_STEERING_OFF)
        return self._registry

    @property
    def is_steering(self) -> bool:
        return self._registry is not None

    def control(self, message: bytes, ask_workers: AskWorkers) -> list[bytes]:
        """One reply for each rank, or our own; the workers answer what is not about steering."""
        try:
            control = _DECODER.decode(message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ask_workers(message)  # they say what is wrong with it
        if isinstance(control, weights_messages.WeightsControl):
            return [self._weighed(control, ask_workers)]
        if isinstance(control, ring_messages.RedirectProbesShared) and self._bank() is None:
            return [_ENCODER.encode(_WORKER_ELSEWHERE)]
        if not isinstance(control, steering_messages.SteeringControl):
            replies = ask_workers(message)
            self._note(control, replies[0])
            return replies
        try:
            return [_ENCODER.encode(self._answer(control))]
        except ClairaiError as error:
            return [_ENCODER.encode(ring_messages.Refusal(error.code, error.reason))]

    def thresholds(self, rules: Sequence[StopRule]) -> tuple[float, ...]:
        """What each rule's score is compared with; RequestError if that is not known."""
        return tuple(
            rule_threshold(rule, self._probes, what=f"stop[{i}]") for i, rule in enumerate(rules)
        )

    def note_refusal(self, stream: int, error: ClairaiError) -> None:
        with self._lock:
            self._refusals[stream] = steering_messages.RefusalReason(error.code, error.reason)
            while len(self._refusals) > REMEMBERED_REFUSALS:
                self._refusals.popitem(last=False)

    def _answer(
        self, control: steering_messages.SteeringControl
    ) -> steering_messages.SteeringReply:
        match control:
            case steering_messages.WhyRefused(stream):
                with self._lock:
                    return self._refusals.pop(stream, steering_messages.RefusalReason("", ""))
            case steering_messages.ListVectors():
                return self.registry.state()
            case steering_messages.GetVector(name):
                vector = self.registry.vector(name)
                return steering_messages.VectorFile(vector.name, vector.digest, dumps(vector))
            case steering_messages.PutVectors(files, mode):
                self.registry.put([loads(data, source="control message") for data in files], mode)
                return self.registry.state()
            case steering_messages.RemoveVectors(names):
                self.registry.remove(names)
                return self.registry.state()
            case _:
                return self._steer(control)

    def _steer(self, control: steering_messages.SteeringControl) -> steering_messages.SteeringReply:
        match control:
            case steering_messages.SetSteering():
                given = {tier: getattr(control, tier) for tier in _TIER_NAMES}
                self.registry.set_tiers(
                    **{
                        tier: parse_entries(_decode_entries(text), what=tier)
                        for tier, text in given.items()
                        if text is not None
                    }
                )
                return self._tiers()
            case steering_messages.GetSteering():
                return self._tiers()
            case steering_messages.ChangeSteering(stream, steer):
                return self._amended(stream, parse_entries(_decode_entries(steer), what="steer"))
            case _:
                raise AssertionError(control)

    def _amended(
        self, stream: int, entries: tuple[SteerEntry, ...]
    ) -> steering_messages.SteeringChanged:
        if self._amend is None:
            raise SteeringOffError(_STEERING_OFF)
        positions = self._amend(stream, entries)
        if not positions:
            raise RequestError(
                f"no request of stream {stream} is running; give the stream of one that is"
            )
        return steering_messages.SteeringChanged(
            tuple(positions), _JSON_ENCODER.encode([one.describe() for one in entries])
        )

    def _tiers(self) -> steering_messages.SteeringState:
        tiers = self.registry.tiers()
        shown = {
            tier: _JSON_ENCODER.encode([one.describe() for one in getattr(tiers, tier)])
            for tier in _TIER_NAMES
        }
        return steering_messages.SteeringState(tiers.version, **shown)

    def _weighed(self, control: weights_messages.WeightsControl, ask_workers: AskWorkers) -> bytes:
        try:
            if self._guard is not None and isinstance(control, weights_messages.CommitWeights):
                self._guard(control.manifest)
            return self._arrived(ask_workers(_ENCODER.encode(self._informed(control)))[0])
        except ClairaiError as error:
            return _ENCODER.encode(ring_messages.Refusal(error.code, error.reason))

    def _informed(
        self, control: weights_messages.WeightsControl
    ) -> weights_messages.WeightsControl:
        """With the vectors that can be replaced, whatever the asker said of them."""
        held = () if self._registry is None else self._registry.vectors()
        known = [
            weights_messages.KnownVector(vector.name, (len(vector.points), vector.width))
            for vector in held
        ]
        return msgspec.structs.replace(
            control, vectors=tuple(known), wants_rows=self._bank() is None
        )

    def _arrived(self, reply: bytes) -> bytes:
        """What came with new weights is known here too; the rest of the reply goes on."""
        committed = _REPLY_DECODER.decode(reply)
        if not isinstance(committed, weights_messages.WeightsCommitted):
            return reply
        if committed.probe_rows is not None:
            self._learn(self._redirected(committed.probe_rows.names, committed.probe_rows.data))
        elif committed.bank_version is not None:
            self._look()
        version = None
        if committed.vector_rows:
            changed = [
                _replace_rows(self.registry.vector(r.names[0]), r) for r in committed.vector_rows
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
        return replace_checked_directions([self._probes[names[at]] for at in known], chosen_PD)

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

    def _note(self, control: ring_messages.Control, reply: bytes) -> None:
        """Gates are made of probes: keep the bank's."""
        if not isinstance(
            _REPLY_DECODER.decode(reply), ring_messages.BankState | ring_messages.BankVersion
        ):
            return
        match control:
            case ring_messages.RedirectProbesShared():
                self._look()
            case ring_messages.RedirectProbes() if self._look():
                return
            case ring_messages.RedirectProbes(names, rows):
                self._learn(self._redirected(names, rows))
            case ring_messages.AddProbes(files) | ring_messages.ReplaceProbes(files):
                self._learn(load_probe(data, source="control message") for data in files)
            case ring_messages.RemoveProbes(names):
                self._probes = {k: v for k, v in self._probes.items() if k not in names}
                self._learn(())
            case _:
                return


def _replace_rows(vector: Vector, new: weights_messages.NewRows) -> Vector:
    rows_PD = np.frombuffer(new.data, "<f4").reshape(len(vector.points), vector.width)
    return replace(vector, rows=dict(zip(vector.points, rows_PD, strict=True)))


def _decode_entries(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestError("entries must be a list in JSON") from None
