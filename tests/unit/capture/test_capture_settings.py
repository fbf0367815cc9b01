"""The VLLM_ACT_* variables stand for a capture setting; engine cores have places of their own."""

from __future__ import annotations

from typing import Any

import pytest

from clairai.capture.capture_settings import DEFAULTS, OUTDIR, CaptureSettings
from clairai.errors import ConfigError, UnsupportedError
from clairai.settings import Settings, resolve_settings

ON = {"VLLM_ACT_CAPTURE": "1"}


def _setting(environ: dict[str, str], **given: Any) -> CaptureSettings | None:
    return Settings.read(given, environ).capture_settings


@pytest.mark.parametrize("environ", [{}, {"VLLM_ACT_CAPTURE": "0"}, {"VLLM_ACT_CAPTURE": ""}])
def test_without_the_variable_nothing_is_captured(environ: dict[str, str]) -> None:
    assert _setting({**environ, "VLLM_ACT_MODE": "rp8"}, points=["post_block.1"]) is None


def test_the_variable_alone_captures_everything_with_the_defaults() -> None:
    setting = _setting(ON)
    assert setting is not None
    (consumer,) = setting.consumers
    assert (consumer.kind, consumer.options["folder"]) == ("npz", DEFAULTS[OUTDIR])
    assert (setting.encoder.name, setting.encoder.parameters["k"]) == ("rp8", 512)
    assert (setting.sample, setting.when, setting.positions) == (1.0, None, ("all",))
    points = resolve_settings(Settings.read({}, ON), num_layers=3, environ=ON).points
    assert [str(point) for point in points] == ["post_block.0", "post_block.1", "post_block.2"]


@pytest.mark.parametrize("mode", ["rp8", "full8", "topk8"])
@pytest.mark.parametrize("kind", ["sharded", "gathered"])
def test_each_variable_takes_effect(mode: str, kind: str) -> None:
    environ = {
        **ON,
        "VLLM_ACT_MODE": mode,
        "VLLM_ACT_RP_K": "256",
        "VLLM_ACT_RETURN": kind,
        "VLLM_ACT_OUTDIR": "/data/acts",
    }
    setting = _setting(environ)
    assert setting is not None
    assert setting.consumers[0].options["folder"] == "/data/acts"
    assert setting.encoder.name == mode
    assert (setting.encoder.parameters.get("k") == 256) == (mode == "rp8")


def test_points_of_the_settings_are_the_ones_captured() -> None:
    setting = _setting(ON, points=["post_block.1"])
    assert setting is not None
    assert setting.points == ("all",)


def test_settings_take_precedence_over_the_variables() -> None:
    setting = _setting(ON, points=["post_block.1"], capture={"folder": "here"})
    assert setting is not None
    assert (setting.consumers[0].kind, setting.sample) == ("fs", 0.0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VLLM_ACT_CAPTURE", "yes", "set it to one of 0, 1"),
        ("VLLM_ACT_MODE", "raw16", "set it to one of rp8, full8, topk8"),
        ("VLLM_ACT_RETURN", "all", "set it to one of sharded, gathered"),
        ("VLLM_ACT_RP_K", "-1", "a whole number, such as 512"),
        ("VLLM_ACT_RP_K", "0", "k"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _setting({**ON, name: value})


def test_each_of_several_engine_cores_has_places_of_its_own() -> None:
    given = {
        "fs": {"folder": "here", "shard_mib": 8},
        "far": {"kind": "fsspec", "folder": "staged/", "url": "s3://bucket/captures/"},
        "mine": {"kind": "callback", "call": "package.module:folder"},
    }
    setting = CaptureSettings.parse({"consumers": given, "to": ["fs"]})
    assert setting.for_core(None) is setting
    options = [dict(one.options) for one in setting.for_core(3).consumers]
    assert options == [
        {"folder": "here/engine-core-3", "shard_mib": 8},
        {"folder": "staged/engine-core-3", "url": "s3://bucket/captures/engine-core-3"},
        {"call": "package.module:folder"},
    ]
    assert setting.for_core(3).to == ("fs",)
    other = CaptureSettings.parse({"consumers": {"queue": {"folder": "here"}}})
    assert other.for_core(None) is other
    with pytest.raises(UnsupportedError, match="consumer 'queue' of kind 'queue'"):
        other.for_core(0)
