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

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from clairai.compat.engine_core import get_settings
from clairai.compat.install import TRANSFER_BACKEND
from clairai.compat.pipeline_stages import end_with_a_rank
from clairai.compat.ranks import gather_bytes
from clairai.errors import UnsupportedError, WeightsError
from clairai.local.free_memory import untouched_bytes
from clairai.local.private_socket import runtime_dir
from clairai.weights import checkpoint
from clairai.weights.check_manifest import ExpectedTensor
from clairai.weights.manifest import CPU
from clairai.weights.receive import (
    RankPlace,
    WeightsControl,
    WeightsUpdater,
    make_epoch,
    refuse_device_buffer,
)
from clairai.weights.room import LoadNeeds
from clairai.weights.torch_buffers import DTYPE_NAMES, DTYPES, ReceivedDeviceBuffer
from clairai.weights.trainer_session import write_state

# How often a layer is in memory while it is loaded: its new tensors and their processed form, and
# as much again for temporaries. vLLM's CPU build takes 2 for float32, measured.
LOAD_COPIES: Final = 4
PLAIN_GPU_COPIES: Final = 2  # on a GPU, layers that are not quantised are only copied
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_RELOAD_LOG: Final = "vllm.model_executor.model_loader.reload.layerwise"
_log: Final = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """May be empty: the manifest of a transfer says everything.

    vLLM's trainers get no answer: one that gives a `session` finds the engine's state in a file of
    that name (weights/trainer_session.py). `packed`, which vLLM's own trainer sends, means nothing
    here: buffers are always packed.
    """

    session: str = ""
    packed: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The manifest as JSON text, whose buffers have arrived on the socket before.

    The engine core takes a `plan` or a `manifest`. It prepares the latter on all ranks, and gives
    them the transfer that is `prepared`.
    """

    manifest: str = ""
    plan: str = ""
    prepared: str = ""


class ClairaiIpcEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes new weights in one call, on this rank; the engine core sees to all ranks or none."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        gpu, expected = _gpu_uuid(device), list_model_tensors(vllm_config)
        folder = self._folder = runtime_dir(get_settings(vllm_config).runtime_dir)
        place = _find_place(vllm_config, gpu, folder)
        self._groups: tuple[frozenset[str], ...] | None = None
        self.updater = WeightsUpdater(
            folder,
            gpu,
            refuse_device_buffer if gpu == CPU else _make_device_opener(gpu, device),
            expected,
            self._load,
            lambda: measure_needs(self.model, vllm_config, device).for_many(len(place.devices)),
            place=place,
            find_groups=lambda: self._find_groups(expected),
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Say where the sockets are; they are there from the start."""
        if init_info.session and self.updater.receiver.place.rank == 0:
            write_state(self._folder, init_info.session, self.updater.state())

    def start_weight_update(self) -> None:
        """Nothing to do yet: the model stays whole until everything has been checked."""

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like vLLM's own, but without waiting for an accelerator, which a CPU engine has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.prepared:
            self.updater.apply(update_info.prepared)
        elif len(self.updater.receiver.place.devices) > 1:
            raise WeightsError("one rank cannot take a manifest alone; send it to the engine")
        else:
            self.updater.receive(update_info.manifest.encode())

    def shutdown(self) -> None:
        self.updater.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """As a trainer of vLLM 0.26 calls it, between start_weight_update and its finish."""
        from clairai.compat.weight_trainer import send_weights

        send_weights(iterator, trainer_args)

    def _load(self, weights: list[tuple[str, Any]]) -> None:
        reload_model(self.model, self.model_config, weights)

    def _find_groups(self, expected: Mapping[str, ExpectedTensor]) -> tuple[frozenset[str], ...]:
        """Found when the first part of a model comes: most trainers send all of it."""
        if self._groups is None:
            self._groups = find_tensor_groups(self.model, self.model_config, expected)
        return self._groups


def get_weights_control(worker: Any) -> WeightsControl | None:
    """None in an engine without this backend."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, ClairaiIpcEngine):
        return None
    holder = getattr(worker, "clairai_step_publisher", None)
    if holder is None:
        holder = getattr(worker, "clairai_held_bank", None)
    stage = getattr(worker, "clairai_stage", None)
    return WeightsControl(worker, engine.updater, holder, functools.partial(end_with_a_rank, stage))


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


def _find_place(vllm_config: Any, device: str, folder: Path) -> RankPlace:
    """Meet the other ranks: all build their backend when they have loaded the model.

    get_world_group().cpu_group    distributed/parallel_state.py   0.26 and 0.32
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size != 1:  # known to a core of a model with experts alone
        raise UnsupportedError(
            f"backend {TRANSFER_BACKEND} serves engine cores that work on their own, and these "
            f"{parallel.data_parallel_size} run forwards for each other; start servers of their own"
        )
    if parallel.world_size == 1:
        return RankPlace((device,))
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    mine = _RankCard(make_epoch(), device, _BOOT_ID.read_text().strip(), str(folder))
    cards = _exchange(mine, group.cpu_group)
    if len({(card.machine, card.folder) for card in cards}) != 1:
        raise UnsupportedError(
            f"backend {TRANSFER_BACKEND} serves ranks of one machine with one runtime_dir; use "
            "vLLM's own nccl backend, or an engine on each machine"
        )
    devices = tuple(card.device for card in cards)
    has_stages = parallel.pipeline_parallel_size > 1  # then all ranks score
    num_banks = len(devices) if has_stages else 1
    return RankPlace(devices, group.rank_in_group, cards[0].epoch, num_banks)


class _RankCard(msgspec.Struct, frozen=True):
    """What a rank tells the others of itself; the epoch of the first is that of all."""

    epoch: int
    device: str
    machine: str
    folder: str


def _exchange(mine: _RankCard, group: Any) -> list[_RankCard]:
    """The cards of all ranks, in their order."""
    found = gather_bytes(msgspec.json.encode(mine), group)
    return [msgspec.json.decode(one, type=_RankCard) for one in found]


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


def find_tensor_groups(
    model: Any, model_config: Any, expected: Mapping[str, ExpectedTensor]
) -> tuple[frozenset[str], ...]:
    """The checkpoint's tensors that each layer of this rank's model is loaded from.

    Found by loading a checkpoint without numbers, with loaders that only note what comes. vLLM's
    reload makes a layer's tensors anew: one that is loaded in part would hold what nobody wrote.
    A layer whose tensors cannot be followed makes one group of the whole model.
    """
    given = {
        name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtypes[0]], device="meta")
        for name, tensor in expected.items()
    }
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in given.items()}
    found: dict[Any, set[str | None]] = {}

    def note(layer: Any, tensor: Any) -> None:
        storage = tensor.untyped_storage()._cdata  # views of a tensor share it
        found.setdefault(layer, set()).add(owners.get(storage))

    whole = (frozenset(expected),)
    try:
        with _loaders_replaced(model, model_config, note):
            model.load_weights(iter(given.items()))
    except Exception:
        _log.warning("it is not known which tensors a layer has: send whole sets", exc_info=True)
        return whole
    if any(None in names for names in found.values()):
        return whole
    return tuple({frozenset(filter(None, names)) for names in found.values()})


@contextmanager
def _loaders_replaced(model: Any, model_config: Any, note: Any) -> Iterator[None]:
    """While vLLM's reload has put the model's tensors aside, replace what loads them.

    initialize_layerwise_reload, finalize_layerwise_reload, get_layer_tensors
    model_executor/model_loader/reload/{layerwise,utils}.py, 0.26 and 0.32
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    def make_loader(layer: Any) -> Any:
        def load(param: Any, loaded_weight: Any, *_: Any, **__: Any) -> bool:
            del param
            note(layer, loaded_weight)
            return True  # experts ask whether it was theirs

        return load

    before: list[tuple[Any, Any]] = []
    initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            for tensor in get_layer_tensors(layer).values():
                before.append((tensor, getattr(tensor, "weight_loader", None)))
                tensor.weight_loader = make_loader(layer)
        yield
    finally:
        for tensor, loader in reversed(before):
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
        with _unloaded_layers_expected():
            finalize_layerwise_reload(model, model_config)


@contextmanager
def _unloaded_layers_expected() -> Iterator[None]:
    """vLLM warns of every layer that nothing was loaded for, and keeps it as it was."""
    log = logging.getLogger(_RELOAD_LOG)

    def is_other(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def reload_model(model: Any, model_config: Any, weights: list[tuple[str, Any]]) -> None:
    """Load a checkpoint's tensors into the running model, the way vLLM itself does.

    Each layer is loaded and processed (quantised, repacked) as at start-up, then copied into the
    tensors that compiled and captured graphs already point at; a layer for which nothing comes
    stays as it is. On return the copies are done, and `weights` is empty: nothing here holds its
    tensors any longer.
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
        with _unloaded_layers_expected():
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
