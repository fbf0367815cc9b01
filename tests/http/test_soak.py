"""Many streams at once, some slow, some gone: a short run of bench.proxy_soak."""

from __future__ import annotations

import asyncio

import pytest

from bench.proxy_soak import arguments_of, soak


@pytest.mark.timeout(120)
def test_many_streams_at_once_leave_nothing_behind() -> None:
    # As much work on a slow machine as on a fast one: 40 clients ask twice, then twice again.
    given = ["--streams", "40", "--seconds", "0", "--requests", "2", "--rate", "60"]
    given += ["--gone", "0.2", "--pause", "0.02"]
    report = asyncio.run(soak(arguments_of(given)))
    assert report["faults"] == []
    assert report["ended"] == {"whole": 104, "gone": 32, "slow": 24}  # as the clients' seeds say
    assert report["tokens"] == 60 * (104 + 24)
    assert report["scores"] + report["scores_lost"] > report["tokens"] / 2  # 4 in 5 asked for them
