"""False uploads of weights, numbered: each is refused, others are served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import WeightsError
from clairai.weights.manifest import Manifest, encode_manifest
from clairai.weights.upload import MAX_UPLOAD_HEADER_BYTES, SafetensorsUpload, safetensors_header
from tests.support.footprint import nothing_left_behind
from tests.support.weights import plan, weights
from tests.support.weights_target import Target, target

OTHER = "f" * 32


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Target]:
    with target(tmp_path) as made:
        yield made


def put(attacked: Target, name: str, body: bytes) -> str:
    answer = attacked.client.put(f"/v1/weights/buffers/{name}", content=body)
    if answer.status_code == 204:
        return ""
    assert answer.status_code in (400, 404, 408), answer.text
    return answer.text


def honest(manifest: Manifest, seed: int = 1) -> bytes:
    held = weights(seed)
    numbers = (held[tensor.name].numpy().tobytes() for tensor in manifest.tensors)
    return safetensors_header(manifest.tensors) + b"".join(numbers)


def _headed(entries: object, numbers: bytes = b"") -> bytes:
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + numbers


def _entry(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [begin, end]}


def _deep(opening: bytes) -> bytes:
    raw = opening * 200_000
    return len(raw).to_bytes(8, "little") + raw


# Each is given a plan that was taken, and says what comes of what it sends.


def _in_an_upload(body: Callable[[Manifest], bytes]) -> Callable[[Target, Manifest], str]:
    return lambda attacked, made: put(attacked, f"{made.transfer}/0", body(made))


def _replayed(attacked: Target, made: Manifest) -> str:
    assert put(attacked, f"{made.transfer}/0", honest(made)) == ""
    return put(attacked, f"{made.transfer}/0", honest(made, seed=2))


def _of_an_older_plan(attacked: Target, made: Manifest) -> str:
    attacked.planned()
    return put(attacked, f"{made.transfer}/0", honest(made))


def _committed_without_a_buffer(attacked: Target, made: Manifest) -> str:
    summed = [msgspec.structs.replace(t, checksum="0" * 16) for t in made.tensors]
    return attacked.post(
        "commit", encode_manifest(msgspec.structs.replace(made, tensors=tuple(summed)))
    )


def _other_numbers_than_were_summed(attacked: Target, made: Manifest) -> str:
    packed = attacked.pack(made)
    packed.close()
    assert put(attacked, f"{made.transfer}/0", honest(made, seed=2)) == ""
    return attacked.post(
        "commit", encode_manifest(msgspec.structs.replace(made, tensors=packed.tensors))
    )


ATTEMPTS: dict[str, Callable[[Target, Manifest], str]] = {
    "68 a transfer that nobody planned": lambda a, m: put(a, f"{OTHER}/0", honest(m)),
    "69 a transfer that is a path": lambda a, m: put(a, "..%2F..%2Fetc%2Fpasswd/0", honest(m)),
    "70 a number that is none": lambda a, m: put(a, f"{m.transfer}/0x0", honest(m)),
    "71 a number of another alphabet": lambda a, m: put(a, f"{m.transfer}/\u0663", honest(m)),
    "72 a buffer past the last": lambda a, m: put(a, f"{m.transfer}/1", honest(m)),
    "73 a huge number": lambda a, m: put(a, f"{m.transfer}/{'9' * 4000}", honest(m)),
    "74 the same buffer again, with other numbers": _replayed,
    "75 a buffer of a plan that another has replaced": _of_an_older_plan,
    "76 a commit without its buffer": _committed_without_a_buffer,
    "77 other numbers than were summed": _other_numbers_than_were_summed,
    "78 a head that claims all memory": _in_an_upload(lambda _: b"\xff" * 8),
    "79 a head one byte too long": _in_an_upload(
        lambda _: (MAX_UPLOAD_HEADER_BYTES + 1).to_bytes(8, "little") + b"{"
    ),
    "80 a head of brackets": _in_an_upload(lambda _: _deep(b"[")),
    "81 a head of objects in objects": _in_an_upload(lambda _: _deep(b'{"a":')),
    "82 tensors over each other": _in_an_upload(
        lambda m: _headed({t.name: _entry(0, t.nbytes) for t in m.tensors}, bytes(4096))
    ),
    "83 offsets before the file": _in_an_upload(
        lambda m: _headed({m.tensors[0].name: _entry(-8, 0)})
    ),
    "84 offsets past 64 bits": _in_an_upload(
        lambda m: _headed({m.tensors[0].name: _entry(0, 1 << 70)})
    ),
    "85 a path for a name": _in_an_upload(lambda _: _headed({"../../x": _entry(0, 4)})),
    "86 code for a type": _in_an_upload(lambda m: honest(m).replace(b'"F32"', b'"os."', 1)),
    "87 numbers without end": _in_an_upload(lambda m: honest(m) + bytes(1 << 20)),
    "88 nothing": _in_an_upload(lambda _: b""),
    "89 a pickle": _in_an_upload(lambda _: b"\x80\x04cos\nsystem\n(S'true'\ntR."),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_upload_that_is_not_what_was_planned_changes_nothing(
    attacked: Target, attempt: str
) -> None:
    attacked.post("plan", encode_manifest(attacked.plan()))  # whatever is made once
    made = attacked.planned()
    assert ATTEMPTS[attempt](attacked, made) != ""
    assert attacked.told == [], "nobody waits for what is refused"
    assert attacked.is_untouched()
    assert attacked.still_takes_honest_weights()


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_bytes_of_any_kind_are_an_error_in_words(raw: bytes, is_headed: bool) -> None:
    """In a head that is as long as it says, too; nothing is held when it is over."""
    made = plan()
    spool = SafetensorsUpload(0, made.tensors, made.buffers[0])
    with pytest.raises(WeightsError):
        _whole(spool, len(raw).to_bytes(8, "little") + raw if is_headed else raw)
    spool.close()


def _whole(spool: SafetensorsUpload, raw: bytes) -> None:
    spool.feed(raw)
    spool.finish()


def test_a_hundred_that_fail_leave_nothing_behind() -> None:
    made = plan()
    with nothing_left_behind():
        for length in range(0, 1000, 10):
            spool = SafetensorsUpload(0, made.tensors, made.buffers[0])
            spool.feed(honest(made)[:length])
            spool.close()
