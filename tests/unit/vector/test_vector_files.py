"""Vectors on disk: what is saved is what is loaded, in every format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save as save_safetensors

from clairai.errors import VectorError
from clairai.points import POINT_KINDS, Point
from clairai.probe.model import MAX_DESCRIPTION, MAX_MODEL, MAX_NAME
from clairai.probe.numeric_bounds import is_row_length
from clairai.vector import files, gguf_format, safetensors_format
from clairai.vector.model import MAX_METHOD, MAX_POINTS, Vector
from tests.support.probes import numbers
from tests.support.vectors import vector

float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
points = st.builds(Point, st.sampled_from(POINT_KINDS), st.integers(0, 200))
numbers_32 = st.floats(-(2.0**99), 2.0**99, width=32)
rows = st.integers(1, 12).flatmap(
    lambda width: st.dictionaries(
        points,
        st.lists(st.floats(-1e7, 1e7, width=32), min_size=width, max_size=width)
        .filter(lambda values: is_row_length(float(np.linalg.norm(values))))
        .map(lambda values: np.array(values, np.float32)),
        min_size=1,
        max_size=5,
    )
)
printable = st.text(min_size=1, max_size=100).filter(str.isprintable)
vectors = st.builds(
    Vector,
    name=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_:/@+-]{0,20}", fullmatch=True),
    rows=rows,
    description=st.none() | printable,
    model=st.none() | printable,
    method=st.none() | printable,
    scale=numbers_32,
)


def blocks(**changes: Any) -> Vector:
    """A vector that a control vector can hold."""
    kept = {Point("post_block", 3): numbers(1, -2, 3), Point("post_block", 11): numbers(0, 0, 4)}
    return vector(rows=kept, **changes)


@settings(deadline=None)
@given(vectors)
def test_every_vector_survives_its_own_file(made: Vector) -> None:
    data = files.dumps(made)
    assert files.loads(data, source="memory") == made
    assert files.dumps(files.loads(data, source="memory")) == data


def test_the_largest_of_everything_fits_a_file() -> None:
    made = vector(
        name="n" * MAX_NAME,
        rows={Point("post_block", 98_000 + layer): numbers(1) for layer in range(MAX_POINTS)},
        description="\U0001f600" * MAX_DESCRIPTION,
        model="\u00e8" * MAX_MODEL,
        method="m" * MAX_METHOD,
        scale=-1.1754943508222875e-38,
    )
    assert files.loads(files.dumps(made), source="memory") == made


def test_safetensors_itself_reads_a_saved_vector(tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    files.save(vector(scale=0.25, method="PCA"), file)
    with safe_open(file, framework="numpy") as opened:
        assert sorted(opened.keys()) == ["post_block.1", "pre_attn.1"]
        assert opened.get_tensor("post_block.1").tolist() == [3, -4, 0]
        expected = {"clairai": "vector/1", "name": "v", "scale": "0.25", "method": "PCA"}
        assert opened.metadata() == expected


def in_library_format(tensor: NDArray[np.generic]) -> bytes:
    fields = {"clairai": "vector/1", "name": "v", "format": "np", "unheard-of": "kept out"}
    return save_safetensors({"resid_post.1": tensor, "pre_attn.1": tensor[::-1].copy()}, fields)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_file_written_by_safetensors_is_read_under_any_name_of_a_point(
    dtype: type[np.floating],
) -> None:
    read = files.loads(in_library_format(np.array([1, -2, 3], dtype)), source="x")
    expected = {Point("post_block", 1): numbers(1, -2, 3), Point("pre_attn", 1): numbers(3, -2, 1)}
    assert read == vector(rows=expected)


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    values = numbers(1, -2, 3, 1e-30)
    data = in_library_format((values.view(np.uint32) >> 16).astype(np.uint16))
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"U16"', b'"BF16"').rstrip()
    data = len(header).to_bytes(8, "little") + header + data[8 + length :]
    expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    read = files.loads(data, source="x").rows[Point("post_block", 1)]
    assert read.tolist() == expected.tolist()


def test_a_control_vector_survives_its_own_file() -> None:
    made = blocks(description="Words.", scale=4.0)
    read = files.loads(gguf_format.dumps(made), source="folder/v.gguf")
    assert (read.digest, read.name, read.description) == (made.digest, "v", "Words.")
    assert read.scale == 1.0  # llama.cpp is given it beside the file


def test_the_gguf_library_reads_a_saved_control_vector(tmp_path: Path) -> None:
    files.save(blocks(model="toy"), tmp_path / "v.gguf")
    reader = GGUFReader(tmp_path / "v.gguf")
    found = {tensor.name: tensor.data.tolist() for tensor in reader.tensors}
    assert found == {"direction.3": [1, -2, 3], "direction.11": [0, 0, 4]}
    assert reader.fields["general.architecture"].contents() == "controlvector"
    assert reader.fields["controlvector.model_hint"].contents() == "toy"
    assert reader.fields["controlvector.layer_count"].contents() == 2


def written(folder: Path, tensors: dict[str, NDArray[Any]]) -> bytes:
    """A control vector by the library, as repeng writes one."""
    writer = GGUFWriter(folder / "library.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    writer.add_array("words", ["a", "bc"])
    writer.add_array("counts", [1, 2, 3])
    writer.add_float64("share", 0.5)
    writer.add_bool("is_so", True)
    return finished(writer, tensors).read_bytes()


def finished(writer: GGUFWriter, tensors: dict[str, NDArray[Any]]) -> Path:
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def test_direction_n_of_the_library_is_the_output_of_block_n(tmp_path: Path) -> None:
    data = written(tmp_path, {"direction.3": numbers(1, -2, 3), "direction.11": numbers(0, 0, 4)})
    read = files.loads(data, source="happy.gguf")
    assert read.digest == blocks().digest
    assert (read.name, read.model) == ("happy", None)  # the hint is an architecture, no model
    assert files.loads(data, source="happy.gguf", name="sad").name == "sad"


@pytest.mark.parametrize("alignment", [8, 64])
def test_an_alignment_that_the_file_states_is_kept_to(tmp_path: Path, alignment: int) -> None:
    tensors = {"direction.3": numbers(1, -2, 3), "direction.11": numbers(0, 0, 4)}
    writer = GGUFWriter(tmp_path / "aligned.gguf", "controlvector")
    writer.add_custom_alignment(alignment)
    assert files.load(finished(writer, tensors)).digest == blocks().digest


def test_tensors_of_one_layer_are_summed_and_layers_of_zeros_left_out(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {
        "direction.3": numbers(1, 0),
        "direction.3.b": np.array([0.5, 2], np.float16),
        "direction.4": numbers(0, 0),
    }
    read = files.loads(written(tmp_path, tensors), source="x")
    assert read.points == (Point("post_block", 3),)
    assert read.rows[Point("post_block", 3)].tolist() == [1.5, 2]


@pytest.mark.parametrize("point", [Point("pre_attn", 3), Point("post_block", 0)])
def test_what_a_control_vector_cannot_hold_is_not_exported(point: Point) -> None:
    with pytest.raises(VectorError, match=f"{point}.*--points"):
        gguf_format.dumps(vector(rows={point: numbers(1), Point("post_block", 5): numbers(1)}))


def test_scales_in_json_are_multiplied_in(tmp_path: Path) -> None:
    file = tmp_path / "kind.json"
    given = {"post_block": {"1": {"vector": [1.5, -2, 0], "scale": 2}}, "resid_pre": {1: [1, 2, 2]}}
    file.write_text("\ufeff " + json.dumps(given))
    assert files.load(file).digest == vector().digest
    assert files.load(file).name == "kind"
    assert files.load(file, name="other").name == "other"


def test_the_bytes_of_a_file_decide_its_format_and_not_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(gguf_format.dumps(blocks()))
    (tmp_path / "b.gguf").write_bytes(files.dumps(vector()))
    assert files.load(tmp_path / "a.json").digest == blocks().digest
    assert files.load(tmp_path / "b.gguf") == vector()


def test_a_header_whose_length_begins_like_json_is_still_safetensors() -> None:
    data = files.dumps(vector())
    length = int.from_bytes(data[:8], "little")
    longer = length + (ord("{") - length) % 256
    padded = longer.to_bytes(8, "little") + data[8 : 8 + length] + b" " * (longer - length)
    assert padded.startswith(b"{")
    assert files.loads(padded + data[8 + length :], source="x") == vector()


def test_a_folder_gives_every_vector_by_name(tmp_path: Path) -> None:
    files.save(vector("b"), tmp_path / "x.safetensors")
    files.save(blocks(), tmp_path / "a.gguf")
    (tmp_path / ".hidden.json").write_text("{")
    (tmp_path / "notes.txt").write_text("no vector")
    assert [made.name for made in files.load_many(tmp_path)] == ["a", "b"]
    assert [made.name for made in files.load_many(f"{tmp_path}/*.gguf")] == ["a"]
    assert [made.name for made in files.load_many(tmp_path / "x.safetensors")] == ["b"]


def test_two_files_of_one_name_are_refused_with_both(tmp_path: Path) -> None:
    files.save(vector("a"), tmp_path / "x.safetensors")
    files.save(blocks(), tmp_path / "a.gguf")
    with pytest.raises(VectorError, match=r"x\.safetensors.*a\.gguf.*both named a"):
        files.load_many(tmp_path)


def test_saving_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    files.save(vector(), file)
    files.save(vector(scale=2.0), file)
    assert files.load(file) == vector(scale=2.0)
    assert os.listdir(tmp_path) == ["v.safetensors"]


@pytest.mark.parametrize("name", ["v.json", "v", "v.pt"])
def test_a_vector_is_saved_in_a_format_that_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(VectorError, match=r"\.safetensors or \.gguf"):
        files.save(vector(), tmp_path / name)


@pytest.mark.parametrize("place", ["no/such/v.safetensors", "\0.safetensors"])
def test_a_missing_folder_is_named_in_the_error(tmp_path: Path, place: str) -> None:
    with pytest.raises(VectorError, match="not saved"):
        files.save(vector(), tmp_path / place)
    with pytest.raises(VectorError, match="cannot be opened"):
        files.load(tmp_path / place)


def test_other_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "v.pt").write_bytes(b"\x80\x04")
    with pytest.raises(VectorError, match=r"\.safetensors or \.gguf or \.json"):
        files.load(tmp_path / "v.pt")
    with pytest.raises(VectorError, match="0 such files"):
        files.load_many(tmp_path)


def test_a_file_over_the_bound_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    with file.open("wb") as opened:
        opened.truncate(files.MAX_NBYTES + 1)  # sparse: takes no disk
    with pytest.raises(VectorError, match="over"):
        files.load(file)
    assert safetensors_format.MAX_NBYTES <= files.MAX_NBYTES
