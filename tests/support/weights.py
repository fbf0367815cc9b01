"""An engine without vLLM that takes weights; its model is a few tensors.

Real: manifest, checks, socket, buffers, updater, control messages. Toy: the model and the worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.engine.core_control import CoreControl
from clairai.engine.worker_control import answer_control
from clairai.weights.check_manifest import EngineTensors, ExpectedTensor, TensorGroups
from clairai.weights.manifest import CPU, Manifest, encode_manifest
from clairai.weights.pack import HostPacker, TensorSpec, plan_buffers
from clairai.weights.pending_transfer import OpenDeviceBuffer
from clairai.weights.receive import (
    RankPlace,
    WeightsControl,
    WeightsUpdater,
    refuse_device_buffer,
)
from clairai.weights.room import LoadNeeds
from clairai.wire import control_messages, weights_messages

EPOCH = "00000000000000aa"
SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed.weight": (50, 16),
    "model.layers.0.w": (16, 16),
    "model.layers.0.b": (16,),
    "model.norm.weight": (),
}
EXPECTED = {name: ExpectedTensor(("F32", "BF16"), shape) for name, shape in SHAPES.items()}


def engine_tensors(epoch: str = EPOCH, device: str = CPU) -> EngineTensors:
    return EngineTensors(epoch, device, EXPECTED)


def plan(described: Any = None, *, epoch: str = EPOCH, device: str = CPU, **given: Any) -> Manifest:
    """A valid plan, unless the arguments make it invalid."""
    if described is None:
        described = [TensorSpec(name, "F32", shape) for name, shape in SHAPES.items()]
    return plan_buffers(
        described, transfer=secrets.token_hex(16), epoch=epoch, device=device, **given
    )


def altered(manifest: Manifest, index: int, **fields: Any) -> Manifest:
    """The same manifest with one tensor changed."""
    tensors = list(manifest.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **fields)
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def weights(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(np.asarray(rng.standard_normal(shape), np.float32))
        for name, shape in SHAPES.items()
    }


class ToyLlm:
    """What a Sender needs of vLLM's LLM; loading fails after `fail_after` tensors."""

    def __init__(
        self,
        folder: Path,
        step_publisher: Any = None,
        core_control: CoreControl | None = None,
        gpu: tuple[str, OpenDeviceBuffer] = (CPU, refuse_device_buffer),
        *,
        place: RankPlace | None = None,
        find_groups: TensorGroups | None = None,
    ) -> None:
        self.core_control = core_control or CoreControl(None, ())
        self.model = weights(0)
        self.fail_after: int | None = None
        self.needs = LoadNeeds()
        self.resets = 0
        self.messages: list[bytes] = []
        self.step_publisher = step_publisher
        self.updater = WeightsUpdater(
            folder,
            *gpu,
            EXPECTED,
            self._load,
            lambda: self.needs,
            place=place,
            find_groups=find_groups,
        )

    def _load(self, named: list[tuple[str, Any]]) -> None:
        for count, (name, tensor) in enumerate(named):
            if count == self.fail_after:
                raise RuntimeError("planted")
            self.model[name] = tensor.clone()

    def start_weight_update(self) -> None:
        """Does nothing, like the engine's own."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "prepared" in update_info:
            self.updater.apply(update_info["prepared"])
        else:
            self.updater.receive(update_info["manifest"].encode())

    def finish_weight_update(self) -> None:
        """Does nothing, like the engine's own."""

    def collective_rpc(self, method: str, args: tuple[bytes]) -> list[bytes]:
        assert method == "clairai_control"
        self.messages.append(args[0])
        return self.core_control.control(args[0], self.ask_ranks)

    def ask_ranks(self, message: bytes) -> list[bytes]:
        return [self.answer(message)]

    def answer(self, message: bytes) -> bytes:
        handover = WeightsControl(self, self.updater, self.step_publisher)
        return answer_control(self.step_publisher, message, None, handover)

    @property
    def asked(self) -> list[Any]:
        """The questions so far."""
        return [
            msgspec.msgpack.decode(each, type=control_messages.Control) for each in self.messages
        ]

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def ask(self, control: control_messages.Control) -> Any:
        (reply,) = self.collective_rpc("clairai_control", (msgspec.msgpack.encode(control),))
        return msgspec.msgpack.decode(reply, type=control_messages.ControlReply)

    def planned(self, manifest: Manifest) -> Any:
        return self.ask(weights_messages.PlanWeights(encode_manifest(manifest)))

    def committed(self, manifest: Manifest) -> Any:
        return self.ask(weights_messages.CommitWeights(encode_manifest(manifest)))

    @property
    def epoch(self) -> str:
        return self.updater.state().epoch


class ToyRanks(ToyLlm):
    """An engine of several ranks; the first one is the engine that a Sender sees."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        gpus: Sequence[tuple[str, OpenDeviceBuffer]] = (),
        publishers: Sequence[Any] = (),
    ) -> None:
        """`gpus` are those of the ranks, if they have any.

        `publishers` are those of a pipeline, in which all ranks have a bank and the last replies
        first.
        """
        devices = tuple(uuid for uuid, _ in gpus) or (CPU,) * num_ranks
        memories = gpus or [(CPU, refuse_device_buffer)] * num_ranks
        epoch = secrets.randbits(63)
        num_banks = len(publishers) or 1
        self._publisher_rank = len(publishers) - 1 if publishers else 0
        first, *others = (RankPlace(devices, rank, epoch, num_banks) for rank in range(num_ranks))
        control = CoreControl(None, (), num_ranks=num_ranks, publisher_rank=self._publisher_rank)
        holders = [*publishers] or [None] * num_ranks
        super().__init__(folder, holders[0], control, memories[0], place=first)
        self.ranks: list[ToyLlm] = [self]
        for memory, place, holder in zip(memories[1:], others, holders[1:], strict=True):
            self.ranks.append(ToyLlm(folder, holder, gpu=memory, place=place))

    def ask_ranks(self, message: bytes) -> list[bytes]:
        replies = [rank.answer(message) for rank in self.ranks]
        return [replies.pop(self._publisher_rank), *replies]

    def close(self) -> None:
        for rank in self.ranks:
            rank.updater.close()


def damage_packed_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit of every packed buffer before it is read."""
    pack = HostPacker.pack

    def damaged(self: HostPacker, index: int) -> Any:
        packed = pack(self, index)
        assert self._reused is not None
        self._reused.view(100)[17] ^= 1
        return packed

    monkeypatch.setattr(HostPacker, "pack", damaged)


@contextmanager
def engine(
    folder: Path, step_publisher: Any = None, core_control: CoreControl | None = None
) -> Iterator[ToyLlm]:
    running = ToyLlm(folder, step_publisher, core_control)
    try:
        yield running
    finally:
        running.updater.close()
