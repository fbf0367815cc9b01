"""Takes verified shipments; gives the model new numbers and the bank new probes, or neither.

Knows nothing of vLLM: `load` is given, and so is the worker that calls it as vLLM's own routes do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from clairai import wire_weights
from clairai.errors import ClairaiError, WeightsError, WeightsTornError
from clairai.points import Point
from clairai.probe import checks
from clairai.probe.columns import Columns
from clairai.steer.vector import Vector
from clairai.weights.check import Slot
from clairai.weights.dock import OpenDevice
from clairai.weights.manifest import PROBE, STEER, Manifest
from clairai.weights.receiver import Receiver, Shipment
from clairai.weights.whole import bank_name

Load = Callable[[list[tuple[str, Any]]], None]
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """The weights that serve now."""

    version: int = 0
    label: str = ""
    digest: str = ""
    nbytes: int = 0
    load_s: float = 0.0


class Intake:
    """One for each engine; `load` puts a whole model's tensors into place."""

    def __init__(
        self,
        folder: Path,
        device: str,
        open_device: OpenDevice,
        model_slots: Mapping[str, Slot],
        load: Load,
    ) -> None:
        self.served = Served()
        self.is_torn = False
        self.columns: Columns | None = None  # the probes as they are, while a question is answered
        self.pending: Columns | None = None  # as they will be once the worker installs them
        self.vectors: tuple[wire_weights.KnownVector, ...] = ()  # as the core said
        self.lent: wire_weights.Lent | None = None  # in place of what would have come before
        self.probe_rows: wire_weights.Rows | None = None  # for the core, which keeps its own
        self.vector_rows: tuple[wire_weights.Rows, ...] = ()
        self._model_slots = dict(model_slots)
        self._load = load
        self._slots: tuple[object, Mapping[str, Slot]] | None = None  # of which banks
        self.receiver = Receiver(folder, device, self.slots, open_device)

    def slots(self) -> Mapping[str, Slot]:
        """All that can be sent now."""
        columns = self.columns
        banks = (() if columns is None else (columns.names, columns.width)), self.vectors
        if self._slots is None or self._slots[0] != banks:  # hundreds, and they stay the same
            probes = {} if columns is None else _probe_slots(columns)
            steers = {f"{STEER}{each.name}": Slot(("F32",), each.shape) for each in self.vectors}
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
            self.served = _served(self.served, shipment, time.perf_counter() - began_s)
            self.pending, self.probe_rows, self.vector_rows = columns, probes, vectors

    def state(self) -> wire_weights.WeightsState:
        return wire_weights.WeightsState(
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

    def _check_vectors(self, rows: Sequence[wire_weights.Rows]) -> None:
        widths = {vector.name: vector.shape[1] for vector in self.vectors}
        for each in rows:
            _check_vector(each, widths[each.names[0]])

    def _probes(self, sent: Sequence[tuple[str, Any]]) -> wire_weights.Rows | None:
        """New directions, by probe; those of a whole bank come as one tensor."""
        if not sent or self.columns is None:
            return None
        if len(sent) > 1 and any(name.startswith(f"{PROBE}/") for name, _ in sent):
            raise WeightsError("a whole bank came, and probes of it beside; send it alone")
        if sent[0][0].startswith(f"{PROBE}/"):
            return wire_weights.Rows(self.columns.names, _numbers(sent[0][1]))
        names = tuple(name.removeprefix(PROBE) for name, _ in sent)
        return wire_weights.Rows(names, _numbers(*(tensor for _, tensor in sent)))

    def _changed(self, rows: wire_weights.Rows | None) -> Columns | None:
        """The bank with the new directions; None if none came."""
        if rows is None or self.columns is None:
            return None
        rows_PD = np.frombuffer(rows.data, "<f4").reshape(len(rows.names), -1)
        return self.columns.redirect(rows.names, rows_PD)


class Worker(Protocol):
    """vLLM's worker, as far as weights concern it: v1/worker/gpu_worker.py, 0.26 and 0.32."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...


class Handover:
    """What the worker answers to control messages about weights; `station` has the bank."""

    def __init__(self, worker: Worker, intake: Intake, station: Any) -> None:
        self._worker, self._intake, self._station = worker, intake, station

    def answer(self, control: wire_weights.Control) -> wire_weights.Reply:
        intake = self._intake
        intake.columns = None if self._station is None else self._station.columns
        intake.vectors = control.vectors
        try:
            return self._answer(control)
        finally:
            # By vLLM's own routes nobody would tell the banks: there they cannot be named.
            intake.columns, intake.vectors, intake.lent = None, (), None

    def _answer(self, control: wire_weights.Control) -> wire_weights.Reply:
        intake = self._intake
        match control:
            case wire_weights.DescribeWeights():
                return intake.state()
            case wire_weights.ListTensors():
                return _listed(intake.slots())
            case wire_weights.CheckWeights(manifest):
                return _planned(intake.receiver.check(manifest))
            case wire_weights.PlanWeights(manifest):
                return _planned(intake.receiver.plan(manifest))
            case wire_weights.VerifyWeights(manifest):
                return _planned(intake.receiver.verify(manifest))
            case wire_weights.CommitWeights(manifest, lent):
                intake.lent = lent
                committed = self._commit(manifest)
                if control.wants_rows:
                    return committed
                return msgspec.structs.replace(committed, probe_rows=None)

    def _commit(self, manifest: bytes) -> wire_weights.WeightsCommitted:
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

    def _committed(self) -> wire_weights.WeightsCommitted:
        served, columns = self._intake.served, self._intake.pending
        if columns is not None:
            columns = self._station.install(columns)
        return wire_weights.WeightsCommitted(
            version=served.version,
            digest=served.digest,
            nbytes=served.nbytes,
            load_s=served.load_s,
            bank_version=None if columns is None else columns.version,
            probe_rows=self._intake.probe_rows,
            vector_rows=self._intake.vector_rows,
        )


def _probe_slots(columns: Columns) -> dict[str, Slot]:
    """Each probe, and all of them as one."""
    if not columns.names:
        return {}
    one = Slot(("F32",), (columns.width,))
    whole = Slot(("F32",), (len(columns.names), columns.width))
    named = dict.fromkeys((f"{PROBE}{name}" for name in columns.names), one)
    return named | {bank_name(columns.names): whole}


def _vector_rows(name: str, tensor: Any) -> wire_weights.Rows:
    return wire_weights.Rows((name.removeprefix(STEER),), _numbers(tensor))


def _numbers(*tensors: Any) -> memoryview:
    """Of all, one after the other, in memory that stays as long as they do.

    A GPU's are copied here. What came in host memory is the engine's own copy, or sealed pages: it
    lives on with who holds it.
    """
    parts = [np.asarray(tensor.cpu().numpy(), "<f4").reshape(-1) for tensor in tensors]
    numbers = parts[0] if len(parts) == 1 else np.concatenate(parts)
    numbers.setflags(write=False)
    return numbers.data.cast("B")


def _check_vector(new: wire_weights.Rows, width: int) -> None:
    """VectorError for what no vector may hold; the core, which has them, asks no questions."""
    rows_PD = np.frombuffer(new.data, "<f4").reshape(-1, width)
    if checks.are_good(rows_PD).all():
        return
    Vector("checked", {Point("post_block", at): row_D for at, row_D in enumerate(rows_PD)})


def _served(before: Served, shipment: Shipment, load_s: float) -> Served:
    if not shipment.of("model"):
        return replace(before, nbytes=shipment.nbytes, load_s=load_s)
    label = shipment.manifest.label
    return Served(before.version + 1, label, shipment.digest, shipment.nbytes, load_s)


def _listed(slots: Mapping[str, Slot]) -> wire_weights.Tensors:
    items = slots.items()
    return wire_weights.Tensors(
        tuple(wire_weights.ListedTensor(name, slot.dtypes, slot.shape) for name, slot in items)
    )


def _planned(manifest: Manifest) -> wire_weights.WeightsPlanned:
    return wire_weights.WeightsPlanned(manifest.transfer, sum(manifest.buffers))
