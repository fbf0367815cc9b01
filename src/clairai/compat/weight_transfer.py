"""Takes vLLM's weight-transfer interface; gives it the backend `clairai_ipc`, and control of it.

WeightTransferEngine               distributed/weight_transfer/base.py     0.26:152   0.32:332
WeightTransferEngineFactory        distributed/weight_transfer/factory.py  0.26:41    0.32:41
Worker.start_weight_update, ...    v1/worker/gpu_worker.py                 0.26:1296  0.32:1507

vLLM's own IPC engine takes the model apart in `start_weight_update` and fills it call by call: what
fails between leaves it in pieces. This one does all of it in one call, after everything has been
checked, so that a step of the model runs before or after it and never between.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from clairai.compat.engine_core import get_settings
from clairai.compat.install import TRANSFER_BACKEND
from clairai.errors import UnsupportedError
from clairai.local.private_socket import runtime_dir
from clairai.weights import checkpoint
from clairai.weights.check_manifest import ExpectedTensor
from clairai.weights.manifest import CPU
from clairai.weights.receive import WeightsControl, WeightsUpdater, refuse_device_buffer
from clairai.weights.torch_buffers import DTYPE_NAMES, ReceivedDeviceBuffer


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
        _check_single_rank(vllm_config)
        gpu = _gpu_uuid(device)
        self.intake = WeightsUpdater(
            runtime_dir(get_settings(vllm_config).runtime_dir),
            gpu,
            refuse_device_buffer if gpu == CPU else _make_device_opener(gpu, device),
            list_model_tensors(vllm_config),
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
        reload_model(self.model, self.model_config, weights)


def get_handover(worker: Any) -> WeightsControl | None:
    """None in an engine that was not started to take weights this way."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, ClairaiIpcEngine):
        return None
    return WeightsControl(worker, engine.intake, getattr(worker, "clairai_step_publisher", None))


def list_model_tensors(vllm_config: Any) -> dict[str, ExpectedTensor]:
    """What the model's own checkpoint holds, in its type or the engine's."""
    model = vllm_config.model_config
    served = DTYPE_NAMES.get(model.dtype)
    found = checkpoint.list_tensors(_find_checkpoint(model))
    return {
        name: ExpectedTensor(tuple(dict.fromkeys(d for d in (dtype, served) if d)), shape)
        for name, dtype, shape in found
    }


def _find_checkpoint(model_config: Any) -> Path:
    given = Path(model_config.model)
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download

    # vLLM has just loaded it from there.
    return Path(
        snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True)
    )


def _check_single_rank(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    ranks = parallel.world_size * parallel.data_parallel_size
    if ranks != 1:
        raise UnsupportedError(
            f"backend {TRANSFER_BACKEND} serves engines of one rank, this one has {ranks}; "
            "use vLLM's own nccl backend there"
        )


def _gpu_uuid(device: Any) -> str:
    if device.type != "cuda":
        return CPU
    from clairai.local.gpu_memory import Gpu

    return Gpu(device.index or 0).uuid


def _make_device_opener(gpu: str, device: Any) -> Any:
    import torch

    from clairai.local.gpu_memory import DeviceBlock

    stream = torch.cuda.Stream(device)
    _compile_checksums(stream)

    def open_device(handle: bytes, nbytes: int) -> ReceivedDeviceBuffer:
        block = DeviceBlock.attach(handle, nbytes, gpu)  # asks the driver for the extent
        try:
            return ReceivedDeviceBuffer(block, stream)
        except BaseException:
            block.close()
            raise

    return open_device


def _compile_checksums(stream: Any) -> None:
    """The kernel of checksums, now: while it serves, the engine's steps would wait for it."""
    import torch

    from clairai.weights.device_checksum import checksums

    with torch.cuda.stream(stream):
        checksums([torch.zeros(8, dtype=torch.uint8, device=stream.device)])


# MERGED
# Takes a model and a whole checkpoint's tensors; gives the same model with their numbers.
#
# initialize_layerwise_reload  model_executor/model_loader/reload/layerwise.py 0.26, 0.32
# UnquantizedEmbeddingMethod   model_executor/layers/vocab_parallel_embedding.py 0.32:88
#
# vLLM's own way: each layer is loaded as at start-up, processed as at start-up (quantised,
# repacked),
# and copied into the tensors that compiled and captured graphs already point at.


def reload_model(model: Any, model_config: Any, weights: list[tuple[str, Any]]) -> None:
    """On return the copies are done; `weights` is empty, and nothing else holds its tensors."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    device = next(model.parameters()).device
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
    finally:
        # Also after a failure: it puts the model together again, so that a retry can begin.
        finalize_layerwise_reload(model, model_config)
        weights.clear()
    if device.type == "cpu":
        _repack_tied_heads(model)
    elif device.type == "cuda":
        torch.cuda.synchronize(device)


def _repack_tied_heads(model: Any) -> None:
    """A CPU build multiplies by packed copies, and no file holds the tensor of a tied head.

    So vLLM finds nothing to load for it and leaves its copy as it was: old logits from new states.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    shared = Counter(parameter for layer in model.modules() for parameter in _own_parameters(layer))
    for layer in layers:
        if any(shared[parameter] > 1 for parameter in _own_parameters(layer)):
            layer.quant_method.process_weights_after_loading(layer)


def _own_parameters(layer: Any) -> list[int]:
    return [id(parameter) for parameter in layer.parameters(recurse=False)]
