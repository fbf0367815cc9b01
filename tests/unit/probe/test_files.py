"""Probes on disk: what is saved is what is loaded, and a file is there whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save as save_safetensors

from clairai.errors import ProbeError
from clairai.points import POINT_KINDS, Point
from clairai.probe import files
from clairai.probe.model import (
    MAX_BINS,
    MAX_COUNT,
    MAX_DESCRIPTION,
    MAX_MODEL,
    MAX_NAME,
    MIN_BINS,
    Probe,
)
from clairai.probe.numeric_bounds import is_row_length
from clairai.wire import control_messages, ring_messages
from tests.support.probes import numbers, probe

float32 = st.floats(-(2.0**99), 2.0**99, width=32)  # about 6e29: see numeric_bounds.py
directions = st.lists(st.floats(-1e7, 1e7, width=32), min_size=1, max_size=40).filter(
    lambda values: is_row_length(float(np.linalg.norm(values)))
)
ranges = st.tuples(float32, float32).filter(lambda ends: ends[0] < ends[1])
counts = st.lists(st.integers(0, MAX_COUNT), min_size=MIN_BINS, max_size=MAX_BINS).filter(any)
histograms = st.builds(
    lambda ends, counts: control_messages.Histogram(ends[0], ends[1], tuple(counts)), ranges, counts
)
probes = st.builds(
    Probe,
    name=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_:/@+-]{0,20}", fullmatch=True),
    point=st.builds(Point, st.sampled_from(POINT_KINDS), st.integers(0, 200)),
    direction_D=directions.map(lambda values: np.array(values, np.float32)),
    bias=float32,
    activation=st.sampled_from(get_args(ring_messages.Activation)),
    threshold=st.none() | float32,
    calibration=st.none() | ranges,
    model=st.none() | st.sampled_from(["meta-llama/Llama-3.1-8B", "mod\u00e8le"]),
    description=st.none() | st.text(min_size=1, max_size=500).filter(str.isprintable),
    auroc=st.none() | st.floats(0, 1),
    histogram=st.none() | histograms,
)


@settings(deadline=None)
@given(probes)
def test_every_probe_survives_its_own_file(made: Probe) -> None:
    data = files.dumps(made)
    assert files.loads(data, source="memory") == made
    assert files.loads(data, source="memory").digest == made.digest
    assert files.dumps(files.loads(data, source="memory")) == data


def test_the_largest_of_everything_fits_a_file() -> None:
    ends = (-1.1754943508222875e-38, 1.1754943508222875e-38)
    made = probe(
        name="n" * MAX_NAME,
        model="\u00e8" * MAX_MODEL,
        description="\U0001f600" * MAX_DESCRIPTION,
        calibration=ends,
        histogram=control_messages.Histogram(ends[0], ends[1], (MAX_COUNT,) * MAX_BINS),
    )
    assert files.loads(files.dumps(made), source="memory") == made


def test_a_file_from_before_descriptions_is_the_same_probe() -> None:
    header = (
        b'{"__metadata__":{"clairai":"probe/1","name":"p","point":"post_block.1","bias":"0.0",'
        b'"activation":"none"},"direction":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    )
    body = bytes(numbers(1, -2, 3))
    old = files.loads(len(header).to_bytes(8, "little") + header + body, source="old")
    assert (old, old.description, old.auroc, old.histogram) == (probe(), None, None, None)


def test_the_same_probe_gives_the_same_bytes_every_time() -> None:
    assert len({files.dumps(probe(model="m", threshold=1.0)) for _ in range(20)}) == 1


def test_safetensors_itself_reads_a_saved_probe(tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    files.save(file, probe(bias=0.25))
    with safe_open(file, framework="numpy") as opened:
        assert opened.get_tensor("direction").tolist() == [1, -2, 3]
        assert opened.metadata()["bias"] == "0.25"


def in_library_format(tensor: NDArray[np.generic]) -> bytes:
    fields = {"clairai": "probe/1", "name": "p", "point": "resid_post.1", "format": "np"}
    return save_safetensors({"direction": tensor}, fields)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_file_written_by_safetensors_is_read(dtype: type[np.floating]) -> None:
    assert files.loads(in_library_format(np.array([1, -2, 3], dtype)), source="x") == probe()


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    values = numbers(1, -2, 3, 1e-30, 3e14)
    data = in_library_format((values.view(np.uint32) >> 16).astype(np.uint16))
    direction_D = files.loads(
        data.replace(b'"U16"', b'"BF16"').replace(b"}}  ", b"}} "), source="x"
    )
    expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert direction_D.direction_D.tolist() == expected.tolist()


def test_saving_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    files.save(file, probe())
    files.save(file, probe(bias=2.0))
    assert files.load(file) == probe(bias=2.0)
    assert os.listdir(tmp_path) == ["p.safetensors"]
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    file = tmp_path / "p.safetensors"
    files.save(file, probe())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(ProbeError, match="No space left on device"):
        files.save(file, probe(bias=2.0))
    monkeypatch.undo()
    assert files.load(file) == probe()
    assert os.listdir(tmp_path) == ["p.safetensors"]


def test_contents_are_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def renamed(old: str, new: str) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    files.save(tmp_path / "p.safetensors", probe())
    assert calls == ["file", "rename", "folder"]


@pytest.mark.parametrize("name", ["p.json", "p", "no/such/folder/p.safetensors", "a\0.safetensors"])
def test_a_place_that_cannot_be_saved_to_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProbeError):
        files.save(tmp_path / name, probe())


def write_json(folder: Path, file_name: str, **fields: object) -> Path:
    file = folder / file_name
    file.write_text(json.dumps(fields))
    return file


def test_the_file_name_of_a_json_probe_gives_layer_and_name(tmp_path: Path) -> None:
    file = write_json(tmp_path, "enc_19_deceit_v2.json", vector=[1, -2.5], modelId="llama")
    made = files.load(file, target_layer=3)
    assert (made.name, str(made.point), made.activation) == ("deceit_v2", "post_block.19", "relu")
    assert made.direction_D.tolist() == [1, -2.5]


def test_target_layer_is_used_for_a_file_name_without_a_layer(tmp_path: Path) -> None:
    made = files.load(write_json(tmp_path, "deceit.json", vector=[1]), target_layer=7)
    assert (made.name, str(made.point)) == ("deceit", "post_block.7")


def test_a_json_probe_without_a_layer_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"enc_LAYER_NAME\.json, or set TARGET_LAYER"):
        files.load(write_json(tmp_path, "deceit.json", vector=[1]))


def test_optional_keys_of_a_json_probe_are_used(tmp_path: Path) -> None:
    file = write_json(
        tmp_path, "enc_1_x.json", vector=[1], bias=2, name="y", threshold=0.5, activation="sigmoid"
    )
    expected = probe("y", direction_D=numbers(1), bias=2.0, threshold=0.5, activation="sigmoid")
    assert files.load(file) == expected


def test_a_null_key_is_an_absent_key() -> None:
    made = files.loads_json(b'{"vector": [1], "bias": null, "name": null}', source="enc_1_x.json")
    assert (made.name, made.bias) == ("x", 0.0)


def test_a_json_probe_scores_as_in_the_first_clairai() -> None:
    hidden_TD = np.array([[1, 2], [-1, -2]], np.float32)
    made = files.loads_json(b'{"vector": [0.5, 0.25]}', source="enc_1_x.json")
    assert made.apply(hidden_TD).tolist() == [1, 0]


def test_a_folder_gives_its_probes_by_name_and_skips_the_rest(tmp_path: Path) -> None:
    files.save(tmp_path / "1.safetensors", probe("b"))
    write_json(tmp_path, "enc_4_a.json", vector=[1])
    (tmp_path / "notes.txt").write_text("not a probe")
    (tmp_path / ".hidden.json").write_text("not a probe")
    assert [made.name for made in files.load_many(tmp_path)] == ["a", "b"]


def test_a_glob_and_a_file_give_what_they_match(tmp_path: Path) -> None:
    for name in "ab":
        files.save(tmp_path / f"x_{name}.safetensors", probe(name))
    assert [made.name for made in files.load_many(f"{tmp_path}/x_*")] == ["a", "b"]
    assert [made.name for made in files.load_many(tmp_path / "x_a.safetensors")] == ["a"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    files.save(tmp_path / "[x].safetensors", probe("a"))
    assert [made.name for made in files.load_many(tmp_path / "[x].safetensors")] == ["a"]


def test_two_files_of_one_name_are_refused_and_both_named(tmp_path: Path) -> None:
    for file in ("1.safetensors", "2.safetensors"):
        files.save(tmp_path / file, probe("a"))
    with pytest.raises(ProbeError, match=r"2\.safetensors.*1\.safetensors.*both named a"):
        files.load_many(tmp_path)


def test_nothing_to_load_is_refused(tmp_path: Path) -> None:
    for nothing in (tmp_path, tmp_path / "*.json", tmp_path / "none.json", "a\0*"):
        with pytest.raises(ProbeError):
            files.load_many(nothing)


def test_a_file_of_another_suffix_is_refused_with_those_read(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"\.safetensors or \.json"):
        files.load(tmp_path / "p.pt")
