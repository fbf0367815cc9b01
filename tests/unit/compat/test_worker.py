"""The compile key has what the graph depends on, and nothing else; taps are of the right kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clairai.compat import model_ops
from clairai.compat.engine_core import get_settings
from clairai.compat.model_sites import Sites
from clairai.compat.pipeline_stages import Stage
from clairai.compat.worker import _attach_taps, _set_compile_key, _tap_sites
from clairai.engine.score.score_tables import ScoreTables, StashSite
from clairai.points import Point, expand
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe
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


# --- taps ---

SITES = Sites(
    {"post_block.1": nn.Identity(), "post_block.2": nn.Identity()}, frozenset(), {}, {}, 4, 8
)


def _tables(device: str) -> ScoreTables:
    """Tables on a CPU that say they are on `device`."""
    names = tuple(SITES.modules)
    tables = ScoreTables(names, width=8, capacity=1, max_tokens=16, device="cpu", stash_rows=4)
    tables.device = torch.device(device)
    return tables


@pytest.mark.parametrize(("device", "num_stashed"), [("cpu", 0), ("cuda", 1)])
def test_taps_behind_vllms_norms_leave_their_rows_in_the_stash_of_a_gpu(
    device: str, num_stashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[str] = []
    monkeypatch.setattr(model_ops, "attach_tap", lambda *_, name, **__: attached.append(name))
    named: dict[str, Any] = {}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=named))
    tables = _tables(device)
    _attach_taps(config, SITES, tables, {"post_block.1"})  # the other one's norm is ours
    assert attached == [*named] == ["clairai.post_block.1"]
    assert isinstance(named["clairai.post_block.1"], StashSite) == bool(num_stashed)
    tables.device = torch.device("cpu")
    probe = Probe("p", Point("post_block", 1), np.ones(8, np.float32))
    tables.load(EngineBank.empty((probe.point,), 1, 8, "toy").add([probe]))
    assert tables.num_stashed == num_stashed


@pytest.mark.parametrize(
    ("device", "graph_size", "max_tokens", "num_rows"),
    [
        ("cuda", 256, 2048, 512),
        ("cuda", 1024, 2048, 1024),  # every captured graph fits
        ("cuda", None, 100, 100),
        ("cpu", 256, 2048, 0),
    ],
)
def test_a_gpu_has_a_stash_whether_or_not_its_norms_are_ours(
    device: str,
    graph_size: int | None,
    max_tokens: int,
    num_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_ops, "attach_tap", lambda *_, **__: None)
    compilation = SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=graph_size)
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        quant_config="fp8",
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=compilation,
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    runner = SimpleNamespace(max_num_tokens=max_tokens, device="cpu", model_memory_usage=0)
    worker = SimpleNamespace(vllm_config=config, model_runner=runner)
    resolved = ResolvedSettings(Settings(points=POINTS), expand(POINTS, 4), ())
    sites = replace(SITES, site_of={Point("post_block", 1): "post_block.1"})
    tables = _tap_sites(worker, resolved, sites, Stage(0, 1, is_publisher=True))
    assert tables.stash_SRD.shape == (1, num_rows, 8)
    assert runner.model_memory_usage == tables.nbytes >= tables.stash_SRD.nbytes
