"""Answers control messages about steering, and follows changes that the workers make.

Runs in: the engine core. Every request passes it, and all parts of an engine share it, so names of
vectors and probes are resolved here and nowhere else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec
import numpy as np

from clairai.engine.steer.steering_registry import SteeringRegistry
from clairai.errors import (
    ClairaiError,
    EngineGoneError,
    RequestError,
    SteeringOffError,
    UnsupportedError,
    WeightsError,
    WeightsTornError,
    make_error,
)
from clairai.fields.catalog import rule_threshold
from clairai.fields.rules import StopRule
from clairai.fields.steer import SteerEntry, parse_entries
from clairai.probe.bank import EngineBank
from clairai.probe.files import loads as load_probe
from clairai.probe.model import Probe, replace_checked_directions
from clairai.vector.files import loads
from clairai.vector.model import Vector
from clairai.vector.safetensors_format import dumps
from clairai.wire import control_messages, ring_messages, steering_messages, weights_messages

REMEMBERED_REFUSALS: Final = 1024
_DECODER: Final = msgspec.msgpack.Decoder(control_messages.Control)
_REPLY_DECODER: Final = msgspec.msgpack.Decoder(control_messages.ControlReply)
_ENCODER: Final = msgspec.msgpack.Encoder()
_JSON_ENCODER: Final = msgspec.json.Encoder()
_TIER_NAMES: Final = ("base", "prefill", "decode")
_STEERING_OFF: Final = (
    'this engine cannot steer; start it with "steering": true or "vectors": [files] '
    "in the clairai settings"
)
# The core could not read rows that are shared with the worker's process alone.
_WORKER_ELSEWHERE: Final = ring_messages.Refusal(
    "unsupported", "the worker is in another process; send the rows in the message"
)

_FOR_RANKS: Final = ring_messages.Refusal(
    "unsupported", "the engine core asks this of its ranks; send check, plan, verify or commit"
)
_FOR_ALL_CORES: Final = (
    "this engine core is one of several, and weights reach all of them or none; send them to their "
    "API server, with a Sender or vLLM's trainer"
)

AskWorkers = Callable[[bytes], list[bytes]]
AmendStream = Callable[[int, Sequence[SteerEntry]], list[int]]
CheckWeights = Callable[[bytes], None]
QuestionT = TypeVar("QuestionT", bound=weights_messages.WeightsQuestion)
ReadBank = Callable[[], EngineBank | None]


class CoreControl:
    """One for each engine core; without a `registry` the engine cannot steer."""

    def __init__(
        self,
        registry: SteeringRegistry | None,
        probes: tuple[Probe, ...],
        amend: AmendStream | None = None,
        guard: CheckWeights | None = None,
        bank: ReadBank = lambda: None,
        num_ranks: int = 1,
        publisher_rank: int = 0,
        *,
        is_one_of_several: bool = False,
    ) -> None:
        """`amend` changes the steering of a stream's running answers and returns their positions.

        `guard` raises if the weights of a manifest may not be committed now. `bank` gives the
        worker's bank if the worker is in this process; else its changes are followed by message.
        New weights are loaded by all of `num_ranks` or by none. The first of their replies is that
        of `publisher_rank`, which has the ring. A core that `is_one_of_several` takes part in what
        its API server commits on all of them.
        """
        self._is_one_of_several = is_one_of_several
        self._loaded: tuple[str, bytes] | None = None  # a transfer, and what the ranks replied
        self._read_bank = bank
        self._num_ranks = num_ranks
        others = (rank for rank in range(num_ranks) if rank != publisher_rank)
        self._order = (publisher_rank, *others)  # of the ranks' replies
        self._registry = registry
        self._amend = amend
        self._check_weights = guard
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
        """The core's own reply to a message about steering, else one reply of each rank."""
        try:
            control = _DECODER.decode(message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ask_workers(message)  # the workers say what is wrong with it
        if isinstance(control, weights_messages.WeightsControl):
            return [self._control_weights(control, ask_workers)]
        if isinstance(control, weights_messages.RankControl | weights_messages.CheckIdle):
            return [self._take_part(control, ask_workers)]
        if isinstance(control, control_messages.RedirectProbesShared) and self._read_bank() is None:
            return [_ENCODER.encode(_WORKER_ELSEWHERE)]
        if not isinstance(control, steering_messages.SteeringControl):
            replies = ask_workers(message)
            self._follow_probes(control, replies[0])
            return replies
        try:
            return [_ENCODER.encode(self._answer(control))]
        except ClairaiError as error:
            return [_ENCODER.encode(ring_messages.Refusal(error.code, error.reason))]

    def thresholds(self, rules: Sequence[StopRule]) -> tuple[float, ...]:
        """The threshold of each rule; RequestError if one is unknown."""
        return tuple(
            rule_threshold(rule, self._probes, what=f"stop[{i}]") for i, rule in enumerate(rules)
        )

    def note_refusal(self, stream: int, error: ClairaiError) -> None:
        """Keep the reason until a `WhyRefused` message asks for it."""
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
            case steering_messages.SetSteering():
                given = {tier: getattr(control, tier) for tier in _TIER_NAMES}
                tiers = {
                    tier: parse_entries(_decode_entries(text), what=tier)
                    for tier, text in given.items()
                    if text is not None
                }
                self.registry.set_tiers(**tiers)
                return self._describe_tiers()
            case steering_messages.GetSteering():
                return self._describe_tiers()
            case steering_messages.ChangeSteering(stream, steer):
                entries = parse_entries(_decode_entries(steer), what="steer")
                return self._change_steering(stream, entries)

    def _change_steering(
        self, stream: int, entries: tuple[SteerEntry, ...]
    ) -> steering_messages.SteeringChanged:
        if self._amend is None:
            raise SteeringOffError(_STEERING_OFF)
        positions = self._amend(stream, entries)
        return steering_messages.SteeringChanged(
            tuple(positions), _JSON_ENCODER.encode([one.describe() for one in entries])
        )

    def _describe_tiers(self) -> steering_messages.SteeringState:
        tiers = self.registry.tiers()
        described = {
            tier: _JSON_ENCODER.encode([one.describe() for one in getattr(tiers, tier)])
            for tier in _TIER_NAMES
        }
        return steering_messages.SteeringState(tiers.version, **described)

    def _control_weights(
        self, control: weights_messages.WeightsControl, ask_workers: AskWorkers
    ) -> bytes:
        try:
            if isinstance(control, weights_messages.CommitWeights):
                self._require_alone()
                self._require_idle(control.manifest)
            return self._follow_commit(self._ask_ranks(control, _explain_death(ask_workers)))
        except ClairaiError as error:
            return _ENCODER.encode(ring_messages.Refusal(error.code, error.reason))

    def _require_alone(self) -> None:
        """UnsupportedError if other cores would go on with the old weights."""
        if self._is_one_of_several:
            raise UnsupportedError(_FOR_ALL_CORES)

    def _require_idle(self, manifest: bytes) -> None:
        if self._check_weights is not None:
            self._check_weights(manifest)

    def _take_part(
        self,
        control: weights_messages.RankControl | weights_messages.CheckIdle,
        ask_workers: AskWorkers,
    ) -> bytes:
        """Do what the API server asks of each of its cores; their ranks are asked the same."""
        if not self._is_one_of_several:
            return _ENCODER.encode(_FOR_RANKS)
        ask = _explain_death(ask_workers)
        try:
            match control:
                case weights_messages.CheckIdle(manifest):
                    self._require_idle(manifest)
                    return _ENCODER.encode(weights_messages.WeightsPlanned("", 0))
                case weights_messages.PrepareWeights():
                    transfer = self._prepare_on_ranks(control, ask)
                    return _ENCODER.encode(weights_messages.WeightsPlanned(transfer, 0))
                case weights_messages.ApplyWeights(transfer):
                    reply = self._apply_on_ranks(control, ask)
                    self._loaded = transfer, reply
                    return _without_rows(reply)
                case weights_messages.InstallBanks(transfer):
                    return self._install_loaded(transfer, ask)
                case _:
                    replies = ask(_ENCODER.encode(control))
                    self._require_all(replies)
                    return replies[0]
        except ClairaiError as error:
            return _ENCODER.encode(ring_messages.Refusal(error.code, error.reason))

    def _install_loaded(self, transfer: str, ask_workers: AskWorkers) -> bytes:
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded[0] != transfer:
            raise WeightsError(f"transfer {transfer} was not loaded last; send it again")
        return self._follow_commit(self._install_probes(transfer, loaded[1], ask_workers))

    def _ask_ranks(
        self, control: weights_messages.WeightsControl, ask_workers: AskWorkers
    ) -> bytes:
        """The reply of the first rank, or a refusal of any other."""
        question = _ENCODER.encode(self._with_known_vectors(control))
        if self._num_ranks == 1 or isinstance(
            control, weights_messages.DescribeWeights | weights_messages.ListTensors
        ):
            return ask_workers(question)[0]
        if isinstance(control, weights_messages.CommitWeights):
            prepare = weights_messages.PrepareWeights(control.manifest, control.lent)
            return self._commit_on_ranks(prepare, ask_workers, is_begun=False)
        if isinstance(control, weights_messages.PlanWeights):
            # Checked first, so that a plan that one rank refuses replaces none of another sender.
            checked = weights_messages.CheckWeights(control.manifest)
            self._require_all(ask_workers(_ENCODER.encode(self._with_known_vectors(checked))))
        replies = ask_workers(question)
        self._require_all(replies)
        return replies[0]

    def update_begun(self, plan: bytes | None, commit: bytes | None, ask: AskWorkers) -> None:
        """Plan or commit a manifest in an update that a caller of vLLM's has begun, and will end.

        That caller pauses the engine, or accepts that requests go on with other weights. An error
        ends the update, as it does with vLLM's own backends.
        """
        ask = _explain_death(ask)
        try:
            self._require_alone()
            if plan is not None:
                self._require_all([self._ask_ranks(weights_messages.PlanWeights(plan), ask)])
            if commit is not None:
                prepare = weights_messages.PrepareWeights(commit)
                self._follow_commit(self._commit_on_ranks(prepare, ask, is_begun=True))
        except EngineGoneError:
            raise
        except ClairaiError:
            ask(_ENCODER.encode(weights_messages.AbandonWeights("", is_begun=True)))
            raise

    def _commit_on_ranks(
        self, prepare: weights_messages.PrepareWeights, ask_workers: AskWorkers, *, is_begun: bool
    ) -> bytes:
        """All ranks load new weights, or none: each is prepared before the first one loads.

        `is_begun`: a caller of vLLM's begins the update and ends it.
        """
        transfer = self._prepare_on_ranks(prepare, ask_workers)
        apply = weights_messages.ApplyWeights(transfer, is_begun)
        return self._install_probes(transfer, self._apply_on_ranks(apply, ask_workers), ask_workers)

    def _prepare_on_ranks(
        self, prepare: weights_messages.PrepareWeights, ask_workers: AskWorkers
    ) -> str:
        """The transfer, for which every rank is prepared."""
        replies = ask_workers(_ENCODER.encode(self._with_known_vectors(prepare)))
        prepared = [_REPLY_DECODER.decode(reply) for reply in replies]
        transfer = next(
            (one.transfer for one in prepared if isinstance(one, weights_messages.WeightsPlanned)),
            "",
        )
        try:
            self._require_all(replies)
        except ClairaiError:
            if transfer:
                ask_workers(_ENCODER.encode(weights_messages.AbandonWeights(transfer)))
            raise
        return transfer

    def _apply_on_ranks(
        self, apply: weights_messages.ApplyWeights, ask_workers: AskWorkers
    ) -> bytes:
        """Load what is prepared: only vLLM's own loading can fail now.

        Then no rank may serve until a whole set comes.
        """
        replies = ask_workers(_ENCODER.encode(apply))
        outcomes = map(_REPLY_DECODER.decode, replies)
        torn = weights_messages.describe_torn(outcomes, "ranks", WeightsTornError.code)
        if torn is not None:
            self._tear(ask_workers)
            raise WeightsTornError(torn)
        self._require_all(replies)
        return replies[0]

    def _require_all(self, replies: Sequence[bytes]) -> None:
        """Raise the first refusal among the replies of the ranks."""
        for rank, reply in zip(self._order, replies, strict=False):
            outcome = _REPLY_DECODER.decode(reply)
            if isinstance(outcome, ring_messages.Refusal):
                where = f"rank {rank}: " if rank else ""
                raise make_error(outcome.code, f"{where}{outcome.reason}")

    def _install_probes(self, transfer: str, reply: bytes, ask_workers: AskWorkers) -> bytes:
        """Have the ranks score with probes that came along: only when all have loaded the model.

        Else a load that fails on one rank would leave it with other probes than the rest.
        """
        committed = _REPLY_DECODER.decode(reply)
        assert isinstance(committed, weights_messages.WeightsCommitted)
        if committed.probe_rows is None:
            return reply
        replies = ask_workers(_ENCODER.encode(weights_messages.InstallBanks(transfer)))
        self._require_all(replies)
        return replies[0]

    def _tear(self, ask_workers: AskWorkers) -> None:
        """No rank may serve until a whole set comes; all count on from the same versions."""
        describe = self._with_known_vectors(weights_messages.DescribeWeights())
        replies = map(_REPLY_DECODER.decode, ask_workers(_ENCODER.encode(describe)))
        states = [one for one in replies if isinstance(one, weights_messages.WeightsState)]
        ask_workers(_ENCODER.encode(weights_messages.TearWeights.after(states)))

    def _with_known_vectors(self, control: QuestionT) -> QuestionT:
        """Tell the workers which vectors can be replaced, whatever the sender said of them."""
        vectors = () if self._registry is None else self._registry.vectors()
        known = [
            weights_messages.VectorShape(vector.name, (len(vector.points), vector.width))
            for vector in vectors
        ]
        return msgspec.structs.replace(
            control, vectors=tuple(known), wants_rows=self._read_bank() is None
        )

    def _follow_commit(self, reply: bytes) -> bytes:
        """Take over probes and vectors that came with new weights, and strip them off the reply."""
        committed = _REPLY_DECODER.decode(reply)
        if not isinstance(committed, weights_messages.WeightsCommitted):
            return reply
        if committed.probe_rows is not None:
            rows = committed.probe_rows
            self._update_probes(self._redirect_probes(rows.names, rows.data))
        elif committed.bank_version is not None:
            self._copy_bank()
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

    def _follow_probes(self, control: control_messages.Control, reply: bytes) -> None:
        """Make the change of probes here that the workers have made: gates are made of probes."""
        if not isinstance(
            _REPLY_DECODER.decode(reply), control_messages.BankState | control_messages.BankVersion
        ):
            return
        match control:
            case control_messages.RedirectProbesShared():
                self._copy_bank()
            case control_messages.RedirectProbes() if self._copy_bank():
                return
            case control_messages.RedirectProbes(names, rows):
                self._update_probes(self._redirect_probes(names, rows))
            case control_messages.AddProbes(files) | control_messages.ReplaceProbes(files):
                self._update_probes(load_probe(data, source="control message") for data in files)
            case control_messages.RemoveProbes(names):
                self._set_probes({k: v for k, v in self._probes.items() if k not in names})
            case _:
                return

    def _redirect_probes(self, names: Sequence[str], data: memoryview) -> tuple[Probe, ...]:
        """The probes with new directions, which the worker has checked."""
        rows_PD = np.frombuffer(data, "<f4").reshape(len(names), -1)
        known = [index for index, name in enumerate(names) if name in self._probes]
        known_PD = rows_PD if len(known) == len(rows_PD) else rows_PD[known]
        probes = [self._probes[names[index]] for index in known]
        return replace_checked_directions(probes, known_PD)

    def _copy_bank(self) -> bool:
        """Use the probes of the worker's bank; False if it is in another process."""
        bank = self._read_bank()
        if bank is not None:
            self._set_probes(bank.by_name)
        return bank is not None

    def _update_probes(self, changed: Iterable[Probe]) -> None:
        self._set_probes({**self._probes, **{probe.name: probe for probe in changed}})

    def _set_probes(self, probes: Mapping[str, Probe]) -> None:
        self._probes = probes
        if self._registry is not None:
            self._registry.set_probes(probes)


def _explain_death(ask_workers: AskWorkers) -> AskWorkers:
    """Ranks reply to everything: a question that raises has lost one of them, and vLLM ends."""

    def ask(message: bytes) -> list[bytes]:
        try:
            return ask_workers(message)
        except Exception as error:
            raise EngineGoneError(
                f"a rank has ended while it was asked about weights ({error}): vLLM ends the "
                f"engine, and nothing more is answered; start it again"
            ) from error

    return ask


def _without_rows(reply: bytes) -> bytes:
    committed = _REPLY_DECODER.decode(reply)
    return _ENCODER.encode(msgspec.structs.replace(committed, probe_rows=None, vector_rows=()))


def _replace_rows(vector: Vector, new: weights_messages.NewRows) -> Vector:
    rows_PD = np.frombuffer(new.data, "<f4").reshape(len(vector.points), vector.width)
    return replace(vector, rows=dict(zip(vector.points, rows_PD, strict=True)))


def _decode_entries(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestError("entries must be a list in JSON") from None
