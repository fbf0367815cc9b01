"""Uploads of buffers over HTTP: planned, received, delivered and committed, in this order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from clairai.errors import WeightsError
from clairai.server import weights_upload
from clairai.server.engine_rpc import RouteRefusal
from clairai.weights.manifest import Manifest, PlannedTensor, encode_manifest
from clairai.weights.pack import PackedBuffer
from clairai.weights.transport import _file_pieces
from clairai.weights.upload import safetensors_header
from tests.support.footprint import nothing_left_behind
from tests.support.ring_engine import until
from tests.support.weights import weights
from tests.support.weights_target import Target, target


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Target]:
    with target(tmp_path) as made:
        yield made


def put(served: Target, manifest: Manifest, index: int, body: bytes) -> str:
    """What the route says; empty if it took it."""
    answer = served.client.put(f"/v1/weights/buffers/{manifest.transfer}/{index}", content=body)
    if answer.status_code == 204:
        return ""
    assert answer.status_code in (400, 408), answer.text
    return str(answer.json()["error"]["message"])


def file_of(packed: PackedBuffer, manifest: Manifest, index: int) -> bytes:
    pieces = _file_pieces(safetensors_header(packed.tensors), packed, manifest.buffers[index])
    return b"".join(pieces)


def uploaded(served: Target, manifest: Manifest, seed: int = 1) -> Manifest:
    """All buffers have come; the manifest as it is committed."""
    tensors: list[PlannedTensor] = []
    for index in range(len(manifest.buffers)):
        packed = served.pack(manifest, index, seed)
        assert put(served, manifest, index, file_of(packed, manifest, index)) == ""
        tensors += packed.tensors
        packed.close()
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def is_serving(served: Target, seed: int) -> bool:
    return all(torch.equal(served.llm.model[n], tensor) for n, tensor in weights(seed).items())


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_uploaded_buffers_are_served_and_freed(served: Target, buffer_bytes: int) -> None:
    _serve(served, 0, buffer_bytes)  # whatever is made once
    with nothing_left_behind():
        for seed in (1, 2):
            _serve(served, seed, buffer_bytes)


def _serve(served: Target, seed: int, buffer_bytes: int) -> None:
    manifest = uploaded(served, served.planned(buffer_bytes=buffer_bytes), seed)
    assert served.post("commit", encode_manifest(manifest)) == ""
    assert is_serving(served, seed)
    served.told.clear()


def test_a_buffer_of_no_plan_is_refused(served: Target) -> None:
    manifest = served.plan()
    packed = served.pack(manifest)
    body = file_of(packed, manifest, 0)
    packed.close()
    assert "is not planned here" in put(served, manifest, 0, body)
    served.post("plan", encode_manifest(manifest))
    assert "buffer 7 came, the plan has 1" in put(served, manifest, 7, body)
    assert put(served, manifest, 0, body) == ""
    assert "came, 1 of 1 are here" in put(served, manifest, 0, body)
    assert served.is_untouched()


@pytest.mark.parametrize("name", ["..%2f..%2fetc/0", "a/0", f"{'0' * 32}/-1", f"{'0' * 32}/99999"])
def test_a_path_that_names_no_buffer_is_refused(served: Target, name: str) -> None:
    answer = served.client.put(f"/v1/weights/buffers/{name}", content=b"")
    assert answer.status_code in (400, 404)
    assert served.is_untouched()


def test_a_failed_buffer_ends_its_transfer_and_the_next_one_succeeds(
    served: Target,
) -> None:
    manifest = served.planned()
    assert "early" in put(served, manifest, 0, b"")
    assert "is not planned here" in put(served, manifest, 0, b"")
    manifest = uploaded(served, served.planned())
    assert served.post("commit", encode_manifest(manifest)) == ""
    assert is_serving(served, 1)


def test_numbers_that_changed_on_the_way_are_refused_at_the_commit(served: Target) -> None:
    manifest = served.planned()
    packed = served.pack(manifest)
    body = bytearray(file_of(packed, manifest, 0))
    body[-1] ^= 1
    assert put(served, manifest, 0, bytes(body)) == ""
    summed = msgspec.structs.replace(manifest, tensors=packed.tensors)
    packed.close()
    assert "another checksum" in served.post("commit", encode_manifest(summed))
    assert served.is_untouched()
    assert served.still_takes_honest_weights()


def test_a_slow_sender_is_refused(served: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = served.planned()

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    monkeypatch.setattr(weights_upload, "BEGIN_S", 0.01)
    monkeypatch.setattr(weights_upload, "MIN_BYTES_PER_S", 1 << 40)
    uploads = weights_upload.uploads_of(served.client.app)  # type: ignore[arg-type]
    with pytest.raises(RouteRefusal, match="did not come within"):
        asyncio.run(uploads.receive(manifest.transfer, 0, never()))
    assert "is not planned here" in put(served, manifest, 0, b"")


def test_a_commit_of_another_transfer_does_not_wait_for_an_upload(served: Target) -> None:
    manifest = served.planned()
    uploads = weights_upload.uploads_of(served.client.app)  # type: ignore[arg-type]

    async def meanwhile() -> str:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            begun.set()
            await go_on.wait()
            yield b""

        async def committed() -> str:
            return "committed"

        upload = asyncio.create_task(uploads.receive(manifest.transfer, 0, slowly()))
        await begun.wait()
        async with asyncio.timeout(60):
            answer = await uploads.keep_until("f" * 32, committed())
        go_on.set()
        with pytest.raises(WeightsError, match="early"):
            await upload
        return answer

    assert asyncio.run(meanwhile()) == "committed"


def test_the_transfer_of_a_sender_that_does_not_return_is_given_up(
    served: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_upload, "IDLE_S", 0.0)
    manifest = served.planned(buffer_bytes=1)
    packed = served.pack(manifest, 0)
    assert put(served, manifest, 0, file_of(packed, manifest, 0)) == ""
    packed.close()
    uploads = weights_upload.uploads_of(served.client.app)  # type: ignore[arg-type]
    until(lambda: uploads._relay.transfer is None)
    assert served.still_takes_honest_weights()
