"""Errors in a model or its settings that are found before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clairai.errors import CapacityError, ConfigError, PointError, ProbeError
from clairai.launch.preflight import check_before_start, check_model
from clairai.probe.files import save
from clairai.settings import Settings
from tests.support.probes import probe

SMALL: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 3}


def _model(folder: Path, config: dict[str, Any] = SMALL) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _check(model: str, *arguments: str, **settings: Any) -> None:
    check_before_start(model, Settings(**settings), arguments, {})


def test_a_model_and_probes_that_fit_pass(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", probe("a", model="another name of it"))
    model = _model(tmp_path / "model")
    _check(model, probes=(str(tmp_path / "a.safetensors"),))
    # The same tensor under another name: only the engine knows.
    _check(model, probes=(str(tmp_path / "a.safetensors"),), points=("pre_attn.2",))


def test_a_layer_that_the_model_does_not_have_is_found(tmp_path: Path) -> None:
    with pytest.raises(PointError):
        _check(_model(tmp_path / "model"), points=("post_block.4",))
    _check(_model(tmp_path / "model"), "--hf-overrides={}", points=("post_block.4",))
    _check(_model(tmp_path / "model", {"text_config": SMALL}), points=("post_block.3",))
    with pytest.raises(PointError):
        _check(_model(tmp_path / "model", {"text_config": SMALL}), points=("post_block.4",))
    _check(_model(tmp_path / "model", {"n_layer": 4}), points=("post_block.4",))


def test_a_probe_of_another_width_is_found(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", probe("a"))
    model = _model(tmp_path / "model", SMALL | {"hidden_size": 5})
    with pytest.raises(ProbeError, match="has width 3"):
        _check(model, probes=(str(tmp_path / "a.safetensors"),))


def test_more_probes_than_there_is_room_for_are_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.safetensors", probe(name))
    with pytest.raises(CapacityError):
        _check(_model(tmp_path / "model"), probes=(str(tmp_path),), capacity=1)


def test_a_file_that_is_no_probe_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(ProbeError):
        _check("org/name", probes=(str(tmp_path / "a.safetensors"),))


def test_nothing_to_tap_is_found() -> None:
    with pytest.raises(ConfigError, match="nothing to tap"):
        _check("org/name")


@pytest.mark.parametrize("model", ["/no/such/model", "./models/x", "~/model", "a/b/c"])
def test_a_path_that_leads_nowhere_is_found(model: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        check_model(model, {})


def test_a_folder_without_a_model_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_model(str(tmp_path), {})


def test_a_model_that_may_not_be_fetched_and_is_not_here_is_found() -> None:
    name = "no-such-organisation/no-such-model"
    check_model(name, {})
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        check_model(name, {"HF_HUB_OFFLINE": "1"})
    check_model("s3://bucket/no-such-model", {"HF_HUB_OFFLINE": "1"})
