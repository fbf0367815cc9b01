"""vLLM's own trainer interface with the backend `clairai_ipc`: a trainer changes one name.

TrainerWeightTransferEngine, TrainerInitInfo   distributed/weight_transfer/base.py   0.28, 0.32:523
VLLMWeightSyncClient                           distributed/weight_transfer/base.py   0.28, 0.32:484
IPCTrainerInitInfo                             distributed/weight_transfer/ipc_engine.py 0.32:47
trainer_send_weights(iterator, args)           distributed/weight_transfer/base.py   0.26
WeightTransferInitRequest, ...UpdateRequest    distributed/weight_transfer/base.py   0.26 and 0.32

The client of a trainer has four calls and no answers. So the engine's state comes by a file
(weights/trainer_session.py), and a plan and a manifest go where vLLM's `ipc` sends its handles.
Pausing the engine is the caller's part, as with every backend of vLLM's. Runs in: the trainer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, Self

from vllm.distributed.weight_transfer import base

from clairai.compat.install import TRANSFER_BACKEND, register_trainer
from clairai.errors import UnsupportedError, WeightsError, printable, quote
from clairai.local.private_socket import runtime_dir
from clairai.weights.sender import Sender
from clairai.weights.trainer_session import take_state
from clairai.wire.weights_messages import WeightsCommitted, WeightsState

_ANSWER_TIMEOUT_S: Final = 600.0
_HAS_TRAINERS: Final = hasattr(base, "TrainerWeightTransferEngine")
_TrainerInfoBase: Final[Any] = base.TrainerInitInfo if _HAS_TRAINERS else object
_TrainerBase: Final[Any] = base.TrainerWeightTransferEngine if _HAS_TRAINERS else object


class SyncClient(Protocol):
    """Two of the four calls of vLLM's `VLLMWeightSyncClient`: they raise, or have no answer."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...


class SyncClientEngine:
    """What a Sender asks an engine, through a client of vLLM's trainers."""

    def __init__(self, client: SyncClient, folder: str | None) -> None:
        self._client, self._folder = client, folder

    def state(self) -> WeightsState:
        session, folder = secrets.token_hex(16), runtime_dir(self._folder)
        self._client.init_weight_transfer_engine({"session": session})
        return take_state(folder, session)

    def check(self, manifest: bytes) -> None:  # noqa: ARG002
        raise UnsupportedError("a trainer of vLLM's asks no questions; send it")

    def plan(self, manifest: bytes) -> None:
        self._client.update_weights({"plan": manifest.decode()})

    def commit(self, manifest: bytes) -> WeightsCommitted:
        self._client.update_weights({"manifest": manifest.decode()})
        state = self.state()
        return WeightsCommitted(state.version, state.digest, nbytes=0, load_s=0.0)


@dataclass
class TrainerInitInfo(_TrainerInfoBase):  # type: ignore[misc]
    """For vLLM's WeightTransferTrainerFactory; the fields of its IPCTrainerInitInfo are accepted.

    Buffers are always packed, so that `packed` means nothing. `runtime_dir` is the folder of the
    engine's sockets, if the engine has that setting.
    """

    backend: ClassVar[str] = TRANSFER_BACKEND
    packed: bool = True
    packed_buffer_size_bytes: int | None = None
    runtime_dir: str | None = None


class ClairaiTrainerEngine(_TrainerBase):  # type: ignore[misc]
    """Sends a WeightSource each round. Every rank of a trainer takes part, the first one sends."""

    init_info_cls = TrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info: TrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        if source is None:
            raise WeightsError("a trainer needs a WeightSource: what shall it send?")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._sender = None
        if init_info.is_sender:
            engine._sender = Sender(
                SyncClientEngine(client, init_info.runtime_dir),
                runtime_dir=init_info.runtime_dir,
                buffer_bytes=init_info.packed_buffer_size_bytes,
            )
            client.init_weight_transfer_engine({"packed": init_info.packed})
        return engine

    def send_weights(self) -> None:
        """Begin the update, send all of the source, end the update."""
        if self._sender is None:
            for _ in self.source:  # gathering a tensor takes all ranks
                pass
            return
        self.client.start_weight_update()
        self._sender.send(iter(self.source))
        self.client.finish_weight_update()


def send_weights(iterator: Any, trainer_args: Any) -> None:
    """As `IPCWeightTransferEngine.trainer_send_weights` of vLLM 0.26: in an update that is begun.

    The arguments are those of its `http` and `ray` modes: `mode` or `send_mode`, `url` or
    `llm_handle`, and `packed_buffer_size_bytes`. `runtime_dir` may come with them.
    """
    given = dict(trainer_args) if isinstance(trainer_args, Mapping) else vars(trainer_args)
    folder = given.get("runtime_dir")
    sender = Sender(
        SyncClientEngine(_make_client(given), folder),
        runtime_dir=folder,
        buffer_bytes=given.get("packed_buffer_size_bytes"),
    )
    sender.send(iterator)


def _make_client(given: Mapping[str, Any]) -> SyncClient:
    mode = given.get("mode") or given.get("send_mode")
    url, handle = given.get("url"), given.get("llm_handle")
    if mode == "http" and url is not None:
        return HttpSyncClient(url)
    if mode == "ray" and handle is not None:
        return RaySyncClient(handle)
    raise WeightsError(
        f"mode {quote(mode)} with url {quote(url)}; give http and a url, or ray and an llm_handle"
    )


class HttpSyncClient:
    """A server of vLLM's in its development mode (VLLM_SERVER_DEV_MODE=1)."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        import requests

        answer = requests.post(f"{self._url}/{path}", json=body, timeout=_ANSWER_TIMEOUT_S)
        if not answer.ok:
            said = printable(answer.text, limit=1000)
            raise WeightsError(f"/{path} answered {answer.status_code}: {said}")


class RaySyncClient:
    """A Ray actor of vLLM's LLM or AsyncLLM, on this machine."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", base.WeightTransferInitRequest(init_info))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", base.WeightTransferUpdateRequest(update_info))

    def _call(self, name: str, request: Any) -> None:
        import ray

        ray.get(getattr(self._handle, name).remote(request), timeout=_ANSWER_TIMEOUT_S)


register_trainer()  # a trainer's process loads no plugins of vLLM's
