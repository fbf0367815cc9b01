"""Paths nobody vouches for: only a regular file within the cap is read, and no descriptor leaks."""

from __future__ import annotations

import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from clairai.errors import ClairaiError, ProbeError, quote
from clairai.probe import files
from tests.support.probes import probe


@pytest.mark.parametrize("name", ["enc_1_..x.json", "enc_1_a b.json", "enc_99999999_x.json"])
def test_a_hostile_file_name_does_not_become_a_probe(name: str) -> None:
    with pytest.raises(ProbeError):
        files.loads_json(b'{"vector": [1]}', source=name)


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_only_a_regular_file_is_read(tmp_path: Path, suffix: str) -> None:
    folder, pipe = tmp_path / f"folder{suffix}", tmp_path / f"pipe{suffix}"
    folder.mkdir()
    os.mkfifo(pipe)  # opening it without O_NONBLOCK would wait for ever
    device, loop = tmp_path / f"device{suffix}", tmp_path / f"loop{suffix}"
    device.symlink_to("/dev/zero")
    loop.symlink_to(loop)
    for path in (folder, pipe, device):
        with pytest.raises(ProbeError, match="not a regular file"):
            files.load(path)
    for missing in (loop, tmp_path / f"none{suffix}", f"a\0{suffix}"):
        with pytest.raises(ProbeError, match="cannot be opened"):
            files.load(missing)


def test_a_socket_is_not_read(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s.json"))
        with pytest.raises(ProbeError):
            files.load(tmp_path / "s.json")


def test_a_users_symlink_to_a_probe_is_followed(tmp_path: Path) -> None:
    files.save(tmp_path / "real.safetensors", probe())
    (tmp_path / "link.safetensors").symlink_to("real.safetensors")
    assert files.load(tmp_path / "link.safetensors") == probe()


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_a_file_over_the_cap_is_refused_before_it_is_read(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"big{suffix}"
    with open(file, "wb") as opened:
        opened.truncate(1 << 40)  # sparse: a terabyte that takes no room
    tracemalloc.start()
    with pytest.raises(ProbeError, match=r"over \d+ bytes"):
        files.load(file)
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_nbytes < 1 << 20


def test_refused_files_leave_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "bad.json").write_bytes(b"{")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("folder.json", "bad.json", "none.json") * 10:
        with pytest.raises(ProbeError):
            files.load(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_bad_file_in_a_folder_refuses_the_folder_and_names_the_file(tmp_path: Path) -> None:
    files.save(tmp_path / "a.safetensors", probe("a"))
    (tmp_path / "b.safetensors").write_bytes(files.dumps(probe())[:-1])
    with pytest.raises(ClairaiError, match=r"b\.safetensors"):
        files.load_many(tmp_path)


def test_a_file_name_with_a_newline_cannot_forge_a_second_line(tmp_path: Path) -> None:
    file = tmp_path / "a\nERROR fake.json"
    file.write_bytes(b"{")
    with pytest.raises(ProbeError) as caught:
        files.load(file)
    assert "\n" not in str(caught.value)
    assert quote("a\nb") == r"'a\nb'"
