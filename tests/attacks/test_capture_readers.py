"""Clients that read captures slowly, many at once or never: memory, places and process stay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from bench import capture_readers
from clairai.errors import StoreDamagedError, StoreError
from clairai.server import capture_download
from clairai.server.capture_download import BundleKey, DownloadResponse, Downloads
from clairai.server.engine_rpc import RouteRefusal
from clairai.store import bundle as bundles
from clairai.store.bundle import Bundle, bundle
from clairai.store.disk import LocalDisk, UnmappedDisk
from clairai.store.read import Store
from clairai.store.write import Writer
from tests.http.fake_captures import ID
from tests.http.world import world
from tests.support.faulty_disk import wait_until
from tests.support.row_blocks import block

NUM_POINTS = 6
CAPTURE_NBYTES = 64 << 20
MAX_GROWTH_NBYTES = 32 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(capture_readers.STREAM, point="post_block.0"))
        writer.offer(block(7, point="post_block.0"))
    return tmp_path / "s"


@pytest.mark.attack(520)
@pytest.mark.timeout(120)
def test_slow_readers_of_a_capture_do_not_hold_it_in_memory() -> None:
    found = capture_readers.measure(nbytes=CAPTURE_NBYTES, num_readers=NUM_POINTS)
    assert found.growth < MAX_GROWTH_NBYTES
    assert found.after - found.before < MAX_GROWTH_NBYTES


def _read_answer(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, and the body as far as it comes."""
    raw = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


CLOSE = "Connection: close\r\n"


@pytest.mark.attack(521)
@pytest.mark.timeout(120)
def test_readers_beyond_the_bound_are_told_to_come_again_and_the_others_get_every_byte(
    tmp_path: Path,
) -> None:
    capture_readers.write_capture(tmp_path / "s", nbytes=16 << 20, num_points=1)
    with capture_readers.running_server(tmp_path / "s") as (_, path), ExitStack() as clients:
        slow = []
        for _ in range(capture_download.MAX_READERS):
            client = clients.enter_context(
                contextlib.closing(capture_readers.ask(path, None, more=CLOSE))
            )
            assert client.recv(1, socket.MSG_PEEK)  # its answer has begun, and it waits
            slow.append(client)
        with contextlib.closing(capture_readers.ask(path, None, more=CLOSE)) as late:
            status, headers, body = _read_answer(late)
        assert (status, headers["retry-after"]) == (503, "2")
        assert b"the most at once; try again" in body
        status, headers, body = _read_answer(slow.pop())
        assert (status, len(body)) == (200, int(headers["content-length"]))
        assert load(body)["rows.values"].shape == (1024, capture_readers.WIDTH)
        with contextlib.closing(capture_readers.ask(path, None, more=CLOSE)) as again:
            assert _read_answer(again)[0] == 200


@pytest.mark.attack(522)
def test_a_reader_that_takes_nothing_is_hung_up_on_and_its_place_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture_download, "STALL_S", 0.01)
    downloads = Downloads()

    async def never(*_: object) -> Any:
        await asyncio.Event().wait()

    async def stall() -> None:
        with ExitStack() as closing:
            closing.enter_context(downloads.reserve())
            response = DownloadResponse(
                iter([b"a", b"b"]),
                closing.pop_all(),
                status=HTTPStatus.OK,
                headers={"content-length": "2"},
            )
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                await never()

        await asyncio.wait_for(response({}, never, send), 20)
        assert [one.get("body") for one in sent] == [None, b"a"]

    for _ in range(2 * capture_download.MAX_READERS):
        asyncio.run(stall())


def test_an_answer_that_is_never_sent_gives_its_place_back() -> None:
    downloads = Downloads()
    for _ in range(2 * capture_download.MAX_READERS):
        with ExitStack() as closing:
            closing.enter_context(downloads.reserve())
            DownloadResponse(
                iter([]),
                closing.pop_all(),
                status=HTTPStatus.OK,
                headers={"content-length": "0"},
            )


@pytest.mark.attack(523)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("change", ["cut", "replaced", "deleted"])
def test_a_shard_that_is_changed_under_its_readers_ends_an_answer_and_not_the_server(
    change: str, tmp_path: Path
) -> None:
    """A process that had it mapped would die of SIGBUS."""
    capture_readers.write_capture(tmp_path / "s", nbytes=16 << 20, num_points=1)
    (shard,) = (tmp_path / "s").glob("*.safetensors")
    with capture_readers.running_server(tmp_path / "s") as (process, path):
        with contextlib.closing(capture_readers.ask(path, None, more=CLOSE)) as slow:
            assert slow.recv(1, socket.MSG_PEEK)
            if change == "cut":
                os.truncate(shard, 4096)
            elif change == "replaced":
                shard.rename(tmp_path / "kept")
                shard.write_bytes(bytes(16 << 20))
            else:
                shard.unlink()
            status, headers, body = _read_answer(slow)
        assert (status, len(body) < int(headers["content-length"])) == (200, True)
        with contextlib.closing(capture_readers.ask(path, 0, more=CLOSE)) as next_reader:
            assert _read_answer(next_reader)[0] >= 400
        os.kill(process, 0)


@pytest.mark.attack(524)
def test_what_all_readers_hold_is_bounded_and_idle_files_make_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = Downloads()
    held = bundle(Store(UnmappedDisk(folder)), 7).held_nbytes
    monkeypatch.setattr(capture_download, "HELD_NBYTES", held + held // 2)

    async def open_one(stream: int, closing: ExitStack) -> Bundle | None:
        return await downloads.open(BundleKey(stream, (), None), [str(folder)], closing)

    async def read() -> None:
        with ExitStack() as idle:
            assert await open_one(7, idle) is not None
        with ExitStack() as first, ExitStack() as second:
            assert await open_one(capture_readers.STREAM, first) is not None
            assert await open_one(capture_readers.STREAM, second) is not None  # the same file
            with pytest.raises(RouteRefusal, match="all memory there is") as refused:
                await open_one(7, second)
            assert refused.value.headers == {"Retry-After": "2"}
        with ExitStack() as last:
            assert await open_one(7, last) is not None

    asyncio.run(read())


@pytest.mark.attack(525)
def test_a_file_of_too_many_small_rows_is_refused_before_it_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "MAX_ROWS", 2)
    with pytest.raises(StoreError, match="these are 3 rows, and one file has 2 at most"):
        bundle(Store(UnmappedDisk(folder)), 7)


@pytest.fixture(params=["sharded", "npz"])
def unmapped(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    with Writer(tmp_path / "u", layout=request.param) as writer:
        for start in range(0, 40, 4):
            for stream in (1, 2, 3):
                writer.offer(block(stream, 4, start=start))
    return Store(UnmappedDisk(tmp_path / "u"))


def test_rows_that_are_read_in_parts_are_those_that_a_mapped_reader_sees(
    unmapped: Store, tmp_path: Path
) -> None:
    mapped = Store(LocalDisk(tmp_path / "u"))
    for stream in (1, 2, 3):
        expected, found = mapped.rows(stream), unmapped.rows(stream)
        assert np.array_equal(np.asarray(found), np.asarray(expected))
        assert np.array_equal(found[5:9], expected[5:9])


def test_a_flipped_bit_is_found_by_who_reads_in_parts_too(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreDamagedError, match="checksum of its tensor"):
        bundle(Store(UnmappedDisk(folder)), 7)


@pytest.mark.attack(526)
def test_a_slow_reader_of_a_capture_through_the_proxy_makes_it_hold_little(tmp_path: Path) -> None:
    with world(tmp_path) as w, socket.socket() as client:
        captures = w.upstream.captures
        captures.large_nbytes = CAPTURE_NBYTES
        host, port = w.url.removeprefix("http://").split(":")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(f"GET /v1/captures/{ID} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b" 200 " in client.recv(100)
        wait_until(lambda: captures.is_stuck)
        assert captures.sent_nbytes < CAPTURE_NBYTES // 4  # buffers of sockets, for the most part
