"""Takes manifests and what came on the socket; gives verified tensors to load, or the reason not.

One for each engine that takes weights. It knows nothing of vLLM: who loads them is not its matter.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from clairai.weights.check_manifest import EngineTensors, ExpectedTensor
from clairai.weights.checksum import load_native
from clairai.weights.manifest import (
    CPU,
    PROBE_PREFIX,
    STEER_PREFIX,
    Manifest,
    bank_name,
    content_digest,
    kind_of,
    parse_manifest,
)
from clairai.weights.pending_transfer import OpenDeviceBuffer, PendingTransfer, TransferTracker
from clairai.weights.socket_server import BufferServer
from clairai.wire import weights_messages
from clairai.wire.weights_messages import SharedBytes

GetExpectedTensors = Callable[[], Mapping[str, ExpectedTensor]]


@dataclass(frozen=True)
class VerifiedTransfer:
    """Tensors whose bytes are those that were packed, by name; valid while it is open."""

    manifest: Manifest
    digest: str
    nbytes: int
    tensors: tuple[tuple[str, Any], ...]

    def of(self, kind: str) -> list[tuple[str, Any]]:
        return [(name, tensor) for name, tensor in self.tensors if kind_of(name) == kind]


class TransferReceiver:
    """`slots` is asked each time: what banks hold changes."""

    def __init__(
        self, folder: Path, device: str, slots: GetExpectedTensors, open_device: OpenDeviceBuffer
    ) -> None:
        load_native()  # compiled now: the first sender would wait for it
        self.epoch = secrets.randbits(63) + 1
        self.device = device
        self._slots = slots
        self._dock = TransferTracker(open_device, _buffer_copier(device))
        self._link = BufferServer(folder, self.epoch, device, self._dock)

    @property
    def path(self) -> Path:
        return self._link.path

    def holding(self) -> EngineTensors:
        return EngineTensors(f"{self.epoch:016x}", self.device, self._slots())

    def check(self, raw: bytes) -> Manifest:
        """The manifest, if its plan is good; touches no buffer."""
        manifest = parse_manifest(raw)
        check_manifest.check_plan(manifest, self.holding())
        return manifest

    def plan(self, raw: bytes) -> Manifest:
        """As check; from now on its buffers are taken."""
        manifest = self.check(raw)
        self._dock.expect(manifest)
        return manifest

    def verify(self, raw: bytes) -> Manifest:
        """As unpack, and nothing is taken: what would be refused is known before anybody waits."""
        manifest = self.check(raw)
        _check_transfer(manifest, self._dock.look(manifest.transfer))
        return manifest

    @contextmanager
    def unpack(self, raw: bytes, lent: SharedBytes | None = None) -> Iterator[VerifiedTransfer]:
        """All that came, or is lent, verified; raises before anybody has seen a tensor."""
        manifest = self.check(raw)
        if lent is None:
            cargo = self._dock.take(manifest.transfer)
        else:
            cargo = self._dock.borrow(manifest, lent)
        try:
            _check_transfer(manifest, cargo)
            yield _verified_transfer(manifest, cargo.buffers)
        finally:
            self._dock.done(cargo)

    def close(self) -> None:
        self._link.close()


def _buffer_copier(device: str) -> BufferCopier:
    """A GPU fetches new rows of a bank from where they were copied to, if that is pinned."""
    if device == CPU:
        return BufferCopier()
    from clairai.weights.torch_buffers import pinned_bytes

    return BufferCopier(pinned_bytes)


def _check_transfer(manifest: Manifest, cargo: PendingTransfer) -> None:
    check_manifest.check_matches_plan(manifest, cargo.plan)
    check_manifest.check_extents(
        manifest, [buffer.extent for buffer in cargo.buffers[: cargo.num_read]]
    )
    check_manifest.check_checksums(manifest, cargo.checksums)


def _verified_transfer(manifest: Manifest, buffers: list[Any]) -> VerifiedTransfer:
    from clairai.weights.torch_buffers import tensor_views

    nbytes = sum(tensor.nbytes for tensor in manifest.tensors)
    return VerifiedTransfer(
        manifest,
        content_digest(manifest.tensors),
        nbytes,
        tuple(tensor_views(manifest.tensors, buffers)),
    )


def refuse_device_buffer(handle: bytes, nbytes: int) -> Any:
    """For an engine without a GPU; `check` has refused such a plan before."""
    raise AssertionError(
        f"a device buffer of {nbytes} bytes came to an engine on {CPU}: {handle!r}"
    )


# MERGED
# Takes verified shipments; gives the model new numbers and the bank new probes, or neither.
#
# Knows nothing of vLLM: `load` is given, and so is the worker that calls it as vLLM's own routes
# do.


LoadModel = Callable[[list[tuple[str, Any]]], None]
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedWeights:
    """The weights that serve now."""

    version: int = 0
    label: str = ""
    digest: str = ""
    nbytes: int = 0
    load_s: float = 0.0


class WeightsUpdater:
    """One for each engine; `load` puts a whole model's tensors into place."""

    def __init__(
        self,
        folder: Path,
        device: str,
        open_device: OpenDeviceBuffer,
        model_slots: Mapping[str, ExpectedTensor],
        load: LoadModel,
    ) -> None:
        self.served = ServedWeights()
        self.is_torn = False
        self.columns: EngineBank | None = (
            None  # the probes as they are, while a question is answered
        )
        self.pending: EngineBank | None = None  # as they will be once the worker installs them
        self.vectors: tuple[weights_messages.KnownVector, ...] = ()  # as the core said
        self.lent: weights_messages.SharedBytes | None = (
            None  # in place of what would have come before
        )
        self.probe_rows: weights_messages.NewRows | None = None  # for the core, which keeps its own
        self.vector_rows: tuple[weights_messages.NewRows, ...] = ()
        self._model_slots = dict(model_slots)
        self._load = load
        self._slots: tuple[object, Mapping[str, ExpectedTensor]] | None = None  # of which banks
        self.receiver = TransferReceiver(folder, device, self.slots, open_device)

    def slots(self) -> Mapping[str, ExpectedTensor]:
        """All that can be sent now."""
        columns = self.columns
        banks = (() if columns is None else (columns.names, columns.width)), self.vectors
        if self._slots is None or self._slots[0] != banks:  # hundreds, and they stay the same
            probes = {} if columns is None else _expected_probes(columns)
            steers = {
                f"{STEER_PREFIX}{each.name}": ExpectedTensor(("F32",), each.shape)
                for each in self.vectors
            }
            self._slots = banks, {**self._model_slots, **probes, **steers}
        return self._slots[1]

    def receive(self, raw: bytes) -> None:
        """One manifest, whole; an error before the first number is changed, or `is_torn`."""
        self.pending, self.probe_rows, self.vector_rows = None, None, ()
        try:
            self._receive(raw)
        except WeightsError as error:
            if self.is_torn:  # by a load before this one: only a whole set repairs it
                raise WeightsTornError(f"{error.reason}; and the weights are in pieces") from error
            raise

    def _receive(self, raw: bytes) -> None:
        with self.receiver.unpack(raw, self.lent) as shipment:
            if self.is_torn and not shipment.of("model"):
                raise WeightsError("this brings no weights of the model")
            # Raises what a bank refuses, before anything changes.
            probes = self._probes(shipment.of("probe"))
            columns = self._changed(probes)
            vectors = tuple(_vector_rows(*each) for each in shipment.of("steer"))
            self._check_vectors(vectors)
            began_s = time.perf_counter()
            if weights := shipment.of("model"):
                self.is_torn = True
                self._load(weights)
                self.is_torn = False
            self.served = _next_served(self.served, shipment, time.perf_counter() - began_s)
            self.pending, self.probe_rows, self.vector_rows = columns, probes, vectors

    def state(self) -> weights_messages.WeightsState:
        return weights_messages.WeightsState(
            version=self.served.version,
            label=self.served.label,
            digest=self.served.digest,
            epoch=f"{self.receiver.epoch:016x}",
            device=self.receiver.device,
            num_tensors=len(self.slots()),
            is_torn=self.is_torn,
            socket=str(self.receiver.path),
        )

    def close(self) -> None:
        self.receiver.close()

    def _check_vectors(self, rows: Sequence[weights_messages.NewRows]) -> None:
        widths = {vector.name: vector.shape[1] for vector in self.vectors}
        for each in rows:
            _check_vector(each, widths[each.names[0]])

    def _probes(self, sent: Sequence[tuple[str, Any]]) -> weights_messages.NewRows | None:
        """New directions, by probe; those of a whole bank come as one tensor."""
        if not sent or self.columns is None:
            return None
        if len(sent) > 1 and any(name.startswith(f"{PROBE_PREFIX}/") for name, _ in sent):
            raise WeightsError("a whole bank came, and probes of it beside; send it alone")
        if sent[0][0].startswith(f"{PROBE_PREFIX}/"):
            return weights_messages.NewRows(self.columns.names, _float_bytes(sent[0][1]))
        names = tuple(name.removeprefix(PROBE_PREFIX) for name, _ in sent)
        return weights_messages.NewRows(names, _float_bytes(*(tensor for _, tensor in sent)))

    def _changed(self, rows: weights_messages.NewRows | None) -> EngineBank | None:
        """The bank with the new directions; None if none came."""
        if rows is None or self.columns is None:
            return None
        rows_PD = np.frombuffer(rows.data, "<f4").reshape(len(rows.names), -1)
        return self.columns.redirect(rows.names, rows_PD)


class VllmWorker(Protocol):
    """vLLM's worker, as far as weights concern it: v1/worker/gpu_worker.py, 0.26 and 0.32."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...


class WeightsControl:
    """What the worker answers to control messages about weights; `station` has the bank."""

    def __init__(self, worker: VllmWorker, intake: WeightsUpdater, step_publisher: Any) -> None:
        self._worker, self._intake, self._step_publisher = worker, intake, step_publisher

    def answer(self, control: weights_messages.WeightsControl) -> weights_messages.WeightsReply:
        intake = self._intake
        intake.columns = None if self._step_publisher is None else self._step_publisher.columns
        intake.vectors = control.vectors
        try:
            return self._answer(control)
        finally:
            # By vLLM's own routes nobody would tell the banks: there they cannot be named.
            intake.columns, intake.vectors, intake.lent = None, (), None

    def _answer(self, control: weights_messages.WeightsControl) -> weights_messages.WeightsReply:
        intake = self._intake
        match control:
            case weights_messages.DescribeWeights():
                return intake.state()
            case weights_messages.ListTensors():
                return _list_tensors(intake.slots())
            case weights_messages.CheckWeights(manifest):
                return _plan_reply(intake.receiver.check(manifest))
            case weights_messages.PlanWeights(manifest):
                return _plan_reply(intake.receiver.plan(manifest))
            case weights_messages.VerifyWeights(manifest):
                return _plan_reply(intake.receiver.verify(manifest))
            case weights_messages.CommitWeights(manifest, lent):
                intake.lent = lent
                committed = self._commit(manifest)
                if control.wants_rows:
                    return committed
                return msgspec.structs.replace(committed, probe_rows=None)

    def _commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        """As vLLM's own routes do it, in one go; nothing but our errors comes out of it."""
        try:
            text = manifest.decode()
            self._worker.start_weight_update()
            self._worker.update_weights({"manifest": text})
            self._worker.finish_weight_update()
        except ClairaiError:
            raise
        except UnicodeDecodeError:
            raise WeightsError("this is no manifest: it is not UTF-8; use the Sender") from None
        except Exception as error:
            _log.exception("new weights could not be loaded")
            raise self._failed(error) from error
        return self._committed()

    def _failed(self, error: Exception) -> WeightsError:
        kind = type(error).__name__
        if self._intake.is_torn:
            return WeightsTornError(
                f"loading stopped half-way ({kind}, see the engine's log); send a whole set of "
                f"weights, or restart the engine"
            )
        return WeightsError(
            f"the engine cannot load them ({kind}, see its log); the old weights serve on"
        )

    def _committed(self) -> weights_messages.WeightsCommitted:
        served, columns = self._intake.served, self._intake.pending
        if columns is not None:
            columns = self._step_publisher.install(columns)
        return weights_messages.WeightsCommitted(
            version=served.version,
            digest=served.digest,
            nbytes=served.nbytes,
            load_s=served.load_s,
            bank_version=None if columns is None else columns.version,
            probe_rows=self._intake.probe_rows,
            vector_rows=self._intake.vector_rows,
        )


def _expected_probes(columns: EngineBank) -> dict[str, ExpectedTensor]:
    """Each probe, and all of them as one."""
    if not columns.names:
        return {}
    one = ExpectedTensor(("F32",), (columns.width,))
    whole = ExpectedTensor(("F32",), (len(columns.names), columns.width))
    named = dict.fromkeys((f"{PROBE_PREFIX}{name}" for name in columns.names), one)
    return named | {bank_name(columns.names): whole}


def _vector_rows(name: str, tensor: Any) -> weights_messages.NewRows:
    return weights_messages.NewRows((name.removeprefix(STEER_PREFIX),), _float_bytes(tensor))


def _float_bytes(*tensors: Any) -> memoryview:
    """Of all, one after the other, in memory that stays as long as they do.

    A GPU's are copied here. What came in host memory is the engine's own copy, or sealed pages: it
    lives on with who holds it.
    """
    parts = [np.asarray(tensor.cpu().numpy(), "<f4").reshape(-1) for tensor in tensors]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts)
    numbers.setflags(write=False)
    return numbers.data.cast("B")


def _check_vector(new: weights_messages.NewRows, width: int) -> None:
    """VectorError for what no vector may hold; the core, which has them, asks no questions."""
    rows_PD = np.frombuffer(new.data, "<f4").reshape(-1, width)
    if model.are_usable(rows_PD).all():
        return
    Vector("checked", {Point("post_block", at): row_D for at, row_D in enumerate(rows_PD)})


def _next_served(before: ServedWeights, shipment: VerifiedTransfer, load_s: float) -> ServedWeights:
    if not shipment.of("model"):
        return replace(before, nbytes=shipment.nbytes, load_s=load_s)
    label = shipment.manifest.label
    return ServedWeights(before.version + 1, label, shipment.digest, shipment.nbytes, load_s)


def _list_tensors(slots: Mapping[str, ExpectedTensor]) -> weights_messages.Tensors:
    items = slots.items()
    return weights_messages.Tensors(
        tuple(weights_messages.ListedTensor(name, slot.dtypes, slot.shape) for name, slot in items)
    )


def _plan_reply(manifest: Manifest) -> weights_messages.WeightsPlanned:
    return weights_messages.WeightsPlanned(manifest.transfer, sum(manifest.buffers))
