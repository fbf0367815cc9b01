"""Scores are added up for those observers that read sums."""

from __future__ import annotations

from clairai.proxy.observe.log_lines import AccessLog
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.observe.observer import reads_probes
from clairai.proxy.observe.telemetry import Telemetry


def test_the_observers_of_every_proxy_read_no_sums() -> None:
    assert not reads_probes(AccessLog())
    assert not reads_probes(Metrics())


def test_one_that_does_not_say_reads_them() -> None:
    assert reads_probes(Telemetry.__new__(Telemetry))
