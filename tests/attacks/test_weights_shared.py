"""False references to shared memory: each is refused, and the bank stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from clairai.engine.publish.step_publisher import StepPublisher
from clairai.local.shared_buffer import SharedBuffer
from clairai.weights.manifest import Manifest, bank, encode_manifest, parse_manifest
from clairai.weights.pack import HostPacker, PackedBuffer, TensorSpec, open_sources
from clairai.wire import weights_messages
from clairai.wire.ring_messages import Refusal
from tests.support import toy_publisher
from tests.support.probe_banks import banked, rows
from tests.support.weights import ToyLlm, altered, engine, plan, weights


@pytest.fixture
def step_publisher(runtime: Path) -> Iterator[StepPublisher]:
    with banked(runtime) as made:
        yield made


@pytest.fixture
def llm(step_publisher: StepPublisher, tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path, step_publisher) as running:
        yield running


def commit_shared(
    manifest: Manifest, packed: PackedBuffer, buffer: SharedBuffer
) -> weights_messages.CommitWeights:
    claimed = msgspec.structs.replace(manifest, tensors=packed.tensors)
    return weights_messages.CommitWeights(
        encode_manifest(claimed), buffer.reference(manifest.buffers[0])
    )


def test_a_model_does_not_go_through_shared_memory(llm: ToyLlm) -> None:
    manifest, buffer = plan(epoch=llm.epoch), SharedBuffer()
    packed = HostPacker(open_sources(weights(2), ExitStack()), manifest, buffer).pack(0)
    refused = llm.ask(commit_shared(manifest, packed, buffer))
    assert isinstance(refused, Refusal)
    assert "probes and vectors alone" in refused.reason
    assert torch.equal(llm.model["model.norm.weight"], weights(0)["model.norm.weight"])


def _of_bank(
    step_publisher: StepPublisher, llm: ToyLlm, buffer: SharedBuffer
) -> tuple[Manifest, PackedBuffer]:
    named = bank(step_publisher.bank.names, rows())
    described = [TensorSpec(next(iter(named)), "F32", rows().shape)]
    manifest = plan(described, epoch=llm.epoch)
    return manifest, HostPacker(open_sources(named, ExitStack()), manifest, buffer).pack(0)


Change = Callable[[weights_messages.CommitWeights], weights_messages.CommitWeights]


def _with(**changes: Any) -> Change:
    def change(asked: weights_messages.CommitWeights) -> weights_messages.CommitWeights:
        assert asked.lent is not None
        return msgspec.structs.replace(asked, lent=msgspec.structs.replace(asked.lent, **changes))

    return change


def _other(**changes: Any) -> Change:
    def change(asked: weights_messages.CommitWeights) -> weights_messages.CommitWeights:
        manifest = msgspec.structs.replace(parse_manifest(asked.manifest), **changes)
        return msgspec.structs.replace(asked, manifest=encode_manifest(manifest))

    return change


def _further_on(asked: weights_messages.CommitWeights) -> weights_messages.CommitWeights:
    manifest = altered(parse_manifest(asked.manifest), 0, offset=256)
    return msgspec.structs.replace(asked, manifest=encode_manifest(manifest))


LIES: dict[str, tuple[Change, str]] = {
    "fewer bytes than planned": (_with(nbytes=1), "share one buffer"),
    "more bytes than planned": (_with(nbytes=4 << 20), "share one buffer"),
    "other memory": (_with(token="0" * 32), "other memory"),
    "a descriptor that is not there": (_with(fd=1 << 20), "cannot be reached"),
    "a process that is not there": (_with(pid=(1 << 31) - 1), "cannot be reached"),
    "another engine": (_other(epoch="0" * 16), "this engine is"),
    "a GPU's memory": (_other(device="0" * 32), "are on GPU"),
    "a larger buffer": (_other(buffers=(4 << 20,)), "its tensors end at"),
    "a second buffer": (_other(buffers=(2 << 20, 2 << 20)), "fill each buffer"),
    "a tensor further on": (_further_on, "leaves a hole"),
    "no manifest": (lambda asked: msgspec.structs.replace(asked, manifest=b"{"), "no manifest"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_reference_to_shared_memory_changes_nothing(
    step_publisher: StepPublisher, llm: ToyLlm, lie: str
) -> None:
    change, reason = LIES[lie]
    buffer, before = SharedBuffer(), toy_publisher.state_of(step_publisher)
    honest = commit_shared(*_of_bank(step_publisher, llm, buffer), buffer)
    refused = llm.ask(change(honest))
    assert isinstance(refused, Refusal)
    assert reason in refused.reason
    assert toy_publisher.state_of(step_publisher) == before
    assert not isinstance(llm.ask(honest), Refusal)
    assert [one.direction_D.tolist() for one in step_publisher.bank.probes] == rows().tolist()


def test_a_commit_without_a_checksum_is_refused(step_publisher: StepPublisher, llm: ToyLlm) -> None:
    buffer = SharedBuffer()
    manifest, packed = _of_bank(step_publisher, llm, buffer)
    bare = packed._replace(tensors=manifest.tensors)
    refused = llm.ask(commit_shared(manifest, bare, buffer))
    assert isinstance(refused, Refusal)
    assert "has no checksum" in refused.reason
