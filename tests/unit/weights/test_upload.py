"""A safetensors file in pieces of any size fills a buffer of the plan, or is refused."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as read_file
from safetensors.torch import save as as_file

from clairai.errors import WeightsError
from clairai.weights.manifest import Manifest
from clairai.weights.upload import MAX_UPLOAD_HEADER_BYTES, SafetensorsUpload, safetensors_header
from tests.support.footprint import nothing_left_behind
from tests.support.weights import plan, weights


def file_of(manifest: Manifest, held: dict[str, torch.Tensor]) -> bytes:
    numbers = b"".join(held[tensor.name].numpy().tobytes() for tensor in manifest.tensors)
    return safetensors_header(manifest.tensors) + numbers


def spool(manifest: Manifest) -> SafetensorsUpload:
    return SafetensorsUpload(0, manifest.tensors, manifest.buffers[0])


def found_in(made: SafetensorsUpload, manifest: Manifest) -> dict[str, bytes]:
    raw = os.pread(made.finish().fd, manifest.buffers[0], 0)
    return {t.name: raw[t.offset : t.offset + t.nbytes] for t in manifest.tensors}


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_however_it_is_cut_every_tensor_is_where_the_plan_has_it(cuts: list[int]) -> None:
    manifest, held = plan(), weights(3)
    raw = file_of(manifest, held)
    made = spool(manifest)
    start = 0
    for count in cuts:
        made.feed(raw[start : start + count])
        start += count
    made.feed(raw[start:])
    expected = {name: tensor.numpy().tobytes() for name, tensor in held.items()}
    assert found_in(made, manifest) == expected
    made.close()


def test_it_is_a_file_as_safetensors_itself_reads_it() -> None:
    manifest, held = plan(), weights(4)
    read = read_file(file_of(manifest, held))
    assert read.keys() == held.keys()
    assert all(torch.equal(read[name], held[name]) for name in held)


def test_a_file_that_safetensors_wrote_is_taken_if_it_is_in_the_plans_order() -> None:
    name = "model.embed.weight"
    manifest, held = plan(), {name: weights(5)[name]}
    tensors = manifest.tensors[:1]
    made = SafetensorsUpload(0, tensors, manifest.buffers[0])
    made.feed(as_file(held, metadata={"format": "pt"}))
    assert os.pread(made.finish().fd, tensors[0].nbytes, 0) == held[name].numpy().tobytes()
    made.close()


def _wrong() -> dict[str, tuple[bytes, str]]:
    manifest, held = plan(), weights(6)
    good = file_of(manifest, held)
    begin = len(safetensors_header(manifest.tensors))
    renamed = good.replace(b"model.layers.0.b", b"model.layers.0.c")
    return {
        "too short": (good[:-1], "ends 1 bytes"),
        "without numbers": (good[:begin], "early"),
        "half a head": (good[: begin - 1], "early"),
        "nothing": (b"", "early"),
        "too long": (good + b"x", "goes on after its last tensor"),
        "another name": (renamed, "does not hold the plan's tensors"),
        "another type": (good.replace(b'"F32"', b'"I32"', 1), "does not hold"),
        "in another order": (as_file(held), "does not hold"),
        "no JSON": ((3).to_bytes(8, "little") + b"x{}", "no safetensors"),
        "unknown fields": ((22).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}  ', "safetensors"),
        "a head too long": ((MAX_UPLOAD_HEADER_BYTES + 1).to_bytes(8, "little"), "may have"),
        "deep": ((100_000).to_bytes(8, "little") + b"[" * 100_000, "no safetensors"),
    }


WRONG = _wrong()


@pytest.mark.parametrize("kind", WRONG)
def test_any_other_file_is_refused_and_nothing_is_kept(kind: str) -> None:
    raw, reason = WRONG[kind]
    with nothing_left_behind():
        made = spool(plan())
        with pytest.raises(WeightsError, match=reason):
            _whole(made, raw)
        made.close()


def _whole(made: SafetensorsUpload, raw: bytes) -> None:
    made.feed(raw)
    made.finish()
