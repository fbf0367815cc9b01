"""The engine's side of a transfer: verify what arrived, load it, answer questions about weights.

Runs in: the worker. It knows nothing of vLLM: the caller provides the function that loads a model.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from clairai.errors import ClairaiError, WeightsError, WeightsTornError
from clairai.local.shared_buffer import BufferCopier
from clairai.points import Point
from clairai.probe import model
from clairai.probe.bank import EngineBank
from clairai.vector.model import Vector
from clairai.weights import check_manifest
from clairai.weights.check_manifest import EngineTensors, ExpectedTensor, TensorGroups
from clairai.weights.checksum import load_native
from clairai.weights.manifest import (
    CPU,
    PROBE_PREFIX,
    STEER_PREFIX,
    Manifest,
    PlannedTensor,
    bank_name,
    changes_model,
    content_digest,
    for_rank,
    kind_of,
    parse_manifest,
)
from clairai.weights.pending_transfer import OpenDeviceBuffer, PendingTransfer, TransferTracker
from clairai.weights.room import LoadNeeds, MeasureNeeds, require_engine_room
from clairai.weights.socket_server import BufferServer
from clairai.wire import weights_messages
from clairai.wire.weights_messages import SharedBytes

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class _VerifiedTransfer:
    """Tensors whose checksums match, by name; valid until the transfer is finished."""

    manifest: Manifest
    digest: str
    nbytes: int
    tensors: tuple[tuple[str, Any], ...]

    def of_kind(self, kind: str) -> list[tuple[str, Any]]:
        return [(name, tensor) for name, tensor in self.tensors if kind_of(name) == kind]


def make_epoch() -> int:
    """A new epoch, of all ranks of an engine."""
    return secrets.randbits(63) + 1


@dataclass(frozen=True)
class RankPlace:
    """Which rank of its engine a worker is, and where all of them are."""

    devices: tuple[str, ...]  # "cpu", or the UUID of a GPU, by rank
    rank: int = 0
    epoch: int = field(default_factory=make_epoch)
    num_banks: int = 1  # the ranks that have the bank of probes, from the first on

    @property
    def device(self) -> str:
        return self.devices[self.rank]

    @property
    def has_bank(self) -> bool:
        return self.rank < self.num_banks

    def list_ranks(self) -> tuple[weights_messages.WeightsRank, ...]:
        """All ranks of this engine core, for its senders."""
        epoch = f"{self.epoch:016x}"
        return tuple(
            weights_messages.WeightsRank(epoch, rank, rank < self.num_banks)
            for rank in range(len(self.devices))
        )


class TransferReceiver:
    """Checks manifests and the buffers that come for them over the socket of this rank."""

    def __init__(
        self,
        folder: Path,
        place: RankPlace,
        get_expected: Callable[[], Mapping[str, ExpectedTensor]],
        open_device: OpenDeviceBuffer,
        get_groups: TensorGroups | None = None,
    ) -> None:
        """`get_expected` is called each time: banks change."""
        load_native()  # compile it now: the first sender would wait for it
        self.place = place
        self._get_expected = get_expected
        self._get_groups = get_groups
        self._tracker = TransferTracker(open_device, _make_copier(place.device))
        self._server = BufferServer(
            folder, place.epoch, place.device, self._tracker, rank=place.rank
        )

    @property
    def epoch(self) -> int:
        return self.place.epoch

    @property
    def device(self) -> str:
        return self.place.device

    @property
    def path(self) -> Path:
        return self._server.path

    def check(self, raw: bytes) -> Manifest:
        """Check a plan without touching a buffer; the manifest as this rank sees it."""
        place = self.place
        manifest = for_rank(parse_manifest(raw), place.rank, len(place.devices))
        expected = self._get_expected()
        if not place.has_bank:  # a rank that has one says what it takes
            expected = {**expected, **_accept_banks(manifest)}
        epoch = f"{place.epoch:016x}"
        engine = EngineTensors(epoch, place.device, expected, self._get_groups)
        check_manifest.check_plan(manifest, engine)
        return manifest

    def expect(self, manifest: Manifest) -> None:
        """Accept the buffers of a checked plan from now on."""
        self._tracker.expect(manifest)

    def verify(self, raw: bytes) -> Manifest:
        """Check all that `open` checks, without loading: before any request has to wait."""
        manifest = self.check(raw)
        _check_transfer(manifest, self._tracker.peek(manifest.transfer))
        return manifest

    def take(
        self, manifest: Manifest, shared: SharedBytes | None = None
    ) -> tuple[_VerifiedTransfer, PendingTransfer]:
        """Verify what arrived for a checked manifest, or is `shared`; keep it until `finish`."""
        if shared is None:
            pending = self._tracker.take(manifest.transfer)
        else:
            pending = self._tracker.copy_shared(manifest, shared)
        try:
            _check_transfer(manifest, pending)
            return _verified(manifest, pending.buffers), pending
        except BaseException:
            self._tracker.finish(pending)
            raise

    def finish(self, pending: PendingTransfer) -> None:
        """What was taken has been loaded, or will not be."""
        self._tracker.finish(pending)

    def forget(self, transfer: str) -> None:
        """Accept no more buffers of this plan."""
        self._tracker.forget(transfer)

    def close(self) -> None:
        self._server.close()


def _make_copier(device: str) -> BufferCopier:
    """With a GPU, copies are made in pinned memory: the GPU fetches a bank's rows from there."""
    if device == CPU:
        return BufferCopier()
    from clairai.weights.torch_buffers import pinned_bytes

    return BufferCopier(pinned_bytes)


def _accept_banks(manifest: Manifest) -> dict[str, ExpectedTensor]:
    return {
        tensor.name: ExpectedTensor((tensor.dtype,), tensor.shape)
        for tensor in manifest.tensors
        if kind_of(tensor.name) != "model"
    }


def _check_transfer(manifest: Manifest, pending: PendingTransfer) -> None:
    check_manifest.check_matches_plan(manifest, pending.plan)
    read = pending.buffers[: pending.num_read]
    check_manifest.check_extents(manifest, [buffer.extent for buffer in read])
    check_manifest.check_checksums(manifest, pending.checksums)


def _verified(manifest: Manifest, buffers: list[Any]) -> _VerifiedTransfer:
    from clairai.weights.torch_buffers import tensor_views

    nbytes = sum(tensor.nbytes for tensor in manifest.tensors)
    tensors = tuple(tensor_views(manifest.tensors, buffers))
    return _VerifiedTransfer(manifest, content_digest(manifest.tensors), nbytes, tensors)


def refuse_device_buffer(handle: bytes, nbytes: int) -> Any:
    """For an engine without a GPU, where `check` has already refused such a plan."""
    raise AssertionError(
        f"a device buffer of {nbytes} bytes came to an engine on {CPU}: {handle!r}"
    )


@dataclass(frozen=True)
class ServedWeights:
    """The weights that serve now."""

    version: int = 0
    label: str = ""
    digest: str = ""
    nbytes: int = 0
    load_s: float = 0.0
    # What is known of the content: all of it after a whole set, what has come since after a part.
    tensors: Mapping[str, PlannedTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Banks:
    """What a control message brings along: the banks that can be changed, shared memory, and more.

    vLLM's own routes bring none of it, so that probes and vectors cannot be named there.
    """

    columns: EngineBank | None = None
    vectors: tuple[weights_messages.VectorShape, ...] = ()
    shared: SharedBytes | None = None
    num_cores: int = 1  # engine cores that load at the same time


@dataclass(frozen=True)
class _BankChanges:
    """What a transfer changes beside the model; the rows are for the engine core's own banks."""

    transfer: str = ""
    columns: EngineBank | None = None
    probe_rows: weights_messages.NewRows | None = None
    vector_rows: tuple[weights_messages.NewRows, ...] = ()


@dataclass(frozen=True)
class _PreparedTransfer:
    """All that is needed to load a transfer, checked."""

    transfer: _VerifiedTransfer
    pending: PendingTransfer
    changes: _BankChanges


class WeightsUpdater:
    """Loads transfers into the model; `load` replaces those tensors of the model that it is given.

    `find_groups` says which tensors have to come together; without it, all of them.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        open_device: OpenDeviceBuffer,
        model_tensors: Mapping[str, ExpectedTensor],
        load: Callable[[list[tuple[str, Any]]], None],
        measure_needs: MeasureNeeds = LoadNeeds,
        *,
        place: RankPlace | None = None,
        find_groups: TensorGroups | None = None,
    ) -> None:
        self.served = ServedWeights()
        self.is_torn = False  # a load stopped half-way: only a whole set repairs it
        self.banks = Banks()
        self.changes = _BankChanges()  # of the last transfer; WeightsControl installs them
        self._model_tensors = dict(model_tensors)
        self._load = load
        self._measure_needs = measure_needs
        self._expected: tuple[object, Mapping[str, ExpectedTensor]] | None = None
        self._prepared: _PreparedTransfer | None = None
        self._nothing = ""  # a prepared transfer with nothing for this rank
        place = place or RankPlace((device,))
        self.receiver = TransferReceiver(
            folder, place, self.expected_tensors, open_device, find_groups
        )

    def expected_tensors(self) -> Mapping[str, ExpectedTensor]:
        """Everything that can be sent now, by name."""
        columns, vectors = self.banks.columns, self.banks.vectors
        key = (() if columns is None else (columns.names, columns.width)), vectors
        if self._expected is None or self._expected[0] != key:  # rarely: names stay the same
            probes = {} if columns is None else _expected_probes(columns)
            steers = {
                f"{STEER_PREFIX}{each.name}": ExpectedTensor(("F32",), each.shape)
                for each in vectors
            }
            self._expected = key, {**self._model_tensors, **probes, **steers}
        return self._expected[1]

    def check(self, raw: bytes) -> Manifest:
        """Check a plan, and that there is room for it; nothing changes."""
        manifest = self.receiver.check(raw)
        if changes_model(manifest):
            nbytes = sum(manifest.buffers) if manifest.device == CPU else 0
            require_engine_room(nbytes, self._find_needs())
        return manifest

    def _find_needs(self) -> LoadNeeds:
        return self._measure_needs().for_many(self.banks.num_cores)

    def plan(self, raw: bytes) -> Manifest:
        """Check a plan, and accept its buffers from now on."""
        manifest = self.check(raw)
        self.receiver.expect(manifest)
        return manifest

    def receive(self, raw: bytes) -> None:
        """Load one manifest; on an error nothing has changed, or `is_torn` is set."""
        self.apply(self.prepare(raw))

    def prepare(self, raw: bytes) -> str:
        """Take what arrived for a manifest and check all of it; the transfer, for `apply`.

        Nothing changes yet, and nothing is left to check: `apply` only loads.
        """
        self.changes = _BankChanges()
        self._drop_prepared()
        try:
            manifest = self.receiver.check(raw)
            if not self.receiver.place.has_bank and not changes_model(manifest):
                self._nothing = manifest.transfer
                return self._nothing
            transfer, pending = self.receiver.take(manifest, self.banks.shared)
            try:
                self._prepared = self._check_prepared(transfer, pending)
            except BaseException:
                self.receiver.finish(pending)
                raise
        except WeightsError as error:
            if self.is_torn:  # by an earlier load
                raise WeightsTornError(f"{error.reason}; and the weights are in pieces") from error
            raise
        return manifest.transfer

    def _check_prepared(
        self, transfer: _VerifiedTransfer, pending: PendingTransfer
    ) -> _PreparedTransfer:
        weights = transfer.of_kind("model")
        if self.is_torn and len(weights) < len(self._model_tensors):
            what = "a part" if weights else "no weights"
            raise WeightsError(f"this brings {what} of the model")
        changes = self._check_banks(transfer)
        if weights:
            # Once more: others may have taken the memory since the plan.
            require_engine_room(0, self._find_needs())
        return _PreparedTransfer(transfer, pending, changes)

    def apply(self, transfer: str) -> None:
        """Load what was prepared; on an error nothing has changed, or `is_torn` is set."""
        if transfer == self._nothing:
            self._nothing = ""
            return
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.transfer.manifest.transfer != transfer:
            raise WeightsError(f"transfer {transfer} is not prepared here; send it again")
        try:
            weights, began_s = prepared.transfer.of_kind("model"), time.perf_counter()
            is_whole = len(weights) == len(self._model_tensors)
            if weights:
                self.is_torn = True
                self._load(weights)
                self.is_torn = False
            load_s = time.perf_counter() - began_s
            self.served = _next_served(self.served, prepared.transfer, load_s, is_whole)
            self.changes = prepared.changes
        finally:
            self.receiver.finish(prepared.pending)

    def take_columns(self, transfer: str) -> EngineBank | None:
        """The bank as this transfer changes it, once; None if it brought no probes."""
        changes = self.changes
        if changes.transfer != transfer:
            return None
        self.changes = replace(changes, columns=None)
        return changes.columns

    def abandon(self, transfer: str) -> None:
        """Forget a transfer that was planned or prepared; the old weights go on serving."""
        self.receiver.forget(transfer)
        if self._prepared is not None and self._prepared.transfer.manifest.transfer == transfer:
            self._drop_prepared()

    def tear(self, version: int) -> None:
        """Another rank has other weights: only a whole set makes the engine whole again."""
        self.is_torn = True
        self.served = ServedWeights(version)

    def _drop_prepared(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            self.receiver.finish(prepared.pending)

    def _check_banks(self, transfer: _VerifiedTransfer) -> _BankChanges:
        probe_rows = self._read_probes(transfer.of_kind("probe"))
        vector_rows = tuple(_read_vector(*each) for each in transfer.of_kind("steer"))
        widths = {vector.name: vector.shape[1] for vector in self.banks.vectors}
        columns = None
        if probe_rows is not None:
            assert self.banks.columns is not None
            rows_PD = np.frombuffer(probe_rows.data, "<f4").reshape(len(probe_rows.names), -1)
            columns = self.banks.columns.redirect(probe_rows.names, rows_PD)
        for rows in vector_rows:
            _check_vector(rows, widths[rows.names[0]])
        return _BankChanges(transfer.manifest.transfer, columns, probe_rows, vector_rows)

    def _read_probes(self, tensors: Sequence[tuple[str, Any]]) -> weights_messages.NewRows | None:
        """The new directions by probe; a whole bank comes as one tensor."""
        if not tensors or self.banks.columns is None:
            return None
        if len(tensors) > 1 and any(name.startswith(f"{PROBE_PREFIX}/") for name, _ in tensors):
            raise WeightsError("a whole bank came, and probes of it beside; send it alone")
        if tensors[0][0].startswith(f"{PROBE_PREFIX}/"):
            return weights_messages.NewRows(self.banks.columns.names, _float_bytes(tensors[0][1]))
        names = tuple(name.removeprefix(PROBE_PREFIX) for name, _ in tensors)
        return weights_messages.NewRows(names, _float_bytes(*(tensor for _, tensor in tensors)))

    def state(self) -> weights_messages.WeightsState:
        return weights_messages.WeightsState(
            version=self.served.version,
            label=self.served.label,
            digest=self.served.digest,
            epoch=f"{self.receiver.epoch:016x}",
            device=self.receiver.place.devices[0],
            num_tensors=len(self.expected_tensors()),
            is_torn=self.is_torn,
            socket=str(self.receiver.path),
            devices=self.receiver.place.devices,
            ranks=self.receiver.place.list_ranks(),
            bank_version=0 if self.banks.columns is None else self.banks.columns.version,
        )

    def close(self) -> None:
        self._drop_prepared()
        self.receiver.close()


class _VllmWorker(Protocol):
    """The weight updates of vLLM's worker: v1/worker/gpu_worker.py, 0.26 and 0.32."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...


class BankHolder(Protocol):
    """Scores with a bank of probes: the publisher, or a rank of a pipeline that follows it."""

    @property
    def bank(self) -> EngineBank: ...

    def install(self, bank: EngineBank) -> EngineBank: ...

    def set_weights_version(self, version: int, bank_version: int | None = None) -> None: ...


class WeightsControl:
    """Answers control messages about weights; `holder` is None in a rank without a bank."""

    def __init__(
        self,
        worker: _VllmWorker,
        updater: WeightsUpdater,
        holder: BankHolder | None,
        installing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """A changed bank is installed within `installing()`."""
        self._worker, self._updater, self._holder = worker, updater, holder
        self._installing = installing

    def answer(
        self, control: weights_messages.WeightsControl | weights_messages.RankControl
    ) -> weights_messages.WeightsReply:
        shared = getattr(control, "lent", None)  # of a commit
        self._updater.banks = Banks(
            columns=None if self._holder is None else self._holder.bank,
            vectors=getattr(control, "vectors", ()),  # of a question
            shared=shared,
            num_cores=getattr(control, "num_cores", 1),
        )
        try:
            return self._answer(control)
        except ClairaiError:
            raise
        except Exception as error:  # a rank that raises would leave the replies of others unread
            _log.exception("a question about weights could not be answered")
            raise self._load_error(error) from error
        finally:
            self._updater.banks = Banks()

    def _answer(
        self, control: weights_messages.WeightsControl | weights_messages.RankControl
    ) -> weights_messages.WeightsReply:
        updater = self._updater
        match control:
            case weights_messages.DescribeWeights():
                return updater.state()
            case weights_messages.ListTensors():
                return _list_tensors(updater.expected_tensors())
            case weights_messages.CheckWeights(manifest):
                return _plan_reply(updater.check(manifest))
            case weights_messages.PlanWeights(manifest):
                return _plan_reply(updater.plan(manifest))
            case weights_messages.VerifyWeights(manifest):
                return _plan_reply(updater.receiver.verify(manifest))
            case weights_messages.CommitWeights(manifest):
                transfer = updater.prepare(manifest)
                self._apply(transfer, is_begun=False)
                committed = self._install(transfer)
                if control.wants_rows:
                    return committed
                return msgspec.structs.replace(committed, probe_rows=None)
            case weights_messages.PrepareWeights(manifest):
                return weights_messages.WeightsPlanned(updater.prepare(manifest), 0)
            case weights_messages.ApplyWeights(transfer, is_begun):
                return self._apply(transfer, is_begun=is_begun)
            case weights_messages.InstallBanks(transfer):
                return self._install(transfer)
            case weights_messages.AbandonWeights(transfer, is_begun):
                updater.abandon(transfer)
                if is_begun:
                    with suppress(RuntimeError):  # none was begun
                        self._worker.finish_weight_update()
                return updater.state()
            case weights_messages.TearWeights(version, bank_version):
                updater.tear(version)
                if self._holder is not None:
                    self._holder.set_weights_version(version, bank_version)
                return updater.state()

    def _apply(self, transfer: str, *, is_begun: bool) -> weights_messages.WeightsCommitted:
        """Update as vLLM's own routes do, in one call; raises nothing but our errors."""
        try:
            if not is_begun:
                self._worker.start_weight_update()
            self._worker.update_weights({"prepared": transfer})
            if not is_begun:
                self._worker.finish_weight_update()
        except ClairaiError:
            raise
        except Exception as error:
            _log.exception("new weights could not be loaded")
            raise self._load_error(error) from error
        return self._committed(None)

    def _load_error(self, error: Exception) -> WeightsError:
        kind = type(error).__name__
        if self._updater.is_torn:
            return WeightsTornError(
                f"loading stopped half-way ({kind}, see the engine's log); send a whole set of "
                f"weights, or restart the engine"
            )
        return WeightsError(
            f"the engine cannot load them ({kind}, see its log); the old weights serve on"
        )

    def _install(self, transfer: str) -> weights_messages.WeightsCommitted:
        """Install the changed bank; the model has its new weights already."""
        columns = self._updater.take_columns(transfer)
        if columns is not None:
            assert self._holder is not None
            with self._installing():
                columns = self._holder.install(columns)
        return self._committed(None if columns is None else columns.version)

    def _committed(self, bank_version: int | None) -> weights_messages.WeightsCommitted:
        served, changes = self._updater.served, self._updater.changes
        return weights_messages.WeightsCommitted(
            version=served.version,
            digest=served.digest,
            nbytes=served.nbytes,
            load_s=served.load_s,
            bank_version=bank_version,
            probe_rows=changes.probe_rows,
            vector_rows=changes.vector_rows,
        )


def _expected_probes(columns: EngineBank) -> dict[str, ExpectedTensor]:
    """Each probe, and all of them as one tensor."""
    if not columns.names:
        return {}
    one = ExpectedTensor(("F32",), (columns.width,))
    whole = ExpectedTensor(("F32",), (len(columns.names), columns.width))
    named = dict.fromkeys((f"{PROBE_PREFIX}{name}" for name in columns.names), one)
    return named | {bank_name(columns.names): whole}


def _read_vector(name: str, tensor: Any) -> weights_messages.NewRows:
    return weights_messages.NewRows((name.removeprefix(STEER_PREFIX),), _float_bytes(tensor))


def _float_bytes(*tensors: Any) -> memoryview:
    """The numbers of all tensors in a row, valid for as long as the view is held.

    GPU tensors are copied to the host. Host tensors are the engine's own copy, or sealed pages.
    """
    parts = [np.asarray(tensor.cpu().numpy(), "<f4").reshape(-1) for tensor in tensors]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts)
    numbers.setflags(write=False)
    return numbers.data.cast("B")


def _check_vector(new: weights_messages.NewRows, width: int) -> None:
    """VectorError for numbers that no vector may hold; the engine core does not check again."""
    rows_PD = np.frombuffer(new.data, "<f4").reshape(-1, width)
    if model.are_usable(rows_PD).all():
        return
    Vector("checked", {Point("post_block", at): row_D for at, row_D in enumerate(rows_PD)})


def _next_served(
    before: ServedWeights, transfer: _VerifiedTransfer, load_s: float, is_whole: bool
) -> ServedWeights:
    """Probes and vectors alone leave the version as it is."""
    if not transfer.of_kind("model"):
        return replace(before, nbytes=transfer.nbytes, load_s=load_s)
    label, version = transfer.manifest.label, before.version + 1
    sent = {tensor.name: tensor for tensor in transfer.manifest.tensors}
    if is_whole:
        return ServedWeights(version, label, transfer.digest, transfer.nbytes, load_s, sent)
    known = {**before.tensors, **sent}
    digest = content_digest(known.values())
    return ServedWeights(version, label, digest, transfer.nbytes, load_s, known)


def _list_tensors(expected: Mapping[str, ExpectedTensor]) -> weights_messages.Tensors:
    return weights_messages.Tensors(
        tuple(
            weights_messages.ListedTensor(name, tensor.dtypes, tensor.shape)
            for name, tensor in expected.items()
        )
    )


def _plan_reply(manifest: Manifest) -> weights_messages.WeightsPlanned:
    return weights_messages.WeightsPlanned(manifest.transfer, sum(manifest.buffers))
