"""Hostile manifests over HTTP, numbered: each is refused, and the engine lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clairai.weights.manifest import MAX_I64, MAX_MANIFEST_BYTES, Manifest, encode_manifest
from tests.support.weights import altered
from tests.support.weights_target import Target, target


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Target]:
    with target(tmp_path) as made:
        yield made


def _swap(raw: bytes, old: bytes, new: bytes) -> bytes:
    assert old in raw
    return raw.replace(old, new, 1)


def _set(manifest: Manifest, **fields: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


# Attempts on the manifest, over HTTP: each gives a body, and part of the reason it is refused with.
Body = Callable[[Manifest], bytes]
MANIFESTS: dict[str, tuple[Body, str]] = {
    "01 a pickle in place of JSON": (
        lambda _: b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system",
        "no manifest",
    ),
    "02 vLLM's own pickled handles": (
        lambda m: _swap(
            encode_manifest(m), b'{"version"', b'{"ipc_handles_pickled":"gASV","version"'
        ),
        "unknown field",
    ),
    "03 a name the engine does not have": (
        lambda m: encode_manifest(altered(m, 0, name="model.backdoor")),
        "nothing named",
    ),
    "04 a path in a name": (
        lambda m: encode_manifest(altered(m, 0, name="../../../etc/passwd")),
        "cannot name",
    ),
    "05 a zero byte in a name": (
        lambda m: encode_manifest(altered(m, 0, name="a\0b")),
        "cannot name",
    ),
    "06 another shape": (lambda m: encode_manifest(altered(m, 0, shape=(51, 16))), "has shape"),
    "07 another type": (lambda m: encode_manifest(altered(m, 0, dtype="F64")), "has dtype"),
    "08 a type that is code": (
        lambda m: _swap(encode_manifest(m), b'"F32"', b'"torch.load"'),
        "no manifest",
    ),
    "09 two tensors that overlap": (
        lambda m: encode_manifest(altered(m, 1, offset=256)),
        "overlaps",
    ),
    "10 a hole to read neighbours by": (
        lambda m: encode_manifest(altered(m, 1, offset=8192)),
        "hole",
    ),
    "11 an offset past 64 bits": (
        lambda m: _swap(encode_manifest(m), b'"offset":0', b'"offset":%d' % (1 << 64)),
        "no manifest",
    ),
    "12 an offset at the end of 64 bits": (
        lambda m: encode_manifest(altered(m, 1, offset=MAX_I64 - 1023)),
        "hole",
    ),
    "13 a negative offset": (
        lambda m: _swap(encode_manifest(m), b'"offset":0', b'"offset":-256'),
        "no manifest",
    ),
    "14 a buffer of 2 TiB": (lambda m: encode_manifest(_set(m, buffers=(1 << 41,))), "all that"),
    "15 a buffer that shares its block": (
        lambda m: encode_manifest(_set(m, buffers=(4096,))),
        "multiple",
    ),
    "16 the buffers of another GPU": (
        lambda m: encode_manifest(_set(m, device="f" * 32)),
        "on GPU",
    ),
    "17 the epoch of an engine before": (
        lambda m: encode_manifest(_set(m, epoch="0" * 16)),
        "restarted",
    ),
    "18 one name twice": (
        lambda m: encode_manifest(_set(m, tensors=(m.tensors[0], *m.tensors[:3]))),
        "twice",
    ),
    "19 a part of a layer": (
        lambda m: encode_manifest(_set(m, tensors=m.tensors[:2])),
        "are missing",
    ),
    "20 a hundred thousand tensors": (
        lambda m: encode_manifest(_set(m, tensors=m.tensors * 25_000)),
        "the engine takes",
    ),
    "21 brackets a million deep": (lambda _: b'{"tensors":' + b"[" * 1_000_000, "no manifest"),
    "22 objects a million deep": (lambda _: b'{"a":' * 1_000_000, "no manifest"),
    "23 a body without an end": (lambda _: b" " * (MAX_MANIFEST_BYTES + 1), "over"),
    "24 not a number": (
        lambda m: _swap(encode_manifest(m), b'"offset":0', b'"offset":NaN'),
        "no manifest",
    ),
    "25 a label that breaks out of a log line": (
        lambda m: _swap(encode_manifest(m), b'"label":""', b'"label":"a\\nroot logged in"'),
        "no manifest",
    ),
}


@pytest.mark.parametrize("attempt", MANIFESTS)
@pytest.mark.parametrize("route", ["check", "plan", "commit"])
def test_a_manifest_is_refused(attacked: Target, attempt: str, route: str) -> None:
    make, reason = MANIFESTS[attempt]
    refusal = attacked.post(route, make(attacked.plan()))
    assert reason in refusal
    assert len(refusal) < 600
    assert "Traceback" not in refusal
    assert str(attacked.folder) not in refusal
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()
