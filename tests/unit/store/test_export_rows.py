"""Exports hold every row once, as the libraries read them back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from clairai.cli.commands import app
from clairai.errors import ConfigError, StoreError
from clairai.store import export_rows
from clairai.store.export_rows import export_datasets, export_lance, export_zarr
from clairai.store.read import Store
from clairai.store.read import open as open_store
from clairai.store.write import Writer
from clairai.wire.ring_messages import IMAGE, MEDIA_SHIFT, RECOMPUTED
from tests.support.row_blocks import block, values

POINTS = ("pre_attn.0", "post_block.3")
LAST = 2**64 - 1  # a stream that no signed number holds; its rows have the values of another's
VALUES_OF = {3: 3, LAST: 5}
NUM_ROWS = 11  # of each request at each point; not a divisor of a batch
Columns = dict[str, Any]
Export = Callable[[Store, Path], Iterator[int]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(export_rows, "BATCH_ROWS", 8)
    with Writer(tmp_path / "s") as writer:
        writer.begin(LAST, tags={"label": 1}, steering={"vector": "calm"})
        for stream, likeness in VALUES_OF.items():
            for point in POINTS:
                made = block(likeness, NUM_ROWS, point=point)
                made.rows_N["stream"] = stream
                made.rows_N["flags"][1] = IMAGE << MEDIA_SHIFT
                writer.offer(made)
        again = block(3, 1, point=POINTS[0])
        again.rows_N["flags"] |= RECOMPUTED
        writer.offer(again)
    return open_store(tmp_path / "s")


def _datasets(out: Path) -> tuple[Columns, list[Columns]]:
    from datasets import load_from_disk

    rows = load_from_disk(str(out / "rows")).with_format("numpy")
    return rows[:], load_from_disk(str(out / "requests")).to_list()


def _lance(out: Path) -> tuple[Columns, list[Columns]]:
    import lance

    table = lance.dataset(str(out / "rows.lance")).to_table()
    columns = {name: table[name].to_numpy() for name in table.column_names}
    columns["values"] = np.stack(columns["values"])
    return columns, lance.dataset(str(out / "requests.lance")).to_table().to_pylist()


def _zarr(out: Path) -> tuple[Columns, list[Columns]]:
    import zarr

    group: Any = zarr.open_group(str(out), mode="r")
    columns: Columns = {name: group[name][:] for name in group.array_keys()}
    columns["point"] = np.array(group.attrs["points"])[columns["point"]]
    columns["stream"] = [f"{stream:016x}" for stream in columns["stream"].tolist()]
    requests: Any = group.attrs["requests"]
    return columns, requests


KINDS: list[tuple[Export, Callable[[Path], tuple[Columns, list[Columns]]]]] = [
    (export_datasets, _datasets),
    (export_lance, _lance),
    (export_zarr, _zarr),
]


@pytest.mark.parametrize(("export", "read"), KINDS, ids=["datasets", "lance", "zarr"])
def test_the_library_reads_back_every_row_once(
    store: Store, tmp_path: Path, export: Export, read: Callable[[Path], Any]
) -> None:
    assert sum(export(store, tmp_path / "out")) == 4 * NUM_ROWS
    rows, requests = read(tmp_path / "out")
    expected = [(s, p, i) for s in VALUES_OF for p in POINTS for i in range(NUM_ROWS)]
    keys = zip(rows["stream"], rows["point"], rows["position"].tolist(), strict=True)
    assert [(int(stream, 16), str(point), at) for stream, point, at in keys] == expected
    wanted: NDArray[np.float32] = np.concatenate(
        [values(VALUES_OF[s], np.array([i]), p) for s, p, i in expected]
    )
    assert np.array_equal(rows["values"], wanted)
    assert rows["token_id"].tolist() == [i + 7 for _, _, i in expected]
    assert set(rows["phase"].tolist()) == {1}
    assert rows["media"].tolist() == [IMAGE if i == 1 else 0 for _, _, i in expected]
    by_stream = {int(one["stream"], 16): one for one in requests}
    assert by_stream.keys() == {3, LAST}
    assert json.loads(by_stream[LAST]["tags"]) == {"label": 1}
    assert json.loads(by_stream[LAST]["steering"]) == {"vector": "calm"}
    assert (by_stream[3]["encoder"], by_stream[3]["model"]) == ("raw", "tiny")


@pytest.mark.parametrize("export", [export for export, _ in KINDS])
def test_an_export_that_fails_leaves_nothing_behind(
    store: Store, tmp_path: Path, export: Export
) -> None:
    assert store.shards
    (shard,) = (tmp_path / "s").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged"):
        list(export(open_store(tmp_path / "s"), tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_an_existing_folder_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="already exists"):
        list(export_zarr(store, tmp_path))


def test_rows_of_two_widths_do_not_fit_one_table(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
        writer.offer(block(2, encoder="rp8"))
    with pytest.raises(StoreError, match=r"2 widths when they are decoded \(8, 512\)"):
        export_rows.outline_store(open_store(tmp_path / "s"))


def test_an_empty_folder_has_nothing_to_export(tmp_path: Path) -> None:
    Writer(tmp_path / "s").close()
    with pytest.raises(StoreError, match="nothing to export"):
        export_rows.outline_store(open_store(tmp_path / "s"))


@pytest.mark.parametrize(
    ("export", "library", "extra"),
    [
        (export_datasets, "datasets", "datasets"),
        (export_lance, "lance", "lance"),
        (export_zarr, "zarr", "zarr"),
    ],
)
def test_a_missing_library_is_named(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    export: Export,
    library: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"clairai\[{extra}\]"):
        list(export(store, tmp_path / "out"))


@pytest.mark.parametrize("kind", ["datasets", "lance", "zarr"])
def test_the_command_says_how_many_rows_it_wrote(store: Store, tmp_path: Path, kind: str) -> None:
    assert store.shards
    result = CliRunner().invoke(
        app, ["capture", "export", kind, str(tmp_path / "s"), str(tmp_path / "out")]
    )
    assert (result.exit_code, f"{4 * NUM_ROWS} rows in" in result.output) == (0, True)
