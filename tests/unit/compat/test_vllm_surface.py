"""Every function of vLLM that we wrap or call is there, with the parameters we count on.

vllm_surface.json holds what each release has of them; scripts/vllm_surface.py makes it.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.matrix import VERSIONS
from scripts.vllm_surface import NEEDS, STORE, Surface, surface, unmet, version_of

STORED: dict[str, Surface] = json.loads(STORE.read_text())


def installed() -> Path:
    """The folder of vLLM's package; it is read and not imported."""
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def test_every_release_that_is_served_is_stored() -> None:
    assert sorted(STORED) == ["0.26.0", *VERSIONS]


@pytest.mark.parametrize("version", STORED)
def test_a_release_has_all_that_we_wrap_call_and_read(version: str) -> None:
    assert unmet(STORED[version]) == []
    assert STORED[version].keys() == {need.key for need in NEEDS}


def test_the_installed_vllm_has_all_that_we_need() -> None:
    assert unmet(surface(installed())) == []


def test_the_installed_vllm_is_as_its_release_was_stored() -> None:
    version = version_of(installed())
    if version not in STORED:
        pytest.skip(f"{version} is not stored; python -m scripts.vllm_surface adds it")
    assert surface(installed()) == STORED[version]


RUNNER = """
class GPUModelRunner:
    def __init__(self, vllm_config, device):
        self.device = device
        self.positions: object = None

    @property
    def input_batch(self): ...

    async def {name}(self, {parameters}): ...
"""


def tree(folder: Path, *, name: str, parameters: str) -> Surface:
    """A vLLM of one class, with one method of our choice."""
    file = folder / "v1/worker/gpu_model_runner.py"
    file.parent.mkdir(parents=True)
    file.write_text(RUNNER.format(name=name, parameters=parameters))
    return surface(folder)


KEY = "v1/worker/gpu_model_runner.py: GPUModelRunner._prepare_inputs"


@pytest.mark.parametrize(
    ("name", "parameters", "fault"),
    [
        ("_prepare_input", "scheduler_output, num_scheduled_tokens", "is gone"),
        ("_prepare_inputs", "num_scheduled_tokens, scheduler_output", "does not begin with"),
        ("_prepare_inputs", "scheduler_output, *, num_scheduled_tokens", "does not begin with"),
        ("_prepare_inputs", "scheduler_output", "does not begin with"),
    ],
)
def test_a_method_that_was_renamed_or_changed_is_named(
    tmp_path: Path, name: str, parameters: str, fault: str
) -> None:
    found = tree(tmp_path, name=name, parameters=parameters)
    faults = [line for line in unmet(found) if line.startswith(KEY)]
    assert [fault in line for line in faults] == [True]


def test_a_method_that_only_takes_more_than_before_is_served(tmp_path: Path) -> None:
    parameters = "scheduler_output, num_scheduled_tokens, x=1, *, y, **z"
    found = tree(tmp_path, name="_prepare_inputs", parameters=parameters)
    assert not any(line.startswith(KEY) for line in unmet(found))


def test_attributes_and_properties_of_a_class_are_found_wherever_they_are_set(
    tmp_path: Path,
) -> None:
    found = tree(tmp_path, name="get_model", parameters="key=None")
    prefix = "v1/worker/gpu_model_runner.py: GPUModelRunner."
    assert found == {
        f"{prefix}device": "attribute",
        f"{prefix}positions": "attribute",
        f"{prefix}input_batch": "attribute",
        f"{prefix}get_model": "self, key=",
    }


def test_a_function_we_call_that_asks_for_more_is_named(tmp_path: Path) -> None:
    found = tree(tmp_path, name="get_model", parameters="which")
    assert any("cannot be called without which" in line for line in unmet(found))


def test_a_release_that_differs_from_what_was_stored_would_be_noticed() -> None:
    changed = dict(STORED["0.32.0"])
    changed[KEY] = "self, scheduler_output, num_scheduled_tokens, more="
    assert unmet(changed) == []  # still served
    assert changed != STORED["0.32.0"]  # and yet seen
