"""False memory that an engine is asked to copy, numbered: each is refused, others are served."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from clairai.errors import WeightsError
from clairai.weights import pending_transfer
from clairai.weights.host_buffers import MAX_COPIED_BYTES
from clairai.weights.manifest import GRANULE_BYTES
from clairai.wire.weights_messages import BufferOffer
from tests.support.weights_target import Target, offer_of, said, target


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Target]:
    with target(tmp_path) as made:
        yield made


def _memory(nbytes: int) -> int:
    fd = _unsealed(nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def _unsealed(nbytes: int) -> int:
    fd = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    return fd


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


FDS: dict[str, tuple[Callable[[], int], str]] = {
    "90 a pipe": (_pipe, "not a memfd"),
    "91 a device without end": (lambda: os.open("/dev/zero", os.O_RDONLY), "not a memfd"),
    "92 a folder": (lambda: os.open("/", os.O_RDONLY), "not a memfd"),
    "93 a file": (lambda: os.open(__file__, os.O_RDONLY), "not a memfd"),
    "94 memory that is too short": (lambda: _memory(GRANULE_BYTES - 1), "were announced"),
    "95 memory that nobody may read": (lambda: _unreadable(), "cannot be read"),
    "98 memory that can be cut off": (lambda: _unsealed(GRANULE_BYTES), "it could change"),
}


def _unreadable() -> int:
    fd = _memory(GRANULE_BYTES)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    finally:
        os.close(fd)


@pytest.mark.parametrize("attempt", FDS)
def test_what_is_no_memory_is_not_read(attacked: Target, attempt: str) -> None:
    make, reason = FDS[attempt]
    manifest, fd = attacked.planned(), make()
    packed = attacked.pack(manifest)
    refusal = attacked.offered(offer_of(manifest, packed, home="copied"), (fd,))
    packed.close()
    os.close(fd)
    assert reason in refusal
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()


@pytest.mark.parametrize("count", [0, 2])
def test_a_copy_comes_with_one_descriptor(attacked: Target, count: int) -> None:
    manifest = attacked.planned()
    packed = attacked.pack(manifest)
    offer = offer_of(manifest, packed, home="copied")
    assert "descriptors" in attacked.offered(offer, packed.fds * count)
    packed.close()
    assert attacked.still_takes_honest_weights()


def test_96_zeros_in_place_of_the_numbers_are_not_believed(attacked: Target) -> None:
    manifest, fd = attacked.planned(), _memory(GRANULE_BYTES)
    packed = attacked.pack(manifest)
    claimed = msgspec.structs.replace(manifest, tensors=packed.tensors)
    with attacked.connected() as sock:
        assert said(sock, offer_of(manifest, packed, home="copied"), (fd,)) == ""
        assert "another checksum" in attacked.llm.committed(claimed).reason
    packed.close()
    os.close(fd)
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()


def test_97_more_than_an_engine_copies_is_refused() -> None:
    offer = BufferOffer("0" * 32, 0, MAX_COPIED_BYTES + 1, "copied")
    with pytest.raises(WeightsError, match="at most 33554432 are copied"):
        pending_transfer._check_offer(offer, (7,), is_on_host=True)
