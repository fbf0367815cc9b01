"""Attempts to have an engine killed by new weights for which there is no memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from clairai.errors import WeightsRoomError
from clairai.local import free_memory
from clairai.weights import Sender, room
from clairai.weights.manifest import encode_manifest
from clairai.weights.pack import HostPacker
from clairai.weights.room import LoadNeeds
from clairai.wire.ring_messages import Refusal
from tests.support.weights import weights
from tests.support.weights_target import Target, offer_of, said, target

GIB = 1 << 30
MORE_THAN_THERE_IS = LoadNeeds(host_nbytes=1 << 60)


@pytest.fixture
def victim(runtime: Path) -> Iterator[Target]:
    with target(runtime) as made:
        yield made


def take_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, left: int) -> None:
    """The machine has this much left, says its kernel."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {(left + free_memory.RESERVED_BYTES) >> 10} kB\n")
    monkeypatch.setattr(free_memory, "MEMINFO_FILE", meminfo)


@pytest.mark.attack(650)
@pytest.mark.parametrize("route", ["check", "plan"])
def test_weights_for_an_engine_that_has_taken_all_memory_are_refused_before_a_byte_is_sent(
    victim: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: str
) -> None:
    body = encode_manifest(victim.plan())
    with monkeypatch.context() as patched:
        take_memory(patched, tmp_path, left=1 << 20)
        refused = victim.client.post(f"/v1/weights/{route}", content=body)
    assert refused.status_code == 507
    error = refused.json()["error"]
    assert error["code"] == "weights-room"
    assert f"need {2 << 20} bytes" in error["message"]  # one buffer, in its granules
    assert f"and {1 << 20} are free" in error["message"]
    assert victim.told == []
    assert victim.is_untouched()
    assert victim.still_takes_honest_weights()


@pytest.mark.attack(651)
def test_memory_that_the_kv_cache_was_promised_is_not_given_to_new_weights(
    victim: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel calls it free until requests come."""
    take_memory(monkeypatch, tmp_path, left=8 * GIB)
    victim.llm.needs = LoadNeeds(promised_nbytes=8 * GIB - (1 << 20))
    with pytest.raises(WeightsRoomError, match="of its KV cache that it has not used yet"):
        Sender(victim.llm, runtime_dir=str(victim.folder)).send(weights(1))
    assert victim.is_untouched()


@pytest.mark.attack(652)
def test_memory_that_is_taken_after_the_plan_leaves_the_old_weights_whole(victim: Target) -> None:
    manifest = victim.planned()
    packed = victim.pack(manifest)
    with victim.connected() as sock:
        assert said(sock, offer_of(manifest, packed), packed.fds) == ""
        packed.close()
        victim.llm.needs = MORE_THAN_THERE_IS
        answer = victim.llm.committed(msgspec.structs.replace(manifest, tensors=packed.tensors))
    assert isinstance(answer, Refusal)
    assert answer.code == "weights-room"
    assert victim.is_untouched()
    assert not victim.llm.updater.is_torn


@pytest.mark.attack(653)
def test_a_sender_without_room_packs_nothing(
    victim: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []
    pack = HostPacker.pack

    def count(self: HostPacker, index: int) -> object:
        packed.append(index)
        return pack(self, index)

    monkeypatch.setattr(HostPacker, "pack", count)
    sender = Sender(victim.llm, runtime_dir=str(victim.folder), buffer_bytes=2048)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 1 << 20)
    with pytest.raises(WeightsRoomError, match="bytes of shared memory, and"):
        sender.send(weights(1))
    assert packed == []
    assert victim.is_untouched()


@pytest.mark.attack(654)
def test_an_upload_for_which_the_server_has_no_memory_is_not_the_clients_fault(
    victim: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = victim.planned()
    with monkeypatch.context() as patched:
        patched.setattr("clairai.local.shared_buffer.free_memory_bytes", lambda: 1 << 20)
        refused = victim.client.put(f"/v1/weights/buffers/{manifest.transfer}/0", content=b"")
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "weights-room")
    assert victim.still_takes_honest_weights()


REAL = """
import pathlib, resource, sys
from clairai.weights import Sender
from clairai.weights.room import LoadNeeds
from tests.support.weights import engine, weights
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
with engine(pathlib.Path(sys.argv[1])) as llm:
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    sender = Sender(llm, runtime_dir=sys.argv[1])
    llm.needs = LoadNeeds(host_nbytes=2 << 30)
    try:
        sender.send(weights(1))
    except Exception as error:
        print(type(error).__name__)
    llm.needs = LoadNeeds(host_nbytes=1 << 20)
    print(sender.send(weights(1)).version)
"""


@pytest.mark.attack(655)
def test_a_real_limit_of_the_process_is_seen_before_it_is_hit(runtime: Path) -> None:
    command = [sys.executable, "-c", REAL, str(runtime)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["WeightsRoomError", "1"], done.stderr[-2000:]
