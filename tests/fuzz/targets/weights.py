"""New weights as a trainer sends them: the manifest, and the safetensors file of a buffer."""

from __future__ import annotations

from functools import cache

import msgspec

from clairai.errors import WeightsError
from clairai.weights.check_manifest import (
    EngineTensors,
    ExpectedTensor,
    check_matches_plan,
    check_plan,
)
from clairai.weights.manifest import CPU, Manifest, content_digest, encode_manifest, parse_manifest
from clairai.weights.pack import TensorSpec, plan_buffers
from clairai.weights.upload import SafetensorsUpload, safetensors_header
from tests.fuzz.spans import JSON_VALUES, json_spans
from tests.fuzz.target import Target, grow_prefix

EPOCH = "00000000000000aa"
EXPECTED = {
    "model.w": ExpectedTensor(("F32", "BF16"), (4, 2)),
    "model.b": ExpectedTensor(("F32",), (2,)),
    "probe::p": ExpectedTensor(("F32",), (8,)),
}
ENGINE = EngineTensors(EPOCH, CPU, EXPECTED)


def targets() -> list[Target]:
    plan = _plan()
    packed = [msgspec.structs.replace(tensor, checksum="0" * 16) for tensor in plan.tensors]
    commit = msgspec.structs.replace(plan, tensors=tuple(packed), label="step/5")
    seeds = [encode_manifest(plan), encode_manifest(commit)]
    body = bytes(range(sum(tensor.nbytes for tensor in plan.tensors)))
    return [
        Target(
            *("weights_manifest", parse_weights_manifest, seeds, (WeightsError,), json_spans),
            values=JSON_VALUES,
            share=3.0,
        ),
        Target(
            *("weights_upload", parse_upload, [safetensors_header(plan.tensors) + body]),
            *((WeightsError,), json_spans),
            values=JSON_VALUES,
            repair=grow_prefix(8),
            share=0.03,
        ),
    ]


@cache
def _plan() -> Manifest:
    described = [TensorSpec(name, "F32", one.shape) for name, one in EXPECTED.items()]
    return plan_buffers(described, transfer="0" * 32, epoch=EPOCH, device=CPU)


def parse_weights_manifest(data: bytes) -> None:
    """What is accepted fits the engine, and reads as the same once it is written again."""
    manifest = parse_manifest(data)
    assert parse_manifest(encode_manifest(manifest)) == manifest
    check_plan(manifest, ENGINE)
    assert sum(manifest.buffers) <= ENGINE.max_nbytes
    assert len(content_digest(manifest.tensors)) == 32
    check_matches_plan(manifest, _plan())


def parse_upload(data: bytes) -> None:
    """A file that is accepted has the plan's tensors, however its bytes arrive."""
    plan = _plan()
    step = 1 + len(data) % 50
    upload = SafetensorsUpload(0, plan.tensors, plan.buffers[0])
    try:
        for at in range(0, len(data), step):
            upload.feed(data[at : at + step])
        buffer = upload.finish()
        assert buffer.nbytes == plan.buffers[0]
    finally:
        upload.close()
