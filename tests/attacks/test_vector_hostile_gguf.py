"""Hostile GGUF control vectors: each is read, or refused with a short message."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from clairai.points import Point
from clairai.probe.model import MAX_WIDTH
from clairai.vector import gguf_format
from tests.attacks.test_vector_hostile_files import outcome
from tests.support.probes import numbers
from tests.support.vectors import vector


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str | bytes = "direction.3", *, dims: tuple[int, ...] = (2,), kind: int = 0,
           offset: int = 0) -> bytes:  # fmt: skip
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def gguf_of(*tensors: bytes, keys: tuple[bytes, ...] = (), body: bytes = bytes(numbers(1, 2)),
            version: int = 3, counts: tuple[int, int] | None = None) -> bytes:  # fmt: skip
    listed = tensors or (tensor(),)
    num_tensors, num_keys = counts or (len(listed), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    header += b"".join((*keys, *listed))
    return header + bytes(-len(header) % 32) + body


def array(item: int, count: int, rest: bytes = b"") -> bytes:
    return text("k") + struct.pack("<IIQ", 9, item, count) + rest


WIDE = tensor(dims=(MAX_WIDTH,))
SPOILED_GGUF = {
    "nothing after the magic": b"GGUF",
    "version 1": gguf_of(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(100),
    "2**64-1 tensors": gguf_of(counts=(2**64 - 1, 0)),
    "2**64-1 keys": gguf_of(counts=(1, 2**64 - 1)),
    "no tensors": gguf_of(counts=(0, 0)),
    "more keys than there are": gguf_of(counts=(1, 5)),
    "an array that never ends": gguf_of(keys=(array(0, 2**60),)),
    "an array of texts that never ends": gguf_of(keys=(array(8, 2**60),)),
    "an array of nothing that never ends": gguf_of(keys=(array(8, 2**60, bytes(8) * 1000),)),
    "arrays in arrays": gguf_of(keys=(array(9, 1, struct.pack("<IQ", 0, 0)),)),
    "a value of no type": gguf_of(keys=(text("k") + struct.pack("<I", 13),)),
    "a key of 2**63 bytes": gguf_of(keys=(struct.pack("<Q", 2**63),)),
    "a key that is not UTF-8": gguf_of(keys=(text(b"\xff") + struct.pack("<II", 4, 0),)),
    "alignment of 0": gguf_of(keys=(text("general.alignment") + struct.pack("<II", 4, 0),)),
    "alignment as a text": gguf_of(
        keys=(text("general.alignment") + struct.pack("<I", 8) + text("32"),)
    ),
    "alignment of 2**31": gguf_of(keys=(text("general.alignment") + struct.pack("<II", 4, 2**31),)),
    "a weight of a model": gguf_of(tensor("blk.0.attn_q.weight")),
    "no layer": gguf_of(tensor("direction.")),
    "a negative layer": gguf_of(tensor("direction.-1")),
    "layer 999999": gguf_of(tensor("direction.999999")),
    "a tensor's name of 2**40 bytes": gguf_of(struct.pack("<Q", 2**40)),
    "a name twice": gguf_of(tensor(), tensor()),
    "widths that differ": gguf_of(tensor(), tensor("direction.3.b", dims=(1,))),
    "widths that differ between layers": gguf_of(tensor(), tensor("direction.4", dims=(1,))),
    "two dimensions": gguf_of(tensor(dims=(2, 1))),
    "2**32-1 dimensions": gguf_of(text("direction.3") + struct.pack("<I", 2**32 - 1)),
    "no width": gguf_of(tensor(dims=(0,))),
    "width of 2**63": gguf_of(tensor(dims=(2**63,))),
    "quantized": gguf_of(tensor(kind=2)),
    "of no type": gguf_of(tensor(kind=99)),
    "offset beyond the end": gguf_of(tensor(offset=2**63)),
    "offset just beyond the end": gguf_of(tensor(offset=4)),
    "NaN": gguf_of(body=bytes(numbers(1, np.nan))),
    "only zeros": gguf_of(body=bytes(8)),
    "a sum that is infinite": gguf_of(
        tensor(), tensor("direction.3.b"), body=bytes(numbers(3e38, 1))
    ),
    "over the cap": b"GGUF" + bytes(gguf_format.MAX_NBYTES),
    "rows that overlap, over the numbers a vector holds": gguf_of(
        *(text(f"direction.3.{i}") + WIDE[8 + 11 :] for i in range(20)), body=bytes(4 * MAX_WIDTH)
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("data", SPOILED_GGUF.values(), ids=SPOILED_GGUF.keys())
def test_a_spoiled_gguf_file_is_refused(data: bytes) -> None:
    assert outcome(data) is None


def test_the_crafted_gguf_file_is_a_good_one_before_it_is_spoiled() -> None:
    made = outcome(gguf_of(keys=(array(8, 1, text("x")), array(4, 2, bytes(8)))))
    assert made is not None
    assert made.digest == vector(rows={Point("post_block", 3): numbers(1, 2)}).digest


PROMISES = {"a width": gguf_of(WIDE), "an array": gguf_of(keys=(array(12, 2**58),))}


@pytest.mark.parametrize("data", PROMISES.values(), ids=PROMISES.keys())
def test_a_promised_size_is_not_allocated(data: bytes) -> None:
    tracemalloc.start()
    assert outcome(data) is None
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_nbytes < 2 << 20
