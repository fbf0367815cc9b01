"""Hostile ids, ranges, prompts, tags and folders: refused in words, and nothing else is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from clairai.batch.prompts import read_prompts
from clairai.batch.resume import RunIdentity
from clairai.errors import ConfigError, StoreDamagedError, StoreError
from clairai.store.disk import LocalDisk
from clairai.store.send_shards import ShardSender
from clairai.store.write import Writer
from tests.support.capturing_server import CapturingServer, capturing_server
from tests.support.row_blocks import block

SECRET = b"not for clients"
RUN = RunIdentity("tiny", ("post_block.3",), '"all"', '{"name":"raw"}', 1)


@pytest.fixture
def server(runtime: Path, tmp_path: Path) -> Iterator[CapturingServer]:
    (tmp_path / "secret").write_bytes(SECRET)
    with capturing_server(runtime, {"folder": str(tmp_path / "s")}) as made:
        yield made


@pytest.mark.parametrize(
    "id",
    [
        *("..", "../secret", "%2e%2e%2fsecret", "..%2f..%2fsecret", "manifest", "lock"),
        *(
            "0" * 16,
            "f" * 17,
            "F" * 16,
            "0" * 15 + "%00",
            "\uff10" * 16,
            "-" + "1" * 15,
            "%0a" * 16,
        ),
        "a" * 8000,
    ],
)
def test_no_id_leads_anywhere_but_to_a_capture(server: CapturingServer, id: str) -> None:
    got = server.client.get(f"/v1/captures/{id}")
    assert got.status_code == 404
    assert SECRET not in got.content
    assert str(Path.home()) not in got.text


@pytest.mark.parametrize(
    "asked",
    [
        "bytes=0-" + "9" * 4000,
        "bytes=" + "0-1," * 2000,
        "bytes=--5",
        "bytes=0-\x7f",
        "-",
        "b" * 8000,
    ],
)
def test_no_range_makes_more_of_a_file_than_it_is(server: CapturingServer, asked: str) -> None:
    id = server.ask(capture=True).json()["clairai"]["capture"]["id"]
    whole = server.client.get(f"/v1/captures/{id}").content
    got = server.client.get(f"/v1/captures/{id}", headers={"Range": asked})
    assert (got.status_code, got.content) in ((200, whole), (206, whole), (416, b""))


@pytest.mark.parametrize(
    "tags",
    [
        {"a": "x" * 5000},
        json.loads("[" * 500 + "]" * 500),
        {"../../etc/passwd": "\u0000"},
        7,
        {"stream": "ffff", "__metadata__": {}},
    ],
    ids=["long", "deep", "path", "number", "ours"],
)
def test_tags_are_data_or_refused_and_never_a_name(
    server: CapturingServer, tags: Any, tmp_path: Path
) -> None:
    answer = server.ask(capture={"tags": tags})
    assert answer.status_code in (200, 400)
    names = {path.name for path in tmp_path.rglob("*") if "etc" in path.name or "ffff" in path.name}
    assert names == set()
    if answer.status_code == 400:
        assert "capture.tags" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a", "tags": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt": "a", "prompt": 5}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"prompt_token_ids": [1e400]}',
        b'{"prompt": "\xed\xa0\x80"}',
        b"\x00" * 100,
    ],
    ids=["deep", "twice", "open", "huge", "surrogate", "zeros"],
)
def test_a_hostile_line_of_prompts_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match="line 2 of"):
        read_prompts(tmp_path / "p.jsonl")


def test_tags_of_a_prompt_that_are_too_long_are_found_before_an_engine_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "tags": {"a": "x" * 4000}}))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(ConfigError, match="line 1: tags take"):
        RUN.tags(prompt)


def _sent(tmp_path: Path, state: bytes) -> ShardSender:
    """A folder that was sent, and whose progress file was changed afterwards."""
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
    sender = ShardSender(LocalDisk(tmp_path / "s"), f"memory://{uuid4().hex}/c")
    assert len(list(sender.send())) == 1
    (tmp_path / "s" / sender._progress_name).write_bytes(state)
    return sender


@pytest.mark.parametrize("state", [b"", b"garbage", b"[]", b"\xff" * 9, b'{"commits": "1"}'])
def test_unreadable_send_progress_sends_everything_again(state: bytes, tmp_path: Path) -> None:
    sender = _sent(tmp_path, state)
    assert len(list(sender.send())) == 1
    assert list(sender.send()) == []


@pytest.mark.parametrize("said", [{"commits": -1}, {"commits": 9, "nbytes": 1 << 62}])
def test_send_progress_of_another_manifest_sends_nothing(
    said: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(StoreDamagedError, match="nothing was sent"):
        list(_sent(tmp_path, json.dumps(said).encode()).send())


def test_a_link_in_place_of_the_send_progress_is_not_followed(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
    (tmp_path / "victim").write_bytes(SECRET)
    url = f"memory://{uuid4().hex}/c"
    sender = ShardSender(LocalDisk(tmp_path / "s"), url)
    (tmp_path / "s" / sender._progress_name).symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match="is a link"):
        list(sender.send())
    assert (tmp_path / "victim").read_bytes() == SECRET
