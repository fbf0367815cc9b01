"""The rows of a request as one file, whole or in any range of bytes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from clairai.errors import StoreError
from clairai.store import bundle as bundles
from clairai.store import shard
from clairai.store.bundle import Bundle, bundle
from clairai.store.commit_shards import LAYOUTS
from clairai.store.read import Store
from clairai.store.read import open as open_store
from clairai.store.row_block import RowBlock
from clairai.store.write import Writer
from clairai.wire.ring_messages import AUDIO, MEDIA_SHIFT, RECOMPUTED
from tests.support.row_blocks import block, values

POINTS = ("pre_attn.0", "post_block.3")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two requests in turns, in several shards; one row of the first was computed twice."""
    with Writer(tmp_path / "s") as writer:
        writer.begin(1, tags={"a": 1})
        for start in (0, 3):
            for point, stream in product(POINTS, (1, 2)):
                writer.offer(_measured(block(stream, start=start, point=point), start))
            writer.flush()
        again = block(1, 1, start=2, point=POINTS[0])
        again.rows_N["flags"] |= RECOMPUTED | AUDIO << MEDIA_SHIFT
        writer.offer(again)
    return open_store(tmp_path / "s")


def _measured(made: RowBlock, start: int) -> RowBlock:
    return RowBlock(
        made.origin, made.point, made.rows_N, made.arrays, {"cosine_min": 0.9 + start / 90}
    )


def _whole(made: Bundle) -> bytes:
    return b"".join(made.part(0, made.nbytes))


def test_the_file_is_a_shard_with_every_row_of_the_request_once(store: Store) -> None:
    made = bundle(store, 1)
    data = _whole(made)
    assert len(data) == made.nbytes
    found = load(data)
    assert found["stream"].tolist() == [1] * 12
    assert found["position"].tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert found["flags"].tolist() == [0, 0, AUDIO << MEDIA_SHIFT] + [0] * 9
    expected = [values(1, np.arange(6), point) for point in POINTS]
    assert np.array_equal(found["rows.values"], np.concatenate(expected))
    opened = shard.open_safetensors(
        "a bundle",
        memoryview(data),
        head_nbytes=len(made.start),
        start_digest=made.digest,
        nbytes=len(data),
    )
    assert all(len(opened.array(name)) == 12 for name in opened.tensors.infos)
    assert opened.head.notes["0000000000000001"].tags == '{"a":1}'
    assert opened.head.fidelity == {"cosine_min": (0.9, 0.9 + 3 / 90)}


def test_the_same_rows_give_the_same_bytes(store: Store, tmp_path: Path) -> None:
    first, again = bundle(store, 1), bundle(open_store(tmp_path / "s"), 1)
    assert (first.digest, _whole(first)) == (again.digest, _whole(again))
    assert bundle(store, 2).digest != first.digest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_any_range_is_that_part_of_the_file(store: Store, data: st.DataObject) -> None:
    made = bundle(store, 1)
    first = data.draw(st.integers(0, made.nbytes))
    end = data.draw(st.integers(first, made.nbytes))
    assert b"".join(made.part(first, end)) == _whole(made)[first:end]


def test_fewer_points_may_be_asked_for_and_others_are_refused(store: Store) -> None:
    found = load(_whole(bundle(store, 1, points=["post_block.3"])))
    assert len(found["stream"]) == 6
    with pytest.raises(StoreError, match=r"no rows at post_block.4 were kept; there are pre_attn"):
        bundle(store, 1, points=["post_block.4"])
    with pytest.raises(StoreError, match="has no such rows"):
        bundle(store, 1, choice=3)
    with pytest.raises(StoreError, match="no rows of stream"):
        bundle(store, 3)


def test_too_much_for_one_file_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_NBYTES", 300)
    with pytest.raises(StoreError, match="these rows have 384 bytes, and one file has 300"):
        bundle(store, 1)
    assert bundle(store, 1, points=["pre_attn.0"]).nbytes > 0


def test_every_layout_gives_the_same_rows(tmp_path: Path) -> None:
    found = []
    for layout in LAYOUTS:
        with Writer(tmp_path / layout, layout=layout) as writer:
            for point in POINTS:
                writer.offer(block(1, point=point))
            writer.finish(1)
        found.append(_whole(bundle(open_store(tmp_path / layout), 1)))
    assert set(found) == {found[0]}
