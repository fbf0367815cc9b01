"""The backend `clairai_ipc` of vLLM's weight transfer: replaces a model's weights in one call.

WeightTransferEngine               distributed/weight_transfer/base.py     0.26:152   0.32:332
WeightTransferEngineFactory        distributed/weight_transfer/factory.py  0.26:41    0.32:41
Worker.start_weight_update, ...    v1/worker/gpu_worker.py                 0.26:1296  0.32:1507
initialize_layerwise_reload        model_executor/model_loader/reload/layerwise.py 0.26, 0.32
UnquantizedEmbeddingMethod         model_executor/layers/vocab_parallel_embedding.py 0.32:88

vLLM's own IPC engine takes the model apart in `start_weight_update` and fills it call by call: a
failure in between leaves it in pieces. This one does everything in one call, after all has been
checked, so a step of the model runs before it or after it, never in between. Runs in: the worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from clairai.compat.engine_core import get_settings
from clairai.compat.install import TRANSFER_BACKEND
from clairai.errors import UnsupportedError
from clairai.local.free_memory import untouched_bytes
from clairai.local.private_socket import runtime_dir
from clairai.weights import checkpoint
from clairai.weights.check_manifest import ExpectedTensor
from clairai.weights.manifest import CPU
from clairai.weights.receive import WeightsControl, WeightsUpdater, refuse_device_buffer
from clairai.weights.room import LoadNeeds
from clairai.weights.torch_buffers import DTYPE_NAMES, ReceivedDeviceBuffer

# How often a layer is in memory while it is loaded: its new tensors and their processed form, and
# as much again for temporaries. vLLM's CPU build takes 2 for float32, measured.
LOAD_COPIES: Final = 4
PLAIN_GPU_COPIES: Final = 2  # on a GPU, layers that are not quantised are only copied


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the manifest of a transfer says everything."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The manifest as JSON text; its buffers have arrived on the socket before."""

    manifest: str


class ClairaiIpcEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes the weights of the whole model in one call, or none of them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        _check_single_rank(vllm_config)
        gpu = _gpu_uuid(device)
        self.updater = WeightsUpdater(
            runtime_dir(get_settings(vllm_config).runtime_dir),
            gpu,
            refuse_device_buffer if gpu == CPU else _make_device_opener(gpu, device),
            list_model_tensors(vllm_config),
            self._load,
            lambda: measure_needs(self.model, vllm_config, device),
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: the socket is there from the start."""

    def start_weight_update(self) -> None:
        """Nothing to do yet: the model stays whole until everything has been checked."""

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like vLLM's own, but without waiting for an accelerator, which a CPU engine has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.updater.receive(update_info.manifest.encode())

    def shutdown(self) -> None:
        self.updater.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # noqa: ARG004
        """Abstract in vLLM 0.26, so it must exist; `clairai.weights.Sender` sends instead."""
        raise UnsupportedError("send with clairai.weights.Sender(url).send(named_tensors)")

    def _load(self, weights: list[tuple[str, Any]]) -> None:
        reload_model(self.model, self.model_config, weights)


def get_weights_control(worker: Any) -> WeightsControl | None:
    """None in an engine without this backend."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, ClairaiIpcEngine):
        return None
    return WeightsControl(worker, engine.updater, getattr(worker, "clairai_step_publisher", None))


def list_model_tensors(vllm_config: Any) -> dict[str, ExpectedTensor]:
    """What a transfer may bring: the checkpoint's tensors, in their own dtype or the engine's."""
    model = vllm_config.model_config
    served = DTYPE_NAMES.get(model.dtype)
    found = checkpoint.list_tensors(_find_checkpoint(model))
    return {
        name: ExpectedTensor(tuple(dict.fromkeys(d for d in (dtype, served) if d)), shape)
        for name, dtype, shape in found
    }


def measure_needs(model: Any, vllm_config: Any, device: Any) -> LoadNeeds:
    """What vLLM's layer-wise reload takes at its peak: copies of the largest layer.

    initialize_layerwise_reload (0.26, 0.32) makes a layer's tensors anew, processes them (which
    repacks or quantises into others) and copies the result into the old ones, layer by layer.
    """
    largest = max(map(_own_nbytes, model.modules()), default=0)
    if device.type == "cpu":
        promised = _untouched_cache_nbytes(vllm_config)
        return LoadNeeds(host_nbytes=LOAD_COPIES * largest, promised_nbytes=promised)
    if device.type != "cuda":
        return LoadNeeds()
    is_plain = vllm_config.model_config.quantization is None
    loading = largest * (PLAIN_GPU_COPIES if is_plain else LOAD_COPIES)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return LoadNeeds(gpu_nbytes=loading, gpu_free_nbytes=free + cached)


def _own_nbytes(module: Any) -> int:
    return sum(tensor.nbytes for tensor in module.parameters(recurse=False))


def _untouched_cache_nbytes(vllm_config: Any) -> int:
    """Of the KV cache: promised, and not in memory yet. vLLM 0.32's CPU build touches all of it."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    caches = [cache for layer in layers for cache in _tensors(getattr(layer, "kv_cache", ()))]
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    return sum(untouched_bytes(address, storage.nbytes()) for address, storage in storages.items())


def _tensors(found: Any) -> list[torch.Tensor]:
    """A layer's KV cache is a tensor, or a list of them (0.26)."""
    if isinstance(found, torch.Tensor):
        return [found] if found.device.type == "cpu" else []
    if isinstance(found, list | tuple):
        return [tensor for each in found for tensor in _tensors(each)]
    return []


def _find_checkpoint(model_config: Any) -> Path:
    given = Path(model_config.model)
    if given.is_dir():
        return given
    from huggingface_hub import snapshot_download

    # vLLM has just loaded the model from there.
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
    from clairai.local.gpu_memory import DeviceBlock

    stream = torch.cuda.Stream(device)
    _compile_checksums(stream)

    def open_buffer(handle: bytes, nbytes: int) -> ReceivedDeviceBuffer:
        block = DeviceBlock.attach(handle, nbytes, gpu)  # asks the driver for the extent
        try:
            return ReceivedDeviceBuffer(block, stream)
        except BaseException:
            block.close()
            raise

    return open_buffer


def _compile_checksums(stream: Any) -> None:
    """Compile the checksum kernel before serving: later the engine's steps would wait for it."""
    from clairai.weights.device_checksum import checksums

    with torch.cuda.stream(stream):
        checksums([torch.zeros(8, dtype=torch.uint8, device=stream.device)])


def reload_model(model: Any, model_config: Any, weights: list[tuple[str, Any]]) -> None:
    """Load a whole checkpoint's tensors into the running model, the way vLLM itself does.

    Each layer is loaded and processed (quantised, repacked) as at start-up, then copied into the
    tensors that compiled and captured graphs already point at. On return the copies are done, and
    `weights` is empty: nothing here holds its tensors any longer.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    device = next(model.parameters()).device
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
    finally:
        # After a failure too: the model must be whole again before a retry.
        finalize_layerwise_reload(model, model_config)
        weights.clear()
    if device.type == "cpu":
        _repack_tied_heads(model)
    elif device.type == "cuda":
        torch.cuda.synchronize(device)


def _repack_tied_heads(model: Any) -> None:
    """Renew the packed copies of tied weights, which vLLM's CPU build multiplies by.

    No file holds the tensor of a tied head, so vLLM loads nothing for it and leaves its packed copy
    as it was: it would compute old logits from new hidden states.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    shared = Counter(parameter for layer in model.modules() for parameter in _own_parameters(layer))
    for layer in layers:
        if any(shared[parameter] > 1 for parameter in _own_parameters(layer)):
            layer.quant_method.process_weights_after_loading(layer)


def _own_parameters(layer: Any) -> list[int]:
    return [id(parameter) for parameter in layer.parameters(recurse=False)]
