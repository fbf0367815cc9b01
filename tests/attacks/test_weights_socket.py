"""False senders at the socket, and false commits, numbered: refused, others are served."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clairai.weights.host_buffers import HostBuffer
from clairai.weights.manifest import GRANULE_BYTES, Manifest, encode_manifest
from clairai.weights.socket_server import MAX_FRAME_BYTES
from tests.support.footprint import nothing_left_behind
from tests.support.weights import altered
from tests.support.weights_target import Target, offer_of, said, target


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Target]:
    with target(tmp_path) as made:
        yield made


def _set(manifest: Manifest, **fields: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


# Attempts on the socket: each says what it sends, once a plan is there.


def _file(content: bytes = bytes(GRANULE_BYTES)) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return os.dup(file.fileno())


def _open_memfd(nbytes: int = GRANULE_BYTES) -> int:
    fd = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    return fd


def _offer_fd(attacked: Target, fd: int, **changes: Any) -> str:
    manifest = attacked.planned()
    packed = attacked.pack(manifest)
    try:
        return attacked.offered(offer_of(manifest, packed, **changes), (fd,))
    finally:
        packed.close()
        os.close(fd)


def _sealed_short(_: Target) -> int:
    buffer = HostBuffer(GRANULE_BYTES // 2)
    buffer.seal()
    return buffer.fd


def _pipe(_: Target) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


FDS: dict[str, tuple[Callable[[Target], int], str]] = {
    "26 a file in place of memory": (lambda _: _file(), "not a memfd|cannot be mapped|seals"),
    "27 memory that can still change": (lambda _: _open_memfd(), "it could change"),
    "28 memory that can be cut off": (lambda _: _open_memfd(4 * GRANULE_BYTES), "were announced"),
    "29 sealed memory that is too short": (_sealed_short, "were announced"),
    "30 a pipe": (_pipe, "not a memfd"),
    "31 a device": (lambda _: os.open("/dev/zero", os.O_RDONLY), "not a memfd"),
    "32 a folder": (lambda _: os.open("/", os.O_RDONLY), "not a memfd"),
}


@pytest.mark.parametrize("attempt", FDS)
def test_a_descriptor_that_is_no_sealed_memory_is_refused(attacked: Target, attempt: str) -> None:
    make, reason = FDS[attempt]
    refusal = _offer_fd(attacked, make(attacked))
    assert any(part in refusal for part in reason.split("|")), refusal
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()


OFFERS: dict[str, tuple[dict[str, Any], int, str]] = {
    "33 no descriptor": ({}, 0, "descriptors"),
    "34 two descriptors": ({}, 2, "descriptors"),
    "35 a transfer that nobody planned": ({"transfer": "0" * 32}, 1, "no such transfer"),
    "36 the second buffer first": ({"index": 1}, 1, "in order"),
    "37 a buffer past the last": ({"index": 1 << 40}, 1, "in order"),
    "38 a claim of another size": ({"nbytes": 1 << 40}, 1, "were planned"),
    "39 a GPU's handle to an engine without": (
        {"home": "device", "handle": bytes(64)},
        0,
        "descriptors",
    ),
    "40 a handle and a descriptor": ({"handle": bytes(64)}, 1, "descriptors"),
    "41 a handle that is too long": ({"handle": bytes(65)}, 0, "no message of ours"),
    "42 a handle that is too short": ({"home": "device", "handle": bytes(63)}, 0, "descriptors"),
}


@pytest.mark.parametrize("attempt", OFFERS)
def test_an_offer_that_is_not_as_planned_is_refused(attacked: Target, attempt: str) -> None:
    changes, count, reason = OFFERS[attempt]
    with nothing_left_behind():
        manifest = attacked.planned()
        packed = attacked.pack(manifest)
        refusal = attacked.offered(offer_of(manifest, packed, **changes), packed.fds * count)
        packed.close()
    assert reason in refusal
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()


FRAMES: dict[str, tuple[bytes, str]] = {
    "43 bytes that are no message": (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "no message"),
    "44 a message cut off": (struct.pack("<I", 100) + b"\x81", "middle of a message"),
    "45 a length of 4 GiB": (struct.pack("<I", 2**32 - 1), "may send"),
    "46 a length just over the bound": (struct.pack("<I", MAX_FRAME_BYTES + 1), "may send"),
    "47 very deep nesting": (struct.pack("<I", 4000) + b"\x91" * 4000, "no message"),
    "48 a message of another kind": (
        struct.pack("<I", 14) + msgspec.msgpack.encode({"type": "shell"})[:14],
        "message",
    ),
    "49 half a length": (b"\x01\x00", "middle of a message"),
}


@pytest.mark.parametrize("attempt", FRAMES)
def test_bytes_that_are_no_offer_end_the_session_and_nothing_else(
    attacked: Target, attempt: str
) -> None:
    raw, reason = FRAMES[attempt]
    attacked.planned()
    assert reason in attacked.offered(raw)
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()


def test_50_an_offer_before_any_plan_is_refused(attacked: Target) -> None:
    manifest = attacked.plan()
    packed = attacked.pack(manifest)
    assert "no such transfer" in attacked.offered(offer_of(manifest, packed), packed.fds)
    packed.close()
    assert attacked.still_takes_honest_weights()


def test_51_a_buffer_that_comes_twice_is_refused(attacked: Target) -> None:
    manifest = attacked.planned()
    packed = attacked.pack(manifest)
    with attacked.connected() as sock:
        assert said(sock, offer_of(manifest, packed), packed.fds) == ""
        assert "each once" in said(sock, offer_of(manifest, packed), packed.fds)
    packed.close()
    assert attacked.still_takes_honest_weights()


def test_52_a_commit_without_its_buffers_is_refused(attacked: Target) -> None:
    manifest = attacked.planned()
    summed = _set(manifest, tensors=attacked.pack(manifest).tensors)
    assert "0 of 1 buffers" in attacked.post("commit", encode_manifest(summed))
    assert attacked.is_untouched()


COMMITS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "53 a checksum that is another": (
        lambda m: altered(m, 1, checksum="0" * 16),
        "another checksum",
    ),
    "54 a checksum that is missing": (lambda m: altered(m, 1, checksum=""), "has no checksum"),
    "55 another transfer": (lambda m: _set(m, transfer="0" * 32), "is not planned"),
    "56 another packing": (
        lambda m: altered(_set(m, buffers=(GRANULE_BYTES,) * 2), 3, buffer=1, offset=0),
        "not where the plan",
    ),
}


@pytest.mark.parametrize("attempt", COMMITS)
def test_a_commit_that_is_not_its_plan_is_refused(attacked: Target, attempt: str) -> None:
    change, reason = COMMITS[attempt]
    manifest = attacked.planned()
    packed = attacked.pack(manifest)
    with attacked.connected() as sock:
        assert said(sock, offer_of(manifest, packed), packed.fds) == ""
        given = change(_set(manifest, tensors=packed.tensors))
        assert reason in attacked.post("commit", encode_manifest(given))
    packed.close()
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()


def test_57_a_manifest_that_was_used_cannot_be_used_again(attacked: Target) -> None:
    manifest = attacked.planned()
    packed = attacked.pack(manifest)
    summed = encode_manifest(_set(manifest, tensors=packed.tensors))
    with attacked.connected() as sock:
        assert said(sock, offer_of(manifest, packed), packed.fds) == ""
        assert attacked.post("commit", summed) == ""
        assert attacked.told == ["pause wait True", "resume"]
        attacked.told.clear()
        assert "was used" in attacked.post("commit", summed)
    packed.close()
    assert attacked.llm.updater.served.version == 1


def test_58_what_was_handed_over_cannot_be_changed_any_more(attacked: Target) -> None:
    packed = attacked.pack(attacked.plan())
    (fd,) = packed.fds
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.truncate(fd, 0),
        lambda: os.truncate(fd, 2 * GRANULE_BYTES),
    ):
        with pytest.raises(PermissionError):
            change()
    packed.close()


def test_59_a_sender_that_leaves_takes_its_plan_along(attacked: Target) -> None:
    manifest = attacked.planned()
    packed = attacked.pack(manifest)
    assert attacked.offered(offer_of(manifest, packed), packed.fds) == ""
    packed.close()
    with attacked.connected():  # the one before has been let go
        summed = encode_manifest(_set(manifest, tensors=packed.tensors))
        assert "given up" in attacked.post("commit", summed)
    assert attacked.is_untouched()


@pytest.mark.parametrize("drain", ["keep", "", "wait;abort", "../wait"])
def test_60_a_way_to_drain_that_would_mix_weights_is_refused(attacked: Target, drain: str) -> None:
    answer = attacked.client.post("/v1/weights/commit", params={"drain": drain}, content=b"{}")
    assert answer.status_code == 400
    assert attacked.told == []
