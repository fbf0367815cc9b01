"""Attempts to overwrite other files through the files that commands write."""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path

import pytest

from clairai.errors import ClairaiError, StoreError
from clairai.probe import files as probe_files
from clairai.store.export_rows import new_folder
from clairai.vector import files as vector_files
from tests.support.probes import probe
from tests.support.vectors import vector

Save = Callable[[Path, str], None]
SAVES: dict[str, Save] = {
    "probe.safetensors": lambda path, what: probe_files.save(path, probe(what)),
    "vector.safetensors": lambda path, what: vector_files.save(vector(what), path),
}


@pytest.fixture(params=SAVES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.attack(660)
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_saved_file_takes_the_place_of_a_planted_link_and_leaves_its_target(
    tmp_path: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "victim").write_text("precious")
    plant(tmp_path / "victim", tmp_path / name)
    umask = os.umask(0)
    try:
        SAVES[name](tmp_path / name, "new")
    finally:
        os.umask(umask)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / name).is_symlink()
    assert (tmp_path / name).stat().st_mode & 0o077 == 0


@pytest.mark.attack(661)
def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SAVES[name](tmp_path / name, "old")
    before = (tmp_path / name).read_bytes()

    def full(_: int) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ClairaiError, match="No space left on device"):
        SAVES[name](tmp_path / name, "new")
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.attack(662)
@pytest.mark.parametrize("suffix", ["", ".tmp"])
def test_an_export_is_not_written_through_a_planted_link(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"out{suffix}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="give a new folder"), new_folder(tmp_path / "out") as made:
        (made / "rows").write_text("rows")
    assert list((tmp_path / "elsewhere").iterdir()) == []
