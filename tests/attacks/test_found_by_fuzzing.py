"""What random inputs found, each as a case of its own: tests/fuzz looks for more of the kind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from clairai.capture.capture_settings import CaptureSettings
from clairai.errors import (
    ConfigError,
    EncodingError,
    RequestError,
    StoreDamagedError,
    StoreError,
    VectorError,
    WeightsError,
)
from clairai.points import Point
from clairai.probe import file_format
from clairai.proxy.completions.chunk import read_chunk
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.ring_feed import RingFinder
from clairai.proxy.upstream import UpstreamGone
from clairai.store import shard
from clairai.store.codecs.registry import ENCODERS, named
from clairai.train.documents import read_texts
from clairai.vector import gguf_format
from clairai.weights.manifest import parse_manifest
from clairai.wire import control_messages, ring_messages
from tests.fuzz.targets.completions import OneAnswer, parse_chat, read_facts
from tests.support import toy_publisher
from tests.support.probes import numbers
from tests.support.row_blocks import block, origin
from tests.support.vectors import vector

FORGED = "ok\r\nlevel: error"


@pytest.mark.attack(702)
@pytest.mark.parametrize("limit", [1 << 20, 256 << 20])
def test_a_short_file_takes_little_memory_whatever_its_limit(limit: int) -> None:
    opened = io.BytesIO(b"short")
    tracemalloc.start()
    try:
        assert file_format.read_at_most(opened, limit) == b"short"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.attack(703)
def test_a_short_file_of_labelled_texts_takes_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("one\ntwo\n")
    tracemalloc.start()
    try:
        assert len(read_texts(file, label=True)) == 2
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.attack(704)
def test_a_refused_control_message_repeats_no_control_character(runtime: Path) -> None:
    from clairai.engine.worker_control import answer_control

    message = msgspec.msgpack.encode({"type": "list_probes", FORGED: 1})
    with toy_publisher.running_publisher(runtime) as publisher:
        raw = answer_control(publisher, message)
    reply = msgspec.msgpack.decode(raw, type=control_messages.ControlReply)
    assert isinstance(reply, ring_messages.Refusal)
    assert "ok\\r\\nlevel" in reply.reason
    assert reply.reason.isprintable()


@pytest.mark.attack(705)
def test_a_refused_manifest_of_weights_repeats_no_control_character() -> None:
    with pytest.raises(WeightsError) as refused:
        parse_manifest(msgspec.json.encode({"version": 1, FORGED: 1}))
    assert str(refused.value).isprintable()


@pytest.mark.attack(706)
def test_names_of_consumers_are_repeated_printable() -> None:
    setting = {"consumers": {FORGED: {"folder": "x"}}, "to": ["other"]}
    with pytest.raises(ConfigError) as refused:
        CaptureSettings.parse(setting)
    assert str(refused.value).isprintable()


def npz_with(**changes: Any) -> bytes:
    """An .npz file whose directory says something else than zipfile would write."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("clairai.npy", b"x")
        for name, value in changes.items():
            setattr(file.infolist()[0], name, value)
    return raw.getvalue()


@pytest.mark.attack(707)
@pytest.mark.parametrize("change", [{"extract_version": 255}, {"flag_bits": 1}, {"flag_bits": 32}])
def test_an_npz_shard_that_asks_for_more_than_zip_is_damaged(change: dict[str, int]) -> None:
    data = npz_with(**change)
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(StoreDamagedError, match="its content is invalid"):
        shard.open_npz("x", memoryview(data), digest=digest, nbytes=len(data))


@pytest.mark.attack(708)
@pytest.mark.parametrize(
    "change", [{"encoder": "zip9"}, {"parameters": '{"dtype": "int3"}'}, {"parameters": '{"x": 1}'}]
)
def test_a_shard_of_an_unknown_encoder_is_an_error_of_the_store(change: dict[str, str]) -> None:
    changed = msgspec.structs.replace(origin(), **change)
    with pytest.raises(StoreError, match="rows of encoder"):
        changed.make_encoder()


@pytest.mark.attack(709)
@pytest.mark.parametrize("name", ENCODERS)
def test_a_signalling_nan_in_encoded_rows_warns_nobody(name: str) -> None:
    encoder = block(1, encoder=name).origin.make_encoder()
    arrays = {
        key: np.full_like(array, 0).reshape(array.shape)
        for key, array in encoder.encode(np.ones((1, 8), np.float32)).items()
    }
    for array in arrays.values():
        if array.dtype == np.float32:
            array.view(np.uint32)[:] = 0x7F800001
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _decode_or_refuse(name, arrays)


def _decode_or_refuse(name: str, arrays: dict[str, Any]) -> None:
    encoder = named(name, {"dtype": "float32"} if name == "raw" else {})
    with contextlib.suppress(EncodingError):  # an end of a range that is no number
        assert encoder.decode(arrays, width=8).dtype == np.float32


@pytest.mark.attack(712)
@pytest.mark.parametrize("nan", [0x7F800001, 0xFF800001, 0x7FC00000])
def test_a_signalling_nan_in_a_control_vector_is_refused_without_a_warning(nan: int) -> None:
    plain = gguf_format.dumps(vector(rows={Point("post_block", 1): numbers(1, 2, 3)}))
    data = plain[:-32] + nan.to_bytes(4, "little") + plain[-28:]
    with pytest.raises(VectorError, match="NaN or infinity"):  # a warning would be an error here
        gguf_format.loads(data, source="v.gguf", name="v")


@pytest.mark.attack(710)
def test_an_event_of_the_engine_that_is_not_utf8_is_no_chunk() -> None:
    data = b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}'
    assert read_chunk(b"data: " + data + b"\n\n", data) is None


@pytest.mark.attack(713)
@pytest.mark.parametrize(
    "answer", [b"<html>", b'{"epoch": "zz"}', b'{"epoch": "-5"}', b'{"x": "\xff', b"[" * 5000]
)
def test_an_upstream_that_answers_something_else_is_asked_again(
    answer: bytes, runtime: Path
) -> None:
    targets: list[Any] = []
    feed: Any = SimpleNamespace(is_attached=False, set_targets=targets.append)
    settings = ProxySettings("http://127.0.0.1:1", runtime_dir=runtime)

    async def look() -> None:
        finder = RingFinder(settings, cast(Any, OneAnswer(answer)), feed)
        finder.find_folder()
        await finder._find_target()  # an error here would end the task that looks for the ring

    asyncio.run(look())
    assert targets == []


@pytest.mark.attack(714)
@pytest.mark.parametrize("answer", [b"<html>", b'{"data": 5}', b'{"x": "\xff', b"[" * 5000])
def test_facts_that_upstream_answers_wrongly_are_its_fault(answer: bytes) -> None:
    for space in (b" ", b"\n", b"\t"):  # one for each question
        with pytest.raises(UpstreamGone, match="something else"):
            read_facts(space + answer)


@pytest.mark.attack(711)
@pytest.mark.parametrize(
    "answer", [b'{"error": {"message": "\xef"}}', b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}"]
)
def test_a_broken_answer_of_the_tokenizer_refuses_one_request(answer: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be told"):
        parse_chat(answer + b" " * (-len(answer) % 4))
