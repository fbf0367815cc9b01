"""Probe files nobody vouches for: each is a probe or a ProbeError in one short sentence."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ProbeError
from clairai.probe import files
from clairai.probe.model import MAX_WIDTH, Probe
from clairai.wire import control_messages
from tests.support.probes import numbers, probe

GOOD = files.dumps(
    probe(
        bias=0.5,
        threshold=1.0,
        calibration=(0.0, 2.0),
        model="m",
        description="Words.",
        auroc=0.9,
        histogram=control_messages.Histogram(0.0, 1.0, tuple(range(8))),
    )
)
GOOD_JSON = b'{"vector": [1, -2.5e0, 3], "bias": 0.5, "name": "p", "activation": "none"}'

Loads = Callable[[bytes], Probe]


def loads(data: bytes) -> Probe:
    return files.loads(data, source="upload")


def loads_json(data: bytes) -> Probe:
    return files.loads_json(data, source="enc_1_x.json")


def outcome(read: Loads, data: bytes) -> Probe | None:
    """The probe, or None after a well-made refusal; anything else fails the test."""
    try:
        return read(data)
    except ProbeError as error:
        reason = error.reason
    assert reason.startswith(("'upload': ", "'enc_1_x.json': "))
    assert len(reason) < 400
    assert "\n" not in reason
    assert "Traceback" not in reason
    return None


def test_the_check_itself_notices_a_parser_that_lets_other_errors_out() -> None:
    with pytest.raises(struct.error):
        outcome(lambda data: struct.unpack("<Q", data)[0], b"")


@pytest.mark.parametrize("read", [loads, loads_json])
def test_random_bytes_are_refused(read: Loads) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=200))
    def check(data: bytes) -> None:
        assert outcome(read, data) is None

    check()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=60))
def test_random_headers_of_the_right_length_are_refused(header: bytes, body: bytes) -> None:
    assert outcome(loads, struct.pack("<Q", len(header)) + header + body) is None


@pytest.mark.parametrize(("read", "data"), [(loads, GOOD), (loads_json, GOOD_JSON)])
def test_a_file_cut_at_any_byte_is_refused(read: Loads, data: bytes) -> None:
    assert outcome(read, data) is not None
    assert all(outcome(read, data[:end]) is None for end in range(len(data)))


def test_a_file_with_anything_after_its_end_is_refused() -> None:
    assert outcome(loads, GOOD + b"\0") is None
    assert outcome(loads_json, GOOD_JSON + b"{}") is None


@pytest.mark.parametrize(("read", "data"), [(loads, GOOD), (loads_json, GOOD_JSON)])
def test_no_single_bit_flip_gives_anything_but_a_probe_or_a_refusal(
    read: Loads, data: bytes
) -> None:
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        made = outcome(read, bytes(flipped))
        assert made is None or np.isfinite(made.direction_D).all()


BODY = bytes(numbers(1, -2, 3))


def crafted(header: object, body: bytes = BODY) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


TENSOR = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [12, 12]}
FIELDS = {"clairai": "probe/1", "name": "p", "point": "post_block.1"}
GOOD_HEADER = json.dumps({"__metadata__": FIELDS, "direction": TENSOR}).encode()


OPTIONAL = ("bias", "calibration", "model", "description", "auroc", "histogram")


def file_of(tensor: object = TENSOR, body: bytes = BODY, **fields: object) -> bytes:
    return with_fields(fields, tensor, body)


def with_fields(fields: dict[str, object], tensor: object = TENSOR, body: bytes = BODY) -> bytes:
    return crafted({"__metadata__": FIELDS | fields, "direction": tensor}, body)


def test_the_crafted_file_is_a_good_one_before_it_is_spoiled() -> None:
    assert outcome(loads, file_of()) == probe()


SPOILED = {
    "no header": struct.pack("<Q", 0),
    "header length of 2**64-1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header of 100 MB promised": struct.pack("<Q", 10**8) + b"{}",
    "header padded past the cap": crafted(GOOD_HEADER + b" " * files.MAX_HEADER),
    "header is a list": crafted([]),
    "header is null": crafted(None),
    "no metadata": crafted({"direction": TENSOR}),
    "metadata is a list": crafted({"__metadata__": [], "direction": TENSOR}),
    "not ours": crafted({"__metadata__": {"format": "pt"}, "direction": TENSOR}),
    "from a later version": file_of(clairai="probe/2"),
    "no tensor": crafted({"__metadata__": FIELDS}),
    "tensor of another name": crafted({"__metadata__": FIELDS, "weight": TENSOR}),
    "tensor is a number": crafted({"__metadata__": FIELDS, "direction": 1}),
    "two tensors": crafted({"__metadata__": FIELDS, "direction": TENSOR, "x": TENSOR}),
    "a second tensor, empty": crafted({"__metadata__": FIELDS, "direction": TENSOR, "x": EMPTY}),
    "key twice": crafted(GOOD_HEADER.replace(b'"name"', b'"name": "q", "name"')),
    "nested 100000 deep": crafted(b"[" * 60_000),
    "objects nested deep": crafted(b'{"a":' * 10_000),
    "not UTF-8": crafted(b'{"\xff": 1}'),
    "NaN in the header": crafted(b'{"__metadata__": NaN}'),
    "an integer of 5000 digits": crafted(b'{"a": ' + b"9" * 5000 + b"}"),
    "name missing": crafted({"__metadata__": {"clairai": "probe/1"}, "direction": TENSOR}),
    "name with a path": file_of(name="../../etc/passwd"),
    "name of 10 KB": file_of(name="x" * 10_000),
    "name is a number": file_of(name=1),
    "point of another kind": file_of(point="mlp.1"),
    "point negative": file_of(point="post_block.-1"),
    "33 metadata keys": with_fields({f"k{i}": "" for i in range(30)}),
    "bias is NaN": file_of(bias="nan"),
    "bias is infinite": file_of(bias="1e999"),
    "bias is beyond float32": file_of(bias="1e39"),
    "bias is a word": file_of(bias="much"),
    "bias has an underscore": file_of(bias="1_0"),
    "bias in other digits": file_of(bias="\u0661"),
    "threshold is empty": file_of(threshold=""),
    "calibration of one": file_of(calibration="1"),
    "calibration of three": file_of(calibration="1,2,3"),
    "calibration downwards": file_of(calibration="2,1"),
    "activation unknown": file_of(activation="exec"),
    "model with control characters": file_of(model="a\x1b[31m"),
    "description with an escape": file_of(description="a\x1b[31m"),
    "description over its bound": file_of(description="a" * 501),
    "description empty": file_of(description=""),
    "auroc over 1": file_of(auroc="1.5"),
    "auroc is NaN": file_of(auroc="nan"),
    "histogram empty": file_of(histogram=""),
    "histogram of one": file_of(histogram="0"),
    "histogram without counts": file_of(histogram="0,1"),
    "histogram ends in a comma": file_of(histogram="0,1," + "1," * 8),
    "histogram of seven": file_of(histogram="0,1" + ",1" * 7),
    "histogram of 65": file_of(histogram="0,1" + ",1" * 65),
    "histogram downwards": file_of(histogram="1,0" + ",1" * 8),
    "histogram counts nothing": file_of(histogram="0,1" + ",0" * 8),
    "histogram of halves": file_of(histogram="0,1" + ",0.5" * 8),
    "histogram of negatives": file_of(histogram="0,1" + ",-1" * 8),
    "histogram with an underscore": file_of(histogram="0,1" + ",1_0" * 8),
    "histogram in other digits": file_of(histogram="0,1" + ",\u0661" * 8),
    "histogram of huge counts": file_of(histogram="0,1" + ",9999999999999" * 8),
    "dtype unknown": file_of(TENSOR | {"dtype": "F64"}),
    "dtype is a list": file_of(TENSOR | {"dtype": ["F32"]}),
    "shape of two": file_of(TENSOR | {"shape": [3, 1]}),
    "shape of none": file_of(TENSOR | {"shape": []}),
    "shape negative": file_of(TENSOR | {"shape": [-3]}),
    "shape is a float": file_of(TENSOR | {"shape": [3.0]}),
    "shape is true": file_of(TENSOR | {"shape": [True], "data_offsets": [0, 4]}),
    "shape of 2**62": file_of(TENSOR | {"shape": [2**62]}),
    "shape of zero": file_of(TENSOR | {"shape": [0], "data_offsets": [0, 0]}, b""),
    "too wide": file_of(TENSOR | {"shape": [MAX_WIDTH + 1]}),
    "offsets overlap the header": file_of(TENSOR | {"data_offsets": [-8, 4]}),
    "offsets leave a hole": file_of(TENSOR | {"data_offsets": [4, 16]}, bytes(16)),
    "offsets beyond the end": file_of(TENSOR | {"data_offsets": [0, 2**63]}),
    "offsets missing": file_of({"dtype": "F32", "shape": [3]}),
    "a fourth field": file_of(TENSOR | {"__reduce__": "os.system"}),
    "body too short": file_of(body=bytes(8)),
    "body too long": file_of(body=bytes(16)),
    "NaN in the direction": file_of(body=bytes(numbers(1, np.nan, 3))),
    "infinity in the direction": file_of(body=bytes(numbers(1, np.inf, 3))),
    "all zeros": file_of(body=bytes(12)),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a zip": b"PK\x03\x04" + bytes(100),
    "over the cap": bytes(files.MAX_PROBE_NBYTES + 1),
}  # fmt: skip


@pytest.mark.parametrize("data", SPOILED.values(), ids=SPOILED.keys())
def test_a_spoiled_safetensors_file_is_refused(data: bytes) -> None:
    assert outcome(loads, data) is None


SPOILED_JSON = {
    "empty": b"",
    "a list": b"[1]",
    "no vector": b"{}",
    "vector is null": b'{"vector": null}',
    "vector is empty": b'{"vector": []}',
    "vector is a word": b'{"vector": "1,2,3"}',
    "vector is an object": b'{"vector": {"0": 1}}',
    "NaN": b'{"vector": [NaN]}',
    "NaN in a key nobody reads": b'{"vector": [1], "x": NaN}',
    "Infinity": b'{"vector": [1, -Infinity]}',
    "infinite by size": b'{"vector": [1e999]}',
    "beyond float32": b'{"vector": [1e39]}',
    "an integer beyond float64": b'{"vector": [' + b"9" * 400 + b"]}",
    "an integer of 5000 digits": b'{"vector": [' + b"9" * 5000 + b"]}",
    "null inside": b'{"vector": [1, null]}',
    "true inside": b'{"vector": [1, true]}',
    "a word inside": b'{"vector": [1, "2"]}',
    "nested vector": b'{"vector": [[1, 2]]}',
    "all zeros": b'{"vector": [0, 0.0, 1e-60]}',
    "vector twice": b'{"vector": [1], "vector": [2]}',
    "key twice, deep": b'{"vector": [1], "x": {"y": 1, "y": 2}}',
    "nested 100000 deep": b'{"vector": ' + b"[" * 100_000,
    "nested 100000 deep, closed": b'{"vector": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects 100000 deep": b'{"a":' * 100_000,
    "too wide": b'{"vector": [' + b"1," * MAX_WIDTH + b"1]}",
    "not UTF-8": b'{"vector": [1], "\xff": 1}',
    "UTF-16": '{"vector": [1]}'.encode("utf-16"),
    "lone surrogate as a name": b'{"vector": [1], "name": "\\ud800"}',
    "name with a path": b'{"vector": [1], "name": "../x"}',
    "name is a list": b'{"vector": [1], "name": ["x"]}',
    "bias is a word": b'{"vector": [1], "bias": "1"}',
    "bias is a list": b'{"vector": [1], "bias": [1]}',
    "bias is huge": b'{"vector": [1], "bias": ' + b"9" * 4000 + b"}",
    "threshold is true": b'{"vector": [1], "threshold": true}',
    "activation is an object": b'{"vector": [1], "activation": {}}',
    "trailing words": b'{"vector": [1]} x',
    "over the cap": b" " * (files.MAX_JSON_NBYTES + 1),
}


@pytest.mark.parametrize("data", SPOILED_JSON.values(), ids=SPOILED_JSON.keys())
def test_a_spoiled_json_file_is_refused(data: bytes) -> None:
    assert outcome(loads_json, data) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
json_fields = st.fixed_dictionaries(
    {"vector": st.lists(st.floats(width=32), max_size=4) | json_values},
    optional=dict.fromkeys(("bias", "name", "threshold", "activation", "x"), json_values),
)


@settings(max_examples=300, deadline=None)
@given(json_fields)
def test_any_json_of_any_types_is_a_probe_or_a_refusal(fields: dict[str, object]) -> None:
    outcome(loads_json, json.dumps(fields).encode())


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, *OPTIONAL]), json_values))
def test_any_metadata_of_any_types_is_a_probe_or_a_refusal(fields: dict[str, object]) -> None:
    outcome(loads, with_fields(fields))


def test_a_promised_size_is_not_allocated() -> None:
    data = file_of(TENSOR | {"shape": [MAX_WIDTH], "data_offsets": [0, 4 * MAX_WIDTH]})
    tracemalloc.start()
    assert outcome(loads, data) is None
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_nbytes < 1 << 20
