"""Damage on the server's disk is the server's fault over HTTP, and tells nothing of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clairai.store.disk import MANIFEST
from tests.support.capturing_server import CapturingServer, capturing_server


@pytest.fixture
def server(runtime: Path, tmp_path: Path) -> Iterator[CapturingServer]:
    with capturing_server(runtime, {"folder": str(tmp_path / "s")}) as made:
        yield made


def capture(server: CapturingServer) -> str:
    return str(server.ask(capture=True).json()["clairai"]["capture"]["id"])


@pytest.mark.attack(640)
def test_a_damaged_shard_is_an_error_of_the_server_and_others_can_be_read(
    server: CapturingServer, tmp_path: Path
) -> None:
    damaged, whole = capture(server), capture(server)
    (shard, *_) = sorted((tmp_path / "s").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    found = [server.client.get(f"/v1/captures/{id}") for id in (damaged, whole)]
    assert sorted(answer.status_code for answer in found) == [200, 500]
    (refused,) = (answer for answer in found if answer.status_code == 500)
    assert refused.json()["error"]["code"] == "store-damaged"
    assert str(tmp_path) not in refused.text


@pytest.mark.attack(641)
def test_a_folder_that_cannot_be_read_is_an_error_of_the_server_without_its_path(
    server: CapturingServer, tmp_path: Path
) -> None:
    id = capture(server)
    (tmp_path / "s" / MANIFEST).rename(tmp_path / "elsewhere")
    (tmp_path / "s" / MANIFEST).symlink_to(tmp_path / "elsewhere")
    refused = server.client.get(f"/v1/captures/{id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "store")
    assert "cannot be read" in refused.text
    assert str(tmp_path) not in refused.text
