"""The public surface is what it was, and files that older versions wrote can be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import clairai
from tests.support.row_blocks import values
from tests.surface.make_golden import ENCODERS, POINTS
from tests.surface.surface import FILE, surface

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize("part", sorted(json.loads(FILE.read_text())))
def test_nothing_that_users_rely_on_has_changed(part: str) -> None:
    found = json.loads(json.dumps(surface()))[part]
    assert found == json.loads(FILE.read_text())[part]


def test_a_probe_of_an_older_version_loads() -> None:
    probe = clairai.load(GOLDEN / "joy.safetensors")
    assert (probe.name, str(probe.point)) == ("joy", "post_block.3")
    assert np.array_equal(probe.direction_D, np.linspace(-1, 1, 16, dtype=np.float32))


@pytest.mark.parametrize("stream", range(1, 1 + len(ENCODERS)))
def test_a_capture_of_an_older_version_is_read(stream: int) -> None:
    store = clairai.open(GOLDEN / "captures")
    assert store.request(stream).tags == {"encoder": ENCODERS[stream - 1]}
    for point in POINTS:
        rows_ND = np.asarray(store.rows(stream, point=point))
        assert rows_ND.shape == (4, 8)
        wanted_ND = values(stream, np.arange(4), point)
        assert np.allclose(rows_ND, wanted_ND, rtol=0.1)
        assert stream != 1 or np.array_equal(rows_ND, wanted_ND)  # raw is exact


def test_a_file_written_today_has_the_bytes_it_had(tmp_path: Path) -> None:
    clairai.save(tmp_path / "joy.safetensors", clairai.load(GOLDEN / "joy.safetensors"))
    written = (tmp_path / "joy.safetensors").read_bytes()
    assert written == (GOLDEN / "joy.safetensors").read_bytes()
