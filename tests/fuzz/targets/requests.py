"""The `clairai` field of a request, as the caller, the proxy, the server and the core read it."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np

import clairai
from clairai.fields.packed_vector import PackedVector
from clairai.fields.positions import absolute_ranges
from clairai.fields.request_fields import KEY, RequestFields, parse_fields
from tests.fuzz.spans import JSON_VALUES, json_spans
from tests.fuzz.target import Target

WIDTH, PROMPT_LEN = 4, 17


def targets() -> list[Target]:
    return [
        Target(
            *("request_fields", parse_request_fields, _fields()),
            find_spans=json_spans,
            values=JSON_VALUES,
            share=4.0,
        )
    ]


def _row(dtype: str = "<f4") -> str:
    return base64.b64encode(np.array([1, -2, 0.5, 3], dtype).tobytes()).decode()


def asked_objects() -> list[dict[str, Any]]:
    """The `clairai` object of requests that ask for everything there is."""
    when = {"phase": "generation", "positions": [[0, 5], [9, None]], "skip_special": True}
    gate = {"probe": "calm", "threshold": 0.5, "sharpness": 2.0, "latch": False}
    inline = {"dtype": "f32", "points": {"post_block.1": _row(), "resid_pre.0": _row()}}
    entries = [
        {"vector": "happy", "scale": 2.5, "op": "add", "match_norm": True, "when": "prompt"},
        {"vector": inline, "op": "clamp", "low": -1.0, "high": 1.5, "when": when},
        {"vector": "sad", "points": ["post_block.1"], "digest": "0" * 64, "gate": gate},
        {"vector": {"dtype": "bf16", "points": {"post_attn.3": _row("<f2")}}, "op": "ablate"},
    ]
    hysteresis = {"probe": "calm", "release": -0.5}
    rules = [
        {"probe": "calm", "threshold": 0.25, "tokens": 3, "action": "stop"},
        {"probe": "calm", "action": "steer", "steer": [{"vector": "v", "gate": hysteresis}]},
    ]
    capture = {
        "points": ["post_block.*", "all"],
        "positions": ["prompt", {"from": -3, "to": -1}, {"message": 0}],
        "encoder": {"name": "topk8", "k": 8},
        "to": ["fs"],
        "tags": {"run": 1, "deep": {"a": [None, "x"]}},
    }
    return [
        {"prompt_scores": True, "steer": entries, "stop": rules, "capture": capture},
        {"steer": entries[:1], "capture": True},
        {"capture": {"positions": "last_prompt", "encoder": "rp8"}},
        {},
    ]


def steering_vectors() -> dict[str, Any]:
    rows = {"15": [0.1, 0.2, 0.3, 0.4], "3": {"vector": [1, 2, 3, 4], "scale": 2.0}}
    packed = {"vector": {"dtype": "float16", "data": _row("<f2")}, "scale": 0.5}
    layers = {"dtype": "float32", "shape": [1, WIDTH], "layer_indices": [2], "data": _row()}
    return {"post_block": rows | {"4": packed}, "pre_attn": layers | {"scales": [1.5]}}


def plain_body() -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "m", "messages": messages, "n": 2, "stream": True, "max_tokens": 5}


def dump(value: object) -> bytes:
    return json.dumps(value).encode()


def _fields() -> list[bytes]:
    everything = [dump({KEY: {"stream": 5, **asked}}) for asked in asked_objects()]
    both = clairai.request(stream=9, steer=[{"vector": "v"}]) | {
        "steering_vectors": steering_vectors()
    }
    return [*everything, dump(both), dump({"decode_steering_vectors": steering_vectors(), KEY: {}})]


def parse_request_fields(data: bytes) -> None:
    """What is accepted is written in one form, and that form reads as itself."""
    try:
        given = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        given = data.decode(errors="replace")  # as text, which the product decodes itself
    fields = parse_fields(given if isinstance(given, dict) else {KEY: given})
    form = {KEY: fields.to_json()}
    again = parse_fields({KEY: json.dumps(form[KEY], allow_nan=False)})
    assert again.to_json() == form[KEY]
    _resolve(fields)


def _resolve(fields: RequestFields) -> None:
    """As the engine core does for a prompt of PROMPT_LEN tokens."""
    for entry in fields.steer:
        for first, end in entry.when.ranges(PROMPT_LEN):
            assert 0 <= first < end
        if isinstance(entry.vector, PackedVector):
            entry.vector.unpack(WIDTH, what="steer")
    if fields.capture is not None and fields.capture.positions is not None:
        ranges = absolute_ranges(fields.capture.positions, PROMPT_LEN)
        assert all(0 <= first < end for first, end in ranges)
