"""Settings as users write them, and environments: what is tapped, or what to change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ConfigError, PointError, ProbeError, quote
from clairai.library.config import config
from clairai.points import MAX_LAYER
from clairai.probe.files import save
from clairai.settings import (
    DISABLE_VARIABLE,
    ResolvedSettings,
    Settings,
    SpoolSettings,
    is_disabled,
    resolve_settings,
)
from tests.support.probes import probe

NUM_LAYERS = 4


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ResolvedSettings:
    return resolve_settings(Settings.parse(given), num_layers=NUM_LAYERS, environ=environ or {})


def points(found: ResolvedSettings) -> list[str]:
    return [str(point) for point in found.points]


def probe_file(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(json.dumps({"vector": [1.0, 2.0, 3.0]}))
    return file


def test_an_empty_object_is_the_defaults() -> None:
    assert Settings.parse({}) == Settings()
    assert Settings().as_dict() == {}


def test_one_text_means_a_list_of_one() -> None:
    one = Settings.parse({"points": "post_block.1", "probes": "folder"})
    listed = Settings.parse({"points": ["post_block.1"], "probes": ["folder"]})
    assert one == listed
    assert (one.points, one.probes) == (("post_block.1",), ("folder",))


@pytest.mark.parametrize("given", [None, [], "post_block.1", 3, True, [("points", "x")]], ids=repr)
def test_settings_that_are_no_object_are_refused_with_how_to_make_one(given: object) -> None:
    with pytest.raises(ConfigError, match=r"clairai\.config\("):
        Settings.parse(given)


@pytest.mark.parametrize(
    "given",
    [{"point": "x"}, {"points": "a", "Probes": "b"}, {1: 2, "points": "a"}, {3: 1, "zz": 2},
     {10**5000: 1}, {"x" * 10**6: 1}],
    ids=quote,
)  # fmt: skip
def test_an_unknown_key_is_refused_with_those_known(given: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=r"unknown clairai .*known: points, probes") as e:
        Settings.parse(given)
    assert len(str(e.value)) < 300


def test_the_size_of_a_ring_may_be_left_to_the_engine() -> None:
    assert Settings.parse({}).ring_mib is Settings.parse({"ring_mib": None}).ring_mib is None


@pytest.mark.parametrize(("name", "low", "high"), [("capacity", 1, 1024), ("ring_mib", 1, 65536)])
def test_a_number_is_served_from_its_lowest_to_its_highest_and_no_further(
    name: str, low: int, high: int
) -> None:
    for value in (low, high):
        assert getattr(Settings.parse({name: value}), name) == value
    refused: tuple[object, ...] = (low - 1, high + 1, True, 1.0, "16", [], 10**5000)
    for wrong in refused:
        with pytest.raises(ConfigError, match=f"{name} must be .* from {low} to {high}"):
            Settings.parse({name: wrong})


@pytest.mark.parametrize("name", ["points", "probes"])
@pytest.mark.parametrize("value", [None, 3, [1], ["a", None], {"a": 1}, b"xy", [["a"]]], ids=repr)
def test_what_is_neither_text_nor_texts_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a text or a list of texts"):
        Settings.parse({name: value})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("fused", 0, "true or false"),
        ("fused", None, "true or false"),
        ("allow_untested_vllm", 1, "true or false"),
        ("allow_untested_vllm", "yes", "true or false"),
        ("runtime_dir", 3, "a path, as text"),
        ("runtime_dir", ["/run"], "a path, as text"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be {reason}"):
        Settings.parse({name: value})


@pytest.mark.parametrize("home", ["host", "device"])
def test_a_ring_lies_in_host_or_device_memory(home: str) -> None:
    assert Settings.parse({"ring_home": home}).ring_home == home


@pytest.mark.parametrize("home", ["Host", "gpu", "", None, 3, ["host"]], ids=repr)
def test_another_place_is_refused_with_those_known(home: object) -> None:
    with pytest.raises(ConfigError, match=r"ring_home is .*; use one of host, device"):
        Settings.parse({"ring_home": home})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (False, None),
        (True, SpoolSettings()),
        ({}, SpoolSettings()),
        ({"disk_gib": 2, "folder": "/d"}, SpoolSettings(disk_gib=2, folder="/d")),
    ],
)
def test_scores_are_kept_as_the_settings_say(given: Any, expected: SpoolSettings | None) -> None:
    assert Settings.parse({"scores": given}).spool_settings == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (3, "scores must be true, false or an object, got 3"),
        ({"disk": 2}, "unknown key 'disk' of scores; known: memory_mib, disk_gib, folder"),
        ({"disk_gib": 0}, "scores disk_gib must be a whole number from 1 to 65536, got 0"),
        ({"memory_mib": 1.5}, "scores memory_mib must be a whole number"),
        ({"folder": 1}, "scores folder must be a path, as text"),
    ],
)
def test_scores_that_cannot_be_kept_so_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Settings.parse({"scores": given})


def test_config_makes_the_folder_of_scores_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    made = config(points="post_block.0", scores={"folder": "kept"})
    assert made["clairai"]["scores"] == {"folder": "/kept"}


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().capacity = 3  # type: ignore[misc]


anything = st.builds(
    Settings,
    points=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    probes=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    capacity=st.integers(1, 1024),
    ring_mib=st.integers(1, 65536),
    ring_home=st.sampled_from(["host", "device"]),
    fused=st.booleans(),
    runtime_dir=st.none() | st.text(max_size=5),
    allow_untested_vllm=st.booleans(),
)


@settings(derandomize=True, deadline=None)
@given(anything)
def test_settings_come_back_from_their_own_json(made: Settings) -> None:
    assert Settings.parse(json.loads(json.dumps(made.as_dict()))) == made


@settings(derandomize=True, deadline=None)
@given(anything)
def test_the_json_form_names_only_what_differs_from_the_defaults(made: Settings) -> None:
    differing = {
        field.name
        for field in fields(Settings)
        if getattr(made, field.name) != getattr(Settings(), field.name)
    }
    assert set(made.as_dict()) == differing


def test_config_makes_paths_absolute_and_needs_no_other_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = config(probes=["a", tmp_path / "b"], points="post_block.1", capacity=2)
    assert list(made) == ["clairai"]
    assert Settings.parse(made["clairai"]) == Settings(
        points=("post_block.1",), probes=(f"{tmp_path}/a", f"{tmp_path}/b"), capacity=2
    )


def test_points_come_from_the_probes_when_none_are_given(tmp_path: Path) -> None:
    save(tmp_path / "p.safetensors", probe("p"))
    probe_file(tmp_path, "enc_3_q.json")
    found = resolve({"probes": str(tmp_path)})
    assert points(found) == ["post_block.1", "post_block.3"]
    assert [made.name for made in found.probes] == ["p", "q"]


def test_points_that_are_given_stay_the_only_ones(tmp_path: Path) -> None:
    save(tmp_path / "p.safetensors", probe("p"))
    found = resolve({"probes": str(tmp_path), "points": ["pre_attn.0-1"]})
    assert points(found) == ["pre_attn.0", "pre_attn.1"]
    assert len(found.probes) == 1


def test_patterns_are_expanded_for_this_model() -> None:
    assert len(resolve({"points": "all"}).points) == 3 * NUM_LAYERS
    with pytest.raises(PointError, match="this model has 4 layers"):
        resolve({"points": "post_block.4"})


def test_target_layer_alone_taps_the_stream_after_that_block() -> None:
    assert points(resolve({}, {"TARGET_LAYER": "2"})) == ["post_block.2"]


def test_target_layer_places_a_probe_whose_file_name_says_no_layer(tmp_path: Path) -> None:
    file = probe_file(tmp_path, "calm.json")
    with pytest.raises(ProbeError, match="does not say which layer"):
        resolve({"probes": str(file)})
    found = resolve({"probes": str(file)}, {"TARGET_LAYER": "3"})
    assert (points(found), found.probes[0].name) == (["post_block.3"], "calm")


def test_settings_outrank_target_layer() -> None:
    assert points(resolve({"points": "pre_attn.0"}, {"TARGET_LAYER": "2"})) == ["pre_attn.0"]


@pytest.mark.parametrize("value", ["-1", "two", "1.0", " 1"], ids=repr)
def test_a_target_layer_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="TARGET_LAYER must be a layer number"):
        resolve({}, {"TARGET_LAYER": value})


def test_a_target_layer_the_model_does_not_have_is_refused() -> None:
    for value in (NUM_LAYERS, MAX_LAYER):
        with pytest.raises(PointError, match="this model has 4 layers"):
            resolve({}, {"TARGET_LAYER": str(value)})


@pytest.mark.parametrize("root", [".", "src"])
def test_probe_model_finds_the_folder_of_the_models_own_name(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_file(tmp_path / root / "probes" / "Tiny-1B", "enc_1_calm.json")
    monkeypatch.chdir(tmp_path)
    for model in ("org/Tiny-1B", "Tiny-1B", "/models/Tiny-1B/"):
        found = resolve({}, {"PROBE_MODEL": model})
        assert [made.name for made in found.probes] == ["calm"]
        assert points(found) == ["post_block.1"]


@pytest.mark.parametrize(
    ("folder", "model"),
    [
        ("Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
        ("Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama-3.1-8b-instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
    ],
)
def test_a_folder_may_have_or_lack_the_vendors_word_of_the_models_name(
    folder: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_file(tmp_path / "src" / "probes" / folder, "enc_1_calm.json")
    probe_file(tmp_path / "src" / "probes" / "Llama-3.1-8B", "enc_2_other.json")
    monkeypatch.chdir(tmp_path)
    assert [made.name for made in resolve({}, {"PROBE_MODEL": model}).probes] == ["calm"]


def test_target_layer_picks_among_the_probes_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("enc_1_calm.json", "enc_2_calm_too.json", "enc_2_loud.json"):
        probe_file(tmp_path / "probes" / "Tiny", name)
    monkeypatch.chdir(tmp_path)
    environ = {"PROBE_MODEL": "org/Tiny"}
    assert points(resolve({}, environ)) == ["post_block.1", "post_block.2"]
    found = resolve({}, environ | {"TARGET_LAYER": "2"})
    assert ([made.name for made in found.probes], points(found)) == (
        ["calm_too", "loud"],
        ["post_block.2"],
    )
    with pytest.raises(ConfigError, match=r"TARGET_LAYER is 3, .* at layer 1, 2; set it to one"):
        resolve({}, environ | {"TARGET_LAYER": "3"})


def test_probes_in_the_settings_outrank_probe_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = probe_file(tmp_path, "enc_0_mine.json")
    found = resolve({"probes": str(file)}, {"PROBE_MODEL": "nobody/nothing"})
    assert [made.name for made in found.probes] == ["mine"]


def test_a_probe_model_without_a_folder_names_the_folders_it_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no folder probes/Tiny or src/probes/Tiny"):
        resolve({}, {"PROBE_MODEL": "org/Tiny"})
    with pytest.raises(ConfigError, match="nothing to tap"):
        resolve({}, {"PROBE_MODEL": ""})


def test_nothing_to_tap_says_all_three_ways_out() -> None:
    with pytest.raises(ConfigError, match=r'"points" .*"probes".*TARGET_LAYER'):
        resolve({})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, False), ({DISABLE_VARIABLE: ""}, False), ({DISABLE_VARIABLE: "0"}, False),
     ({DISABLE_VARIABLE: "1"}, True), ({DISABLE_VARIABLE: "true"}, True)],
)  # fmt: skip
def test_the_switch_is_off_unless_it_is_set(
    environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_disabled(environ) is expected
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert is_disabled() is expected


def test_one_line_says_what_is_served_and_where_readers_attach() -> None:
    few = resolve_settings(Settings(points=("post_block.1",)), num_layers=8, environ={})
    assert few.describe("m", Path("/run/me"), (64 << 20) - 4096) == (
        "clairai taps m at post_block.1: 0 probes; a ring of 64 MiB in host memory, "
        "readers attach in /run/me"
    )
    many = resolve_settings(
        Settings(points=("post_block.*",), steering=True), num_layers=8, environ={}
    )
    said = many.describe("m", Path("/run/me"), 8 << 20)
    assert "at post_block.0 to post_block.7 (8 points): 0 probes, steering with 0 vectors;" in said
    assert "a ring of 8 MiB" in said
