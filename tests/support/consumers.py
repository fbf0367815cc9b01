"""Capture consumers opened from settings, and rows to feed them with."""

from __future__ import annotations

from typing import Any

from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.consumers import Consumer, EngineInfo, open_consumers
from tests.support.row_blocks import WIDTH, block

ENGINE = EngineInfo("tiny", "v1", "float32", WIDTH, ("post_block.3",))


def open_consumer(name: str, **options: Any) -> Consumer:
    specs = CaptureSettings.parse({"consumers": {name: options}}).consumers
    return open_consumers(specs, ENGINE)[name]


def feed(consumer: Consumer) -> Consumer:
    """Offer three rows of one request, with tags and steering."""
    consumer.begin(1, tags={"a": 1}, steering={"vector": "calm"})
    assert consumer.offer(block(1))
    consumer.finish(1)
    return consumer
