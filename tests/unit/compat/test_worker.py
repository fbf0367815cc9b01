"""The compile key in vLLM's config has what the graph depends on, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clairai.compat.engine_core import get_settings
from clairai.compat.worker import _set_compile_key
from clairai.points import expand
from clairai.settings import ResolvedSettings, Settings

POINTS = ("post_block.1",)


def _key(points: tuple[str, ...] = POINTS, **settings: Any) -> object:
    config = SimpleNamespace(
        additional_config={"clairai": {"points": points}, "other": 1},
        device_config=SimpleNamespace(device_type="cuda"),
        quant_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    resolved = ResolvedSettings(Settings(points=points, **settings), expand(points, 4), ())
    _set_compile_key(config, resolved)
    assert config.additional_config["other"] == 1
    return config.additional_config["clairai"]


@pytest.mark.parametrize(
    "change",
    [
        {"points": ("post_block.2",)},
        {"steering": True},
        {"fused": False},
        {"branch": False},
        {"vectors": ("v/",)},
    ],
    ids=str,
)
def test_another_graph_has_another_key(change: dict[str, Any]) -> None:
    assert _key(**change) != _key()


@pytest.mark.parametrize(
    "change",
    [{"ring_mib": 8}, {"capacity": 64}, {"probes": ("p/",)}, {"steer_rows": 9}],
    ids=str,
)
def test_settings_that_do_not_change_the_graph_keep_the_key(change: dict[str, Any]) -> None:
    assert _key(**change) == _key()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_a_config_know_the_settings_too(copied: Callable[[Any], Any]) -> None:
    """vLLM copies a config by its fields."""
    key = copied(_key(ring_mib=8))
    config = SimpleNamespace(additional_config={"clairai": key})
    assert get_settings(config) == Settings(points=POINTS, ring_mib=8)
    assert vars(config) == {"additional_config": {"clairai": key}}  # vLLM refuses other fields
    assert json.loads(json.dumps(key)) == dict(key)  # how vLLM hashes it


def test_vectors_or_the_setting_alone_make_the_same_graph() -> None:
    assert _key(vectors=("v/",)) == _key(steering=True)
