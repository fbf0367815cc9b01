"""Hostile vector files: each is a vector or a VectorError with a short message."""

from __future__ import annotations

import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import VectorError
from clairai.points import Point
from clairai.probe.model import MAX_WIDTH
from clairai.vector import files, gguf_format, json_format, safetensors_format
from clairai.vector.model import MAX_POINTS, Vector
from tests.support.probes import numbers
from tests.support.vectors import vector

BLOCKS = vector(
    rows={Point("post_block", 3): numbers(1, -2), Point("post_block", 4): numbers(0, 4)}
)
GOOD = files.dumps(vector(scale=0.5, description="Words.", model="m", method="PCA"))
GOOD_GGUF = gguf_format.dumps(BLOCKS)
GOOD_JSON = b'{"post_block": {"1": [3, -4, 0]}, "pre_attn": {"1": {"vector": [1, 2e0, 2]}}}'
GOOD_FILES = {"safetensors": GOOD, "GGUF": GOOD_GGUF, "JSON": GOOD_JSON}


def outcome(data: bytes) -> Vector | None:
    """The vector, or None after a well-made refusal; anything else fails the test."""
    try:
        return files.loads(data, source="upload")
    except VectorError as error:
        reason = error.reason
    assert reason.startswith("'upload': ")
    assert len(reason) < 400
    assert "\n" not in reason
    return None


def test_the_good_files_are_good_before_they_are_spoiled() -> None:
    found = [outcome(data) for data in GOOD_FILES.values()]
    digests = [made.digest for made in found if made is not None]
    assert digests == [vector().digest, BLOCKS.digest, vector().digest]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", b"{"]), st.binary(max_size=200))
def test_random_bytes_are_refused(start: bytes, data: bytes) -> None:
    assert outcome(start + data) is None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=60))
def test_random_headers_of_the_right_length_are_refused(header: bytes, body: bytes) -> None:
    assert outcome(struct.pack("<Q", len(header)) + header + body) is None


@pytest.mark.parametrize("data", GOOD_FILES.values(), ids=GOOD_FILES.keys())
def test_a_file_cut_at_any_byte_is_refused(data: bytes) -> None:
    needed = len(data.rstrip(b"\0")) if data is GOOD_GGUF else len(data)  # GGUF ends in padding
    assert all(outcome(data[:end]) is None for end in range(needed))


@pytest.mark.parametrize("data", GOOD_FILES.values(), ids=GOOD_FILES.keys())
def test_no_single_bit_flip_gives_anything_but_a_vector_or_a_refusal(data: bytes) -> None:
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        made = outcome(bytes(flipped))
        assert made is None or all(np.isfinite(row_D).all() for row_D in made.rows.values())


BODY = bytes(numbers(1, -2, 3)) + bytes(numbers(4, 5, 6))
FIRST = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
SECOND = {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]}
FIELDS = {"clairai": "vector/1", "name": "v"}


def crafted(header: object, body: bytes = BODY) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def file_of(first: object = FIRST, body: bytes = BODY, **fields: object) -> bytes:
    return with_fields(fields, first, body)


def with_fields(fields: dict[str, object], first: object = FIRST, body: bytes = BODY) -> bytes:
    tensors = {"post_block.1": first, "post_block.2": SECOND}
    return crafted({"__metadata__": FIELDS | fields, **tensors}, body)


def named(first: str, second: str) -> bytes:
    return crafted({"__metadata__": FIELDS, first: FIRST, second: SECOND})


MANY = {f"post_block.{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i in range(MAX_POINTS + 1)}  # fmt: skip
SPOILED = {
    "header length of 2**64-1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header padded past the cap": crafted(b"{}" + b" " * safetensors_format.MAX_HEADER),
    "header is a list": crafted([]),
    "no metadata": crafted({"post_block.1": FIRST, "post_block.2": SECOND}),
    "metadata is a list": crafted({"__metadata__": [], "post_block.1": FIRST}),
    "a probe": file_of(clairai="probe/1"),
    "from a later version": file_of(clairai="vector/2"),
    "no tensor": crafted({"__metadata__": FIELDS}, b""),
    "too many points": crafted({"__metadata__": FIELDS, **MANY}, bytes(4 * len(MANY))),
    "a point of another kind": named("mlp.1", "post_block.1"),
    "a point without a layer": named("post_block", "post_block.1"),
    "a layer spelt in two ways": named("post_block.1", "post_block.01"),
    "a point twice by its alias": named("post_block.1", "resid_post.1"),
    "key twice": crafted(b'{"__metadata__":{"clairai":"vector/1","name":"a","name":"b"}}'),
    "nested deep": crafted(b"[" * 60_000),
    "not UTF-8": crafted(b'{"\xff": 1}'),
    "an integer of 5000 digits": crafted(b'{"a": ' + b"9" * 5000 + b"}"),
    "name missing": crafted(
        {"__metadata__": {"clairai": "vector/1"}, "post_block.1": FIRST, "post_block.2": SECOND}
    ),
    "name with a path": file_of(name="../../etc/passwd"),
    "name is a number": file_of(name=1),
    "33 metadata keys": with_fields({f"k{i}": "" for i in range(31)}),
    "metadata of 2 KB": file_of(anything="x" * 2000),
    "scale is NaN": file_of(scale="nan"),
    "scale beyond float32": file_of(scale="1e39"),
    "scale with an underscore": file_of(scale="1_0"),
    "description with an escape": file_of(description="a\x1b[31m"),
    "method over its bound": file_of(method="a" * 101),
    "model is empty": file_of(model=""),
    "tensor is a number": file_of(1),
    "dtype unknown": file_of(FIRST | {"dtype": "F64"}),
    "dtype is a list": file_of(FIRST | {"dtype": ["F32"]}),
    "shape of two": file_of(FIRST | {"shape": [3, 1]}),
    "shape negative": file_of(FIRST | {"shape": [-3]}),
    "shape is true": file_of(FIRST | {"shape": [True], "data_offsets": [0, 4]}),
    "shape of 2**62": file_of(FIRST | {"shape": [2**62]}),
    "too wide": file_of(FIRST | {"shape": [MAX_WIDTH + 1]}),
    "another width": file_of(FIRST | {"dtype": "F16", "shape": [6]}),
    "offsets negative": file_of(FIRST | {"data_offsets": [-12, 0]}),
    "offsets overlap": file_of(FIRST | {"data_offsets": [12, 24]}),
    "offsets beyond the end": file_of(FIRST | {"data_offsets": [2**62, 2**62 + 12]}),
    "offsets are floats": file_of(FIRST | {"data_offsets": [0.0, 12.0]}),
    "offsets of three": file_of(FIRST | {"data_offsets": [0, 12, 24]}),
    "offsets missing": file_of({"dtype": "F32", "shape": [3]}),
    "a fourth field": file_of(FIRST | {"__reduce__": "os.system"}),
    "body too long": file_of(body=BODY + b"\0"),
    "body too short": file_of(body=BODY[:-1]),
    "NaN": file_of(body=bytes(numbers(1, np.nan, 3, 1, 1, 1))),
    "a row of zeros": file_of(body=bytes(numbers(0, 0, 0, 1, 1, 1))),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "over the cap": bytes(safetensors_format.MAX_NBYTES + 1),
}  # fmt: skip


@pytest.mark.parametrize("data", SPOILED.values(), ids=SPOILED.keys())
def test_a_spoiled_safetensors_file_is_refused(data: bytes) -> None:
    assert outcome(data) is None


def test_the_crafted_file_is_a_good_one_before_it_is_spoiled() -> None:
    rows = {Point("post_block", 1): numbers(1, -2, 3), Point("post_block", 2): numbers(4, 5, 6)}
    assert outcome(file_of()) == vector(rows=rows)


SPOILED_JSON = {
    "empty": b"",
    "empty object": b"{}",
    "hook without layers": b'{"post_block": {}}',
    "a probe": b'{"vector": [1, 2]}',
    "unknown hook": b'{"mlp_out": {"1": [1]}}',
    "unknown layer": b'{"post_block": {"-1": [1]}}',
    "layer spelt twice": b'{"post_block": {"1": [1], "01": [1]}}',
    "layer there twice": b'{"post_block": {"1": [1], "1": [1]}}',
    "a point twice by its alias": b'{"post_block": {"1": [1]}, "resid_post": {"1": [1]}}',
    "layers are a list": b'{"post_block": [[1]]}',
    "row is a word": b'{"post_block": {"1": "AAAA"}}',
    "row is null": b'{"post_block": {"1": null}}',
    "row is empty": b'{"post_block": {"1": []}}',
    "row of words": b'{"post_block": {"1": ["1"]}}',
    "row of true": b'{"post_block": {"1": [true]}}',
    "nested row": b'{"post_block": {"1": [[1]]}}',
    "NaN": b'{"post_block": {"1": [NaN]}}',
    "infinite by size": b'{"post_block": {"1": [1e999]}}',
    "beyond float64": b'{"post_block": {"1": [' + b"9" * 400 + b"]}}",
    "zeros": b'{"post_block": {"1": [0]}}',
    "widths that differ": b'{"post_block": {"1": [1], "2": [1, 2]}}',
    "no vector": b'{"post_block": {"1": {"scale": 1}}}',
    "a third key": b'{"post_block": {"1": {"vector": [1], "scale": 1, "x": 1}}}',
    "scale is a word": b'{"post_block": {"1": {"vector": [1], "scale": "1"}}}',
    "scale is true": b'{"post_block": {"1": {"vector": [1], "scale": true}}}',
    "scale is null": b'{"post_block": {"1": {"vector": [1], "scale": null}}}',
    "scale of 0": b'{"post_block": {"1": {"vector": [1], "scale": 0}}}',
    "scale overflows": b'{"post_block": {"1": {"vector": [1e30], "scale": 1e30}}}',
    "scale beyond float64": b'{"post_block":{"1":{"vector":[1],"scale":' + b"9" * 400 + b"}}}",
    "nested 100000 deep": b'{"post_block": ' + b"[" * 100_000,
    "too wide": b'{"post_block": {"1": [' + b"1," * MAX_WIDTH + b"1]}}",
    "too many points": json.dumps({"post_block": {i: [1] for i in range(MAX_POINTS + 1)}}).encode(),
    "over the cap": b"{" + b" " * json_format.MAX_NBYTES,
}


@pytest.mark.parametrize("data", SPOILED_JSON.values(), ids=SPOILED_JSON.keys())
def test_a_spoiled_json_file_is_refused(data: bytes) -> None:
    assert outcome(data) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["post_block", "pre_attn", "x"]), st.dictionaries(
    st.sampled_from(["0", "15", "-1"]), json_values | st.lists(st.floats(width=32)),
) | json_values))  # fmt: skip
def test_any_json_of_any_types_is_a_vector_or_a_refusal(given_: dict[str, object]) -> None:
    outcome(json.dumps(given_).encode())


def test_a_promised_size_is_not_allocated() -> None:
    data = file_of(FIRST | {"shape": [MAX_WIDTH], "data_offsets": [0, 4 * MAX_WIDTH]})
    tracemalloc.start()
    assert outcome(data) is None
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_nbytes < 2 << 20
