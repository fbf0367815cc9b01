"""Many streams at once, some slow, some gone: a short run of bench.proxy_soak."""

from __future__ import annotations

import asyncio

import pytest

from bench.proxy_soak import arguments_of, soak


@pytest.mark.timeout(120)
def test_many_streams_at_once_leave_nothing_behind() -> None:
    given = ["--streams", "40", "--seconds", "4", "--rate", "60", "--gone", "0.2"]
    given += ["--pause", "0.02"]
    report = asyncio.run(soak(arguments_of(given)))
    assert report["faults"] == []
    assert report["ended"]["whole"] > 20
    assert report["ended"]["gone"] > 5
    assert report["ended"]["slow"] > 0
    assert report["scores"] > 1000
