"""Attempts to have the demo serve other weights through its cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clairai.demo import model
from clairai.demo.sealed_folder import SEAL, is_intact, sealed_folder
from clairai.errors import ModelError
from tests.support import gguf_files
from tests.support.other_user import give_away

WEIGHTS = "model.safetensors"
BODY = bytes(range(256)) * 16


def _fill(folder: Path) -> None:
    header = b'{"a":{}}'
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + BODY)
    (folder / "config.json").write_text("{}")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return sealed_folder(tmp_path / "cache" / "it", _fill, recipe="1")


@pytest.mark.attack(630)
@pytest.mark.parametrize("place", [16, 2000, -1])
def test_a_flipped_bit_in_cached_weights_is_converted_again(target: Path, place: int) -> None:
    raw = bytearray((target / WEIGHTS).read_bytes())
    raw[place] ^= 1
    (target / WEIGHTS).write_bytes(raw)
    sealed_folder(target, _fill, recipe="1")
    assert (target / WEIGHTS).read_bytes().endswith(BODY)


def _writable_weights(target: Path) -> None:
    (target / WEIGHTS).chmod(0o666)


def _writable_folder(target: Path) -> None:
    target.chmod(0o777)


def _writable_seal(target: Path) -> None:
    (target / SEAL).chmod(0o622)


def _linked_weights(target: Path) -> None:
    (target / WEIGHTS).rename(target.parent / "elsewhere")
    (target / WEIGHTS).symlink_to(target.parent / "elsewhere")


def _weights_with_two_names(target: Path) -> None:
    os.link(target / WEIGHTS, target.parent / "twin")


@pytest.mark.attack(631)
@pytest.mark.parametrize(
    "open_up",
    [_writable_weights, _writable_folder, _writable_seal, _linked_weights, _weights_with_two_names],
)
def test_a_cached_model_that_others_could_have_written_is_converted_again(
    target: Path, open_up: Callable[[Path], None]
) -> None:
    """Whole though it is: whoever wrote the weights could have written the seal."""
    open_up(target)
    assert not is_intact(target, recipe="1")
    sealed_folder(target, _fill, recipe="1")
    assert is_intact(target, recipe="1")
    assert not (target / WEIGHTS).is_symlink()
    assert [path.stat().st_mode & 0o077 for path in (target, *target.iterdir())] == [0] * 4


@pytest.mark.attack(632)
@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_cache_that_others_can_write_is_refused_with_the_way_out(
    tmp_path: Path, mode: int
) -> None:
    gguf = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.hugging_face_weights())
    cache = tmp_path / "cache"
    model.convert_once(gguf, cache=cache)
    cache.chmod(mode)
    with pytest.raises(ModelError, match=r"can be written by others.*chmod go-w.*CLAIRAI_CACHE"):
        model.convert_once(gguf, cache=cache)


@pytest.mark.attack(633)
def test_a_cached_model_of_another_user_is_not_served(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root with another user's home: that user could exchange it at any time."""
    give_away(target, *target.iterdir(), monkeypatch=monkeypatch)
    assert not is_intact(target, recipe="1")


@pytest.mark.attack(634)
def test_a_lock_planted_as_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "it.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        sealed_folder(tmp_path / "it", _fill, recipe="1")
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.attack(635)
def test_an_open_umask_does_not_open_the_cached_model(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        target = sealed_folder(tmp_path / "cache" / "it", _fill, recipe="1")
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o077 for path in (target, *target.iterdir())] == [0] * 4
    assert is_intact(target, recipe="1")
