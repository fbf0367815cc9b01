"""A completion process is alive as long as it can answer, and score what it answers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from clairai.proxy.processes.completion_process import ProcessLink
from clairai.proxy.processes.shared_counts import SharedCounts


def test_a_process_whose_reader_of_the_ring_hangs_does_not_beat() -> None:
    first, fd = SharedCounts.create(2)
    own = SharedCounts(fd, number=1, num_processes=2)
    os.close(fd)
    feed = SimpleNamespace(is_stalled=True)
    proxy: Any = SimpleNamespace(feed=feed)
    link: Any = SimpleNamespace(is_open=False)
    process = ProcessLink(link, proxy, own, times=link)
    process.beat(1)
    assert first.last_beat_s(1) == 0
    feed.is_stalled = False
    process.beat(2)
    assert first.last_beat_s(1) > 0
