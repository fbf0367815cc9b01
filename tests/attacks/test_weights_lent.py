"""Takes lies about memory that is lent to an engine; gives refusals, and the bank as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from clairai import wire_weights
from clairai.lent import Shelf
from clairai.tap.station import Station
from clairai.weights.layout import Described
from clairai.weights.manifest import Manifest, encode, parse
from clairai.weights.pack import Packed, Packer
from clairai.weights.sources import items
from clairai.weights.whole import bank
from clairai.wire import Refusal
from tests.unit import toy_station
from tests.unit.toy_banks import banked, rows
from tests.unit.toy_weights import ToyLlm, altered, engine, plan, weights


@pytest.fixture
def station(runtime: Path) -> Iterator[Station]:
    with banked(runtime) as made:
        yield made


@pytest.fixture
def llm(station: Station, tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path, station) as running:
        yield running


def lend(manifest: Manifest, packed: Packed, shelf: Shelf) -> wire_weights.CommitWeights:
    claimed = msgspec.structs.replace(manifest, tensors=packed.tensors)
    return wire_weights.CommitWeights(encode(claimed), shelf.lent(manifest.buffers[0]))


def test_a_model_is_not_lent(llm: ToyLlm) -> None:
    manifest, shelf = plan(epoch=llm.epoch), Shelf()
    packed = Packer(items(weights(2), ExitStack()), manifest, shelf).pack(0)
    refused = llm.ask(lend(manifest, packed, shelf))
    assert isinstance(refused, Refusal)
    assert "probes and vectors alone" in refused.reason
    assert torch.equal(llm.model["model.norm.weight"], weights(0)["model.norm.weight"])


def _of_bank(station: Station, llm: ToyLlm, shelf: Shelf) -> tuple[Manifest, Packed]:
    named = bank(station.columns.names, rows())
    described = [Described(next(iter(named)), "F32", rows().shape)]
    manifest = plan(described, epoch=llm.epoch)
    return manifest, Packer(items(named, ExitStack()), manifest, shelf).pack(0)


Change = Callable[[wire_weights.CommitWeights], wire_weights.CommitWeights]


def _with(**changes: Any) -> Change:
    def change(asked: wire_weights.CommitWeights) -> wire_weights.CommitWeights:
        assert asked.lent is not None
        return msgspec.structs.replace(asked, lent=msgspec.structs.replace(asked.lent, **changes))

    return change


def _other(**changes: Any) -> Change:
    def change(asked: wire_weights.CommitWeights) -> wire_weights.CommitWeights:
        manifest = msgspec.structs.replace(parse(asked.manifest), **changes)
        return msgspec.structs.replace(asked, manifest=encode(manifest))

    return change


def _further_on(asked: wire_weights.CommitWeights) -> wire_weights.CommitWeights:
    manifest = altered(parse(asked.manifest), 0, offset=256)
    return msgspec.structs.replace(asked, manifest=encode(manifest))


LIES: dict[str, tuple[Change, str]] = {
    "fewer bytes than planned": (_with(nbytes=1), "lend one buffer"),
    "more bytes than planned": (_with(nbytes=4 << 20), "lend one buffer"),
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
def test_a_lie_about_what_is_lent_changes_nothing(station: Station, llm: ToyLlm, lie: str) -> None:
    change, reason = LIES[lie]
    shelf, before = Shelf(), toy_station.state_of(station)
    honest = lend(*_of_bank(station, llm, shelf), shelf)
    refused = llm.ask(change(honest))
    assert isinstance(refused, Refusal)
    assert reason in refused.reason
    assert toy_station.state_of(station) == before
    assert not isinstance(llm.ask(honest), Refusal)
    assert [one.direction_D.tolist() for one in station.columns.probes] == rows().tolist()


def test_a_commit_without_a_checksum_is_refused(station: Station, llm: ToyLlm) -> None:
    shelf = Shelf()
    manifest, packed = _of_bank(station, llm, shelf)
    bare = packed._replace(tensors=manifest.tensors)
    refused = llm.ask(lend(manifest, bare, shelf))
    assert isinstance(refused, Refusal)
    assert "has no checksum" in refused.reason
