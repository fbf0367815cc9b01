"""Which changes make `make setup` install again, and which do not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import setup
from scripts.environment import Environment, SetupError


def _copied_inputs(folder: Path) -> Path:
    (folder / "scripts").mkdir()
    for name in ("pyproject.toml", setup.ENGINE_FILE, setup.PLAIN_FILE, *setup.SCRIPTS):
        shutil.copy(setup.ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("name", [setup.ENGINE_FILE, setup.PLAIN_FILE, *setup.SCRIPTS])
def test_a_changed_requirement_installs_again(tmp_path: Path, name: str) -> None:
    root = _copied_inputs(tmp_path)
    before = setup.inputs_digest(root, "")
    with (root / name).open("a") as file:
        file.write("# changed\n")
    assert setup.inputs_digest(root, "") != before


def test_a_changed_dependency_installs_again_and_a_lint_rule_does_not(tmp_path: Path) -> None:
    root = _copied_inputs(tmp_path)
    before = setup.inputs_digest(root, "")
    text = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text(text.replace("line-length = 100", "line-length = 99"))
    assert setup.inputs_digest(root, "") == before
    (root / "pyproject.toml").write_text(text.replace("rich>=13", "rich>=14"))
    assert setup.inputs_digest(root, "") != before


def test_another_engine_installs_again(tmp_path: Path) -> None:
    root = _copied_inputs(tmp_path)
    assert setup.inputs_digest(root, "cpu") != setup.inputs_digest(root, "cuda")


def test_nothing_is_installed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installs: list[Environment] = []

    def install(environment: Environment) -> None:
        environment.folder.mkdir(exist_ok=True)
        installs.append(environment)

    monkeypatch.setattr(setup, "_install", install)
    environment = Environment(tmp_path / ".venv")
    for digest in ("a", "a", "b", "b"):
        setup.install_once(environment, digest)
    assert len(installs) == 2


def test_a_failed_install_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(environment: Environment) -> None:
        environment.folder.mkdir(exist_ok=True)
        raise SetupError("no network")

    monkeypatch.setattr(setup, "_install", fail)
    environment = Environment(tmp_path / ".venv")
    for _ in range(2):
        with pytest.raises(SetupError, match="no network"):
            setup.install_once(environment, "a")


def _put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *, body: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("ENGINE", raising=False)


def test_a_working_nvidia_smi_means_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_nvidia_smi(tmp_path, monkeypatch, body="echo 'GPU 0: some card'")
    assert setup.chosen_engine() == "cuda"
    monkeypatch.setenv("ENGINE", "cpu")
    assert setup.chosen_engine() == "cpu"


def test_a_broken_or_absent_nvidia_smi_means_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_nvidia_smi(tmp_path, monkeypatch, body="echo 'no driver'; exit 9")
    assert setup.chosen_engine() == "cpu"
    (tmp_path / "nvidia-smi").unlink()
    assert setup.chosen_engine() == "cpu"


def test_an_unknown_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE", "tpu")
    with pytest.raises(SetupError, match="cpu, cuda or unset"):
        setup.chosen_engine()
