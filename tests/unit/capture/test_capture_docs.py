"""Every example in docs/capture.md is read by the code it is about; its tables name every key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from clairai.capture import capture_settings
from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.consumers import GROUP
from clairai.engine.capture.capture_resolver import CaptureResolver, EngineShape, RequestContext
from clairai.fields import capture, positions
from clairai.fields.request_fields import KEY, parse_fields
from clairai.points import Point
from clairai.proxy import schema
from clairai.proxy.completions.completion_request import read_request
from clairai.proxy.proxy_settings import Limits as ProxyLimits
from clairai.settings import Settings
from clairai.store import folder_consumers
from clairai.store.block_queue import POLICIES
from clairai.store.commit_shards import LAYOUTS
from clairai.store.row_block import MAX_TAGS_NBYTES
from clairai.store.write import COMMITS, WriterLimits
from clairai.wire.capture_messages import CaptureStatus

PAGE: Final = (Path(__file__).resolve().parents[3] / "docs" / "capture.md").read_text()
NUM_LAYERS: Final = 24
PROMPT_LEN: Final = 20
POINTS: Final = tuple(Point("post_block", layer) for layer in range(NUM_LAYERS))


def blocks() -> list[dict[str, Any]]:
    found = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [json.loads(block) for block in found]


def requests() -> list[dict[str, Any]]:
    return [block for block in blocks() if KEY in block or "vllm_xargs" in block]


def settings() -> list[dict[str, Any]]:
    return [block for block in blocks() if "capture" in block]


def test_every_block_is_one_of_these() -> None:
    (handle,) = [b for b in blocks() if b not in requests() and b not in settings()]
    msgspec.convert(handle, schema.CaptureHandle)
    assert (len(requests()), len(settings())) == (4, 3)


@pytest.mark.parametrize("block", settings(), ids=lambda block: str(block)[:60])
def test_a_setting_is_parsed_and_can_be_resolved(block: dict[str, Any]) -> None:
    capturing = Settings.parse(block).capture_settings
    assert capturing is not None
    engine = EngineShape(POINTS, NUM_LAYERS, 64, "bfloat16", {"anger": None})
    CaptureResolver(capturing, engine)


@pytest.mark.parametrize("block", requests(), ids=lambda block: str(block)[:80])
def test_a_capture_field_is_parsed_by_the_engine_and_the_proxy(block: dict[str, Any]) -> None:
    spec = parse_fields(block if KEY in block else block["vllm_xargs"]).capture
    assert spec is not None
    engine = EngineShape(POINTS, NUM_LAYERS, 64, "bfloat16", {})
    resolver = CaptureResolver(CaptureSettings.parse({"folder": "captures"}), engine)
    assert spec.positions is not None
    if not any(isinstance(part, positions.MessagePosition) for part in spec.positions):
        assert resolver.resolve(spec, RequestContext(1, PROMPT_LEN)) is not None
    if KEY in block:
        msgspec.convert(block[KEY], schema.ClairaiFields)
        request = read_request(json.dumps({"messages": [], **block}).encode(), ProxyLimits())
        assert request is not None
        assert request.options.is_captured


def test_the_tables_name_every_key_and_value_of_the_language() -> None:
    known = {
        *capture._KNOWN,
        *capture_settings._KNOWN,
        *positions.SELECTORS,
        "from",
        "to",
        "message",
    }
    consumers = {*folder_consumers.FOLDER_OPTIONS, "layout", "url", "call", "kind"}
    values = {
        *LAYOUTS,
        *POLICIES,
        *COMMITS,
        *get_args(CaptureStatus),
        *capture_settings.MODES,
        *capture_settings.RETURNS,
    }
    fields = {*schema.CaptureHandle.__struct_fields__}
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    spans = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", prose))))
    assert (known | consumers | values | fields) - spans == set()
    assert f"`{GROUP}`" in PAGE


def test_the_defaults_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| (`[^|]+?) \| ([^|]+?) \|", PAGE, re.MULTILINE))
    usual, limits = CaptureSettings.parse({"folder": "x"}), WriterLimits()
    assert rows["`staging_mib`"] == str(usual.staging_mib)
    assert rows["`pending_mib`"] == str(usual.pending_mib)
    assert rows["`sample`"] == f"{usual.sample:g}"
    assert rows["`queue_mib`"] == str(limits.queue_nbytes >> 20)
    assert rows["`reserve_mib`"] == str(limits.reserve_nbytes >> 20)
    sealed = f"{limits.shard_nbytes >> 20}, {limits.seal_after_s:g}"
    assert rows["`shard_mib`, `seal_after_s`"] == sealed
    assert rows["`spill_to`, `spill_mib`"] == f"none, {limits.spill_nbytes >> 20}"
    assert rows["`policy`"] == '`"drop"`'
    assert f"at most {MAX_TAGS_NBYTES} bytes" in PAGE
    assert {rows[f"`{name}`"] for name in capture_settings.DEFAULTS} == {
        f"`{v}`" for v in capture_settings.DEFAULTS.values()
    }


def test_an_example_that_is_wrong_is_noticed() -> None:
    engine = EngineShape(POINTS, NUM_LAYERS, 64, "bfloat16", {})
    with pytest.raises(Exception, match="no probe is named"):
        CaptureResolver(Settings.parse(settings()[1]).capture_settings, engine)
