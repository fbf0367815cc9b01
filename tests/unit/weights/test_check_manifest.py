"""Manifests, good, broken and random: each is accepted, or refused with one reason."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clairai.errors import WeightsError
from clairai.weights.check_manifest import (
    EngineTensors,
    ExpectedTensor,
    check_checksums,
    check_extents,
    check_matches_plan,
    check_plan,
    tensor_nbytes,
)
from clairai.weights.manifest import (
    GRANULE_BYTES,
    MAX_I64,
    MAX_MANIFEST_BYTES,
    Manifest,
    PlannedTensor,
    content_digest,
    encode_manifest,
    kind_of,
    parse_manifest,
)
from clairai.weights.pack import TensorSpec
from tests.support.weights import SHAPES, altered, engine_tensors, plan

SUM = "0123456789abcdef"
STEADY = settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
)


def summed(manifest: Manifest) -> Manifest:
    tensors = tuple(msgspec.structs.replace(t, checksum=SUM) for t in manifest.tensors)
    return msgspec.structs.replace(manifest, tensors=tensors)


def test_a_good_plan_passes_and_survives_its_own_json() -> None:
    manifest = plan()
    check_plan(manifest, engine_tensors())
    assert parse_manifest(encode_manifest(manifest)) == manifest


def _swapped(manifest: Manifest) -> Manifest:
    first, second, *rest = manifest.tensors
    return msgspec.structs.replace(manifest, tensors=(second, first, *rest))


def _with(**fields: Any) -> Manifest:
    return msgspec.structs.replace(plan(), **fields)


def _twice(manifest: Manifest) -> Manifest:
    first, _, *rest = manifest.tensors
    return msgspec.structs.replace(manifest, tensors=(first, first, *rest))


REFUSED: dict[str, tuple[Manifest, str]] = {
    "an unknown name": (altered(plan(), 0, name="model.other"), "nothing named"),
    "a wrong shape": (altered(plan(), 1, shape=(16, 15)), "has shape"),
    "a transposed shape": (altered(plan(), 0, shape=(16, 50)), "has shape"),
    "a wrong type": (altered(plan(), 1, dtype="F64"), "has dtype"),
    "other bytes than its shape": (altered(plan(), 1, nbytes=1023), "its shape has"),
    "an overlap": (altered(plan(), 1, offset=3072), "overlaps"),
    "a hole": (altered(plan(), 1, offset=3584), "leaves a hole"),
    "an offset at the end of 64 bits": (altered(plan(), 1, offset=MAX_I64), "leaves a hole"),
    "an order that runs back": (_swapped(plan()), "leaves a hole"),
    "a buffer that is not there": (altered(plan(), 3, buffer=1), "fill each buffer"),
    "a buffer that nobody uses": (_with(buffers=(GRANULE_BYTES,) * 2), "fill each buffer"),
    "a buffer of half a granule": (_with(buffers=(GRANULE_BYTES // 2,)), "multiple of"),
    "an empty buffer": (_with(buffers=(0,)), "multiple of"),
    "a buffer far too large": (_with(buffers=(GRANULE_BYTES << 20,)), "all that this engine"),
    "a buffer one granule too large": (_with(buffers=(2 * GRANULE_BYTES,)), "its tensors end at"),
    "another epoch": (plan(epoch="00000000000000ab"), "it has restarted"),
    "another GPU": (plan(device="a" * 32), "on GPU"),
    "one name twice": (_twice(plan()), "is there twice"),
    "no tensor at all": (_with(tensors=(), buffers=()), "names no tensor"),
    "a part of the model": (plan([TensorSpec("model.layers.0.b", "F32", (16,))]), "are missing"),
    "a path for a name": (altered(plan(), 0, name="../../etc/passwd"), "cannot name"),
    "an absolute path": (altered(plan(), 0, name="/etc/passwd"), "cannot name"),
    "a name with a zero byte": (altered(plan(), 0, name="model\0x"), "cannot name"),
    "more tensors than there are": (
        plan([TensorSpec(name, "F32", shape) for name, shape in SHAPES.items()] * 2),
        "tensors, and the engine takes",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_is_refused_with_the_reason(what: str) -> None:
    manifest, reason = REFUSED[what]
    with pytest.raises(WeightsError, match=reason):
        check_plan(manifest, engine_tensors())


def test_the_product_of_a_shape_may_not_leave_64_bits() -> None:
    shape = (1 << 40, 1 << 40)
    with pytest.raises(WeightsError, match="64 bits"):
        tensor_nbytes(shape, "F32")
    assert tensor_nbytes((1 << 40, 1 << 20), "F32") == 1 << 62


def test_a_commit_is_its_plan_with_checksums_and_nothing_else() -> None:
    planned = plan()
    check_matches_plan(summed(planned), planned)
    for other, reason in (
        (planned, "has no checksum"),
        (altered(summed(planned), 2, offset=0), "not where the plan has it"),
        (msgspec.structs.replace(summed(planned), transfer="0" * 32), "not the one"),
        (msgspec.structs.replace(summed(planned), tensors=summed(planned).tensors[:2]), "not the"),
    ):
        with pytest.raises(WeightsError, match=reason):
            check_matches_plan(other, planned)


def test_the_drivers_size_counts_and_not_the_claimed_one() -> None:
    manifest = plan()
    check_extents(manifest, [GRANULE_BYTES])
    with pytest.raises(WeightsError, match="do not trust"):
        check_extents(manifest, [GRANULE_BYTES - 1])
    with pytest.raises(WeightsError, match="0 of 1 buffers"):
        check_extents(manifest, [])


def test_one_wrong_checksum_refuses_all() -> None:
    manifest = summed(plan())
    found = dict.fromkeys(SHAPES, SUM)
    check_checksums(manifest, found)
    for wrong in (found | {"model.norm.weight": "0" * 16}, {}):
        with pytest.raises(WeightsError, match="another checksum"):
            check_checksums(manifest, wrong)


def test_the_digest_is_of_the_content_and_not_of_the_packing() -> None:
    tensors = summed(plan()).tensors
    assert content_digest(tensors) == content_digest(tuple(reversed(tensors)))
    assert content_digest(tensors) != content_digest(
        altered(summed(plan()), 0, checksum="0" * 16).tensors
    )


def test_a_name_says_what_kind_it_is() -> None:
    assert [kind_of(n) for n in ("probe::a", "steer::b", "model.w")] == ["probe", "steer", "model"]


# Fuzzing: whatever comes in, the parser returns a Manifest or raises WeightsError.

HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "not JSON": b"\x80\x04\x95pickle",
    "not UTF-8": b'{"version": 1, "transfer": "\xff\xfe"}',
    "another version": encode_manifest(plan()).replace(b'"version":1', b'"version":2'),
    "a field too many": encode_manifest(plan()).replace(b'{"version"', b'{"code":"x","version"'),
    "a negative size": encode_manifest(plan()).replace(b'"offset":0', b'"offset":-1', 1),
    "a size over 64 bits": encode_manifest(plan()).replace(
        b'"offset":0', b'"offset":' + b"9" * 40, 1
    ),
    "a float for a size": encode_manifest(plan()).replace(b'"offset":0', b'"offset":0.5', 1),
    "a boolean for a size": encode_manifest(plan()).replace(b'"offset":0', b'"offset":false', 1),
    "a shape of 9 dimensions": encode_manifest(plan()).replace(
        b"[50,16]", b"[" + b"1," * 8 + b"1]"
    ),
    "very deep nesting": b'{"tensors":' + b"[" * 200_000,
    "very deep nesting elsewhere": b'{"label":' + b'{"a":' * 200_000,
    "a shape that is deep": encode_manifest(plan()).replace(b"[50,16]", b"[" * 100_000),
    "a very long name": encode_manifest(plan()).replace(b"model.norm.weight", b"n" * 10_000),
    "a label that is a path": encode_manifest(plan()).replace(b'"label":""', b'"label":"a\\nb"'),
    "a transfer with a line after it": encode_manifest(plan()).replace(
        b'","epoch"', b'\\n","epoch"'
    ),
    "too many buffers": encode_manifest(plan()).replace(
        b'"buffers":[', b'"buffers":[' + b"2097152," * 5000
    ),
    "more bytes than a manifest has": encode_manifest(plan()) + b" " * MAX_MANIFEST_BYTES,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_one_short_reason(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError) as caught:
            parse_manifest(HOSTILE[what])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(caught.value.reason) < 500
    assert peak < 2 * len(HOSTILE[what]) + (16 << 20)


def test_a_million_tensors_are_refused_while_they_are_counted() -> None:
    one = msgspec.json.encode(plan().tensors[0])
    raw = encode_manifest(plan()).replace(b'"tensors":[', b'"tensors":[' + (one + b",") * 190_000)
    assert len(raw) < MAX_MANIFEST_BYTES
    with pytest.raises(WeightsError, match="no manifest"):
        parse_manifest(raw)


@STEADY
@given(st.binary(max_size=400))
def test_no_bytes_crash_the_parser(raw: bytes) -> None:
    assert len(reason_of(raw)) < 500


def reason_of(raw: bytes) -> str:
    try:
        check_plan(parse_manifest(raw), engine_tensors())
    except WeightsError as error:
        return error.reason
    return ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab/.:\0", max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner),
    max_leaves=12,
)


@STEADY
@given(
    st.dictionaries(st.sampled_from(Manifest.__struct_fields__), JSON),
    st.lists(st.dictionaries(st.sampled_from(PlannedTensor.__struct_fields__), JSON), max_size=3),
)
def test_no_json_crashes_the_parser(fields: dict[str, Any], tensors: list[Any]) -> None:
    good = msgspec.to_builtins(plan())
    raw = msgspec.json.encode(good | fields | {"tensors": [*good["tensors"], *tensors]})
    assert len(reason_of(raw)) < 500


NUMBERS = st.integers(-(2**65), 2**65) | st.sampled_from([0, 1, 255, 256, 2**31, 2**63, 2**64])


@STEADY
@given(st.integers(0, 3), st.sampled_from(["buffer", "offset", "nbytes", "shape"]), NUMBERS)
def test_no_number_slips_through(index: int, field: str, number: int) -> None:
    """Any other value of one number is refused."""
    good = msgspec.to_builtins(plan())
    good["tensors"][index][field] = [number] if field == "shape" else number
    try:
        manifest = parse_manifest(msgspec.json.encode(good))
        check_plan(manifest, engine_tensors())
    except WeightsError:
        return
    assert manifest.tensors == plan().tensors


DESCRIBED = st.lists(
    st.tuples(
        st.sampled_from(["F32", "BF16", "I8"]), st.lists(st.integers(0, 700), max_size=3).map(tuple)
    ),
    min_size=1,
    max_size=12,
)


@STEADY
@given(DESCRIBED, st.sampled_from([1, GRANULE_BYTES, 5 * GRANULE_BYTES]))
def test_every_plan_of_plan_buffers_is_accepted(
    shapes: list[tuple[str, tuple[int, ...]]], buffer_bytes: int
) -> None:
    described = [TensorSpec(f"w{index}", *each) for index, each in enumerate(shapes)]
    expected = {name: ExpectedTensor((dtype,), shape) for name, dtype, shape in described}
    manifest = plan(described, buffer_bytes=buffer_bytes)
    largest = sum(tensor_nbytes(shape, dtype) for _, dtype, shape in described)
    check_plan(manifest, EngineTensors(manifest.epoch, "cpu", expected))
    assert sum(tensor.nbytes for tensor in manifest.tensors) == largest
