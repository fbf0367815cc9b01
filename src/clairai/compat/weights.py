"""Takes vLLM's weight-transfer interface; gives it the backend `clairai_ipc`, and control of it.

WeightTransferEngine               distributed/weight_transfer/base.py     0.26:152   0.32:332
WeightTransferEngineFactory        distributed/weight_transfer/factory.py  0.26:41    0.32:41
Worker.start_weight_update, ...    v1/worker/gpu_worker.py                 0.26:1296  0.32:1507

vLLM's own IPC engine takes the model apart in `start_weight_update` and fills it call by call: what
fails between leaves it in pieces. This one does all of it in one call, after everything has been
checked, so that a step of the model runs before or after it and never between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from clairai import wire_weights
from clairai.compat.arm import BACKEND
from clairai.compat.core import settings_of
from clairai.compat.reload import reload
from clairai.errors import ClairaiError, UnsupportedError, WeightsError, WeightsTornError
from clairai.probe.columns import Columns
from clairai.ring.folder import runtime_dir
from clairai.weights import checkpoint
from clairai.weights.check import Slot
from clairai.weights.manifest import CPU, PROBE, Manifest
from clairai.weights.receiver import Receiver, Shipment, refuse_device
from clairai.weights.tensors import NAMES, DeviceLanded

_log: Final = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: a manifest says it all."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The manifest as JSON text; its buffers have come on the socket before."""

    manifest: str


@dataclass(frozen=True)
class Served:
    """The weights that serve now."""

    version: int = 0
    label: str = ""
    digest: str = ""
    nbytes: int = 0
    load_s: float = 0.0


class ClairaiIpcEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One call brings the whole model, or nothing of it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        _check_alone(vllm_config)
        self.served = Served()
        self.is_torn = False
        self.columns: Columns | None = None  # the probes as they are: set before each question
        self.pending: Columns | None = None  # as they will be once the worker installs them
        self.model_slots = model_slots(vllm_config)
        gpu = _uuid(device)
        folder = runtime_dir(settings_of(vllm_config).runtime_dir)
        opener = refuse_device if gpu == CPU else _opener(gpu, device)
        self.receiver = Receiver(folder, gpu, self.slots, opener)

    def slots(self) -> Mapping[str, Slot]:
        """All that can be sent now."""
        probes = () if self.columns is None else self.columns.probes
        return self.model_slots | {
            f"{PROBE}{probe.name}": Slot(("F32",), (probe.width,)) for probe in probes
        }

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: the socket is there from the start."""

    def start_weight_update(self) -> None:
        """Nothing yet: the model stays whole until all has been checked."""
        self.pending = None

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own, which asks for an accelerator to wait for: a CPU engine has none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        with self.receiver.unpack(update_info.manifest.encode()) as shipment:
            columns = self._changed(shipment)  # raises what a bank refuses, before anything changes
            began_s = time.perf_counter()
            if weights := shipment.of("model"):
                self._load(weights)
            load_s = time.perf_counter() - began_s
            self.served = _served(self.served, shipment, load_s)
            self.pending = columns

    def shutdown(self) -> None:
        self.receiver.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # noqa: ARG004
        """vLLM 0.26 asks every engine for this; ours is another class."""
        raise UnsupportedError("send with clairai.weights.Sender(url).send(named_tensors)")

    def _load(self, weights: list[tuple[str, Any]]) -> None:
        self.is_torn = True
        reload(self.model, self.model_config, weights)
        self.is_torn = False

    def _changed(self, shipment: Shipment) -> Columns | None:
        """The bank with the new directions; None if none came."""
        rows = {name.removeprefix(PROBE): tensor for name, tensor in shipment.of("probe")}
        if not rows or self.columns is None:
            return None
        # Copies: a probe must not point into a buffer that is let go of.
        changed = [
            replace(probe, direction_D=np.array(rows[probe.name].cpu().numpy(), np.float32))
            for probe in self.columns.probes
            if probe.name in rows
        ]
        return self.columns.replace(*changed)


class Handover:
    """What the worker answers to control messages about weights."""

    def __init__(self, worker: Any, engine: ClairaiIpcEngine) -> None:
        self._worker, self._engine = worker, engine

    def answer(self, control: wire_weights.Control) -> wire_weights.Reply:
        station = getattr(self._worker, "clairai_station", None)
        self._engine.columns = None if station is None else station.columns
        match control:
            case wire_weights.DescribeWeights():
                return self._state()
            case wire_weights.ListTensors():
                return _listed(self._engine.slots())
            case wire_weights.CheckWeights(manifest):
                return _planned(self._engine.receiver.check(manifest))
            case wire_weights.PlanWeights(manifest):
                return _planned(self._engine.receiver.plan(manifest))
            case wire_weights.CommitWeights(manifest):
                return self._commit(manifest)

    def _commit(self, manifest: bytes) -> wire_weights.WeightsCommitted:
        """As vLLM's own routes do it, in one go; nothing but our errors comes out of it."""
        engine = self._engine
        try:
            self._worker.start_weight_update()
            self._worker.update_weights({"manifest": manifest.decode()})
            self._worker.finish_weight_update()
        except ClairaiError:
            raise
        except Exception as error:
            _log.exception("new weights could not be loaded")
            if engine.is_torn:
                raise WeightsTornError(
                    f"loading stopped half-way ({type(error).__name__}, see the engine's log); "
                    f"send a whole set of weights, or restart the engine"
                ) from error
            raise WeightsError(
                f"the engine cannot load them ({type(error).__name__}, see its log); the old "
                f"weights serve on"
            ) from error
        return self._committed()

    def _committed(self) -> wire_weights.WeightsCommitted:
        served, columns = self._engine.served, self._engine.pending
        if columns is not None:
            self._worker.clairai_station.install(columns)
        return wire_weights.WeightsCommitted(
            served.version,
            served.digest,
            served.nbytes,
            served.load_s,
            None if columns is None else columns.version,
        )

    def _state(self) -> wire_weights.WeightsState:
        engine = self._engine
        return wire_weights.WeightsState(
            version=engine.served.version,
            label=engine.served.label,
            digest=engine.served.digest,
            epoch=f"{engine.receiver.epoch:016x}",
            device=engine.receiver.device,
            num_tensors=len(engine.slots()),
            is_torn=engine.is_torn,
        )


def handover_of(worker: Any) -> Handover | None:
    """None in an engine that was not started to take weights this way."""
    engine = getattr(worker, "weight_transfer_engine", None)
    return Handover(worker, engine) if isinstance(engine, ClairaiIpcEngine) else None


def model_slots(vllm_config: Any) -> dict[str, Slot]:
    """What the model's own checkpoint holds, in its type or the engine's."""
    model = vllm_config.model_config
    served = NAMES.get(model.dtype)
    found = checkpoint.tensors(_folder(model))
    return {
        name: Slot(tuple(dict.fromkeys(d for d in (dtype, served) if d)), shape)
        for name, dtype, shape in found
    }


def _folder(model_config: Any) -> Path:
    given = Path(model_config.model)
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download

    # vLLM has just loaded it from there.
    return Path(
        snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True)
    )


def _check_alone(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    ranks = parallel.world_size * parallel.data_parallel_size
    if ranks != 1:
        raise UnsupportedError(
            f"backend {BACKEND} serves engines of one rank, this one has {ranks}; use vLLM's own "
            f"nccl backend there"
        )


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


def _uuid(device: Any) -> str:
    if device.type != "cuda":
        return CPU
    from clairai.ring.cuda import Gpu

    return Gpu(device.index or 0).uuid


def _opener(gpu: str, device: Any) -> Any:
    from clairai.ring.cuda import DeviceMemory

    def open_device(handle: bytes, nbytes: int) -> DeviceLanded:
        memory = DeviceMemory.attach(handle, nbytes, gpu)  # asks the driver for the extent
        try:
            return DeviceLanded(memory, device)
        except BaseException:
            memory.close()
            raise

    return open_device
