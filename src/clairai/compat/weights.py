"""Takes vLLM's weight-transfer interface; gives it the backend `clairai_ipc`, and control of it.

WeightTransferEngine               distributed/weight_transfer/base.py     0.26:152   0.32:332
WeightTransferEngineFactory        distributed/weight_transfer/factory.py  0.26:41    0.32:41
Worker.start_weight_update, ...    v1/worker/gpu_worker.py                 0.26:1296  0.32:1507

vLLM's own IPC engine takes the model apart in `start_weight_update` and fills it call by call: what
fails between leaves it in pieces. This one does all of it in one call, after everything has been
checked, so that a step of the model runs before or after it and never between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from clairai.compat.arm import BACKEND
from clairai.compat.core import settings_of
from clairai.compat.reload import reload
from clairai.errors import UnsupportedError
from clairai.ring.folder import runtime_dir
from clairai.weights import checkpoint
from clairai.weights.check import Slot
from clairai.weights.intake import Handover, Intake
from clairai.weights.manifest import CPU
from clairai.weights.receiver import refuse_device
from clairai.weights.tensors import NAMES, DeviceLanded


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: a manifest says it all."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The manifest as JSON text; its buffers have come on the socket before."""

    manifest: str


class ClairaiIpcEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One call brings the whole model, or nothing of it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        _check_alone(vllm_config)
        gpu = _uuid(device)
        self.intake = Intake(
            runtime_dir(settings_of(vllm_config).runtime_dir),
            gpu,
            refuse_device if gpu == CPU else _opener(gpu, device),
            model_slots(vllm_config),
            self._load,
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: the socket is there from the start."""

    def start_weight_update(self) -> None:
        """Nothing yet: the model stays whole until all has been checked."""

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's own, which asks for an accelerator to wait for: a CPU engine has none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.intake.receive(update_info.manifest.encode())

    def shutdown(self) -> None:
        self.intake.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # noqa: ARG004
        """vLLM 0.26 asks every engine for this; ours is another class."""
        raise UnsupportedError("send with clairai.weights.Sender(url).send(named_tensors)")

    def _load(self, weights: list[tuple[str, Any]]) -> None:
        reload(self.model, self.model_config, weights)


def handover_of(worker: Any) -> Handover | None:
    """None in an engine that was not started to take weights this way."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, ClairaiIpcEngine):
        return None
    return Handover(worker, engine.intake, getattr(worker, "clairai_station", None))


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


def _uuid(device: Any) -> str:
    if device.type != "cuda":
        return CPU
    from clairai.ring.cuda import Gpu

    return Gpu(device.index or 0).uuid


def _opener(gpu: str, device: Any) -> Any:
    import torch

    from clairai.ring.cuda import DeviceBlock

    stream = torch.cuda.Stream(device)
    _compile(stream)

    def open_device(handle: bytes, nbytes: int) -> DeviceLanded:
        block = DeviceBlock.attach(handle, nbytes, gpu)  # asks the driver for the extent
        try:
            return DeviceLanded(block, stream)
        except BaseException:
            block.close()
            raise

    return open_device


def _compile(stream: Any) -> None:
    """The kernel of checksums, now: while it serves, the engine's steps would wait for it."""
    import torch

    from clairai.weights.device_sums import checksums

    with torch.cuda.stream(stream):
        checksums([torch.zeros(8, dtype=torch.uint8, device=stream.device)])
