"""Probe files and vector files: safetensors, GGUF and JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import safetensors

from clairai.errors import VectorError
from clairai.points import Point, expand
from clairai.probe import files as probe_files
from clairai.probe.file_format import METADATA, pack_file
from clairai.vector import files as vector_files
from clairai.vector import gguf_format
from clairai.wire.control_messages import Histogram
from tests.fuzz.spans import JSON_VALUES, json_spans
from tests.fuzz.target import Target, grow_prefix
from tests.support.probes import numbers, probe
from tests.support.vectors import vector

SOURCE = "enc_3_name.json"
LAYERS = 12


def targets() -> list[Target]:
    shared: dict[str, Any] = {"find_spans": json_spans, "values": JSON_VALUES}
    framed = shared | {"repair": grow_prefix(8)}
    return [
        Target("probe_safetensors", parse_probe, _probes(), share=3.0, **framed),
        Target("probe_json", parse_json_probe, _json_probes(), share=3.0, **shared),
        Target("vector_safetensors", parse_vector, _vectors(), share=3.0, **framed),
        Target("vector_json", parse_vector, _json_vectors(), share=3.0, **shared),
        Target("vector_gguf", parse_gguf, _gguf_vectors(), share=4.0),
        Target("points", parse_points, [b"post_block.0-3,5 all", b"pre_attn.*"], share=4.0),
    ]


def _probes() -> list[bytes]:
    full = probe(
        bias=-0.5,
        activation="sigmoid",
        threshold=0.25,
        calibration=(-1.0, 2.5),
        model="org/m",
        description="says so",
        auroc=0.75,
        histogram=Histogram(-1.0, 1.0, (0, 1, 2, 3, 4, 5, 6, 7)),
    )
    half = {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}
    metadata = {"clairai": "probe/1", "name": "p", "point": "resid_post.3"}
    packed = pack_file({METADATA: metadata, "direction": half}, b"\x80\x3f" * 3)
    return [probe_files.dumps(probe()), probe_files.dumps(full), packed]


def _json_probes() -> list[bytes]:
    full = {"vector": [0.5, -1, 2e-3], "bias": 0.5, "name": "p", "threshold": 1, "x": None}
    return [json.dumps(full | {"activation": "relu"}).encode(), b'{"vector": [1]}']


def _vectors() -> list[bytes]:
    full = vector(description="d", model="org/m", method="mean", scale=2.5)
    return [vector_files.dumps(vector()), vector_files.dumps(full)]


def _json_vectors() -> list[bytes]:
    scaled = {"post_block": {"15": [0.1, 0.2]}, "pre_attn": {"3": {"vector": [0.5, 1], "scale": 2}}}
    return [json.dumps(scaled).encode(), b'{"resid_mid": {"0": [1, 2, 3]}}']


def _gguf_vectors() -> list[bytes]:
    rows = {Point("post_block", layer): numbers(1, -2, layer) for layer in (1, 2, 7)}
    plain = gguf_format.dumps(vector(rows=rows, model="m", description="d"))
    keys = gguf_format._pack_text("general.alignment") + struct.pack("<II", 4, 8)
    keys += gguf_format._pack_text("list") + struct.pack("<IIQ", 9, 8, 2)
    keys += gguf_format._pack_text("a") + gguf_format._pack_text("b")
    keys += gguf_format._pack_text("numbers") + struct.pack("<IIQ3I", 9, 5, 3, 1, 2, 3)
    tensor = gguf_format._pack_text("direction.3") + struct.pack("<IQIQ", 1, 4, 1, 0)
    head = b"GGUF" + struct.pack("<IQQ", 2, 1, 3) + keys + tensor
    half = head + bytes(-len(head) % 8) + numbers(1, 2, 3, 4).astype(np.float16).tobytes()
    return [plain, half]


def parse_probe(data: bytes) -> None:
    """What is accepted equals what the safetensors library reads, and survives being saved."""
    found = probe_files.loads(data, source="x")
    saved = probe_files.dumps(found)
    again = probe_files.loads(saved, source="x")
    assert again == found
    assert probe_files.dumps(again) == saved
    ((name, tensor),) = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    assert (name, tensor["shape"]) == ("direction", [found.width])


def parse_json_probe(data: bytes) -> None:
    found = probe_files.loads_json(data, source=SOURCE)
    assert probe_files.loads(probe_files.dumps(found), source="x") == found


def parse_vector(data: bytes) -> None:
    found = vector_files.loads(data, source="v.json")
    saved = vector_files.dumps(found)
    again = vector_files.loads(saved, source="v")
    assert (again.name, again.digest, again.scale) == (found.name, found.digest, found.scale)
    assert vector_files.dumps(again) == saved


def parse_gguf(data: bytes) -> None:
    found = vector_files.loads(data, source="v.gguf")
    try:
        written = gguf_format.dumps(found)
    except VectorError:  # block 0 has no place in a control vector
        return
    again = gguf_format.loads(written, source="v.gguf", name=found.name)
    assert again.points == found.points
    for point in found.points:
        assert np.array_equal(again.rows[point], found.rows[point])


def parse_points(data: bytes) -> None:
    """Patterns name points of the model, sorted, each once; a point's name parses as itself."""
    found = expand(data.decode(errors="replace").split(" "), LAYERS)
    assert list(found) == sorted(set(found))
    assert all(Point.parse(str(point)) == point and point.layer < LAYERS for point in found)
