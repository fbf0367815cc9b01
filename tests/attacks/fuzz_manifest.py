"""Fuzz the parsers of manifests and of buffer offers with atheris.

The result is a Manifest or a WeightsError and nothing else, and memory stays bounded. Not part of
the suite: it runs for a given time and needs the package atheris.
Run: python -m tests.attacks.fuzz_manifest -max_total_time=300 -rss_limit_mb=2048
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import atheris

with atheris.instrument_imports(include=["clairai.weights"]):
    from clairai.weights import check_manifest, manifest, socket_server

from clairai.errors import WeightsError
from clairai.weights.check_manifest import EngineTensors, ExpectedTensor

EXPECTED = {
    "model.w": ExpectedTensor(("F32", "BF16"), (16, 16)),
    "probe::p": ExpectedTensor(("F32",), (8,)),
}
ENGINE = EngineTensors("00000000000000aa", "cpu", EXPECTED)
GOOD = manifest.encode_manifest(
    manifest.Manifest(
        version=1,
        transfer="0" * 32,
        epoch="00000000000000aa",
        device="cpu",
        buffers=(manifest.GRANULE_BYTES,),
        tensors=(manifest.PlannedTensor("model.w", "F32", (16, 16), 0, 0, 1024),),
    )
)


def one(raw: bytes) -> None:
    """Raw bytes, then the same bytes as a change of a good manifest, then as a frame's body."""
    provider = atheris.FuzzedDataProvider(raw)
    at = provider.ConsumeIntInRange(0, len(GOOD))
    cut = provider.ConsumeIntInRange(0, 12)
    given = provider.ConsumeBytes(1 << 16)
    for text in (raw, GOOD[:at] + given + GOOD[at + cut :]):
        bounded(partial(planned, text))
    bounded(partial(socket_server._FROM_SENDER.decode, raw))


def planned(text: bytes) -> None:
    check_manifest.check_plan(manifest.parse_manifest(text), ENGINE)


def bounded(parse: Callable[[], object]) -> None:
    reason = ""
    try:
        parse()
    except WeightsError as error:
        reason = error.reason
    assert len(reason) < 600


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
