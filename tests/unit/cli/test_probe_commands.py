"""What the commands `clairai probes` print and write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from clairai.cli.commands import app
from clairai.errors import ConfigError, ProbeError
from clairai.probe.files import load, save
from clairai.wire import control_messages
from tests.support.probes import probe


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["probes", *map(str, arguments)])


def test_a_folder_of_probes_is_listed_with_all_columns(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", probe("a", threshold=0.5, auroc=0.975, model="toy"))
    save(tmp_path / "b.safetensors", probe("b", activation="sigmoid"))
    titles, first, second = _run("list", tmp_path).output.splitlines()
    assert " ".join(titles.split()) == "name point width activation threshold auroc model digest"
    assert first.split()[:7] == ["a", "post_block.1", "3", "none", "0.5", "0.975", "toy"]
    assert second.split()[:7] == ["b", "post_block.1", "3", "sigmoid", "none", "none", "any"]


def test_check_names_the_bad_file_and_fails(tmp_path: Path) -> None:
    save(tmp_path / "good.safetensors", probe("good"))
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    good = _run("check", tmp_path / "good.safetensors")
    assert (good.exit_code, "good at post_block.1" in good.output) == (0, True)
    both = _run("check", tmp_path / "bad.safetensors", tmp_path / "good.safetensors")
    assert both.exit_code == 1
    assert "bad.safetensors" in both.output
    assert "good at post_block.1" in both.output


def test_show_prints_one_probe(tmp_path: Path) -> None:
    kept = probe("a", bias=0.25, calibration=(-1.0, 1.0))
    save(tmp_path / "a.safetensors", kept)
    output = _run("show", tmp_path / "a.safetensors").output
    assert dict(line.split(maxsplit=1) for line in output.splitlines()) == {
        "name": "a",
        "point": "post_block.1",
        "width": "3",
        "activation": "none",
        "threshold": "none",
        "auroc": "none",
        "model": "any",
        "digest": kept.digest,
        "bias": "0.25",
        "calibration": "-1 to 1",
        "norm": "3.74166",
        "histogram": "none",
        "description": "none",
    }


def test_check_and_show_print_the_description_and_quality(tmp_path: Path) -> None:
    shape = control_messages.Histogram(-1, 2.5, (0, 70, 20, 10, 0, 0, 5, 35))
    told = probe("a", description="Words in a row.", auroc=0.975, histogram=shape)
    save(tmp_path / "a.safetensors", told)
    checked = _run("check", tmp_path / "a.safetensors").output
    assert "a at post_block.1, width 3, AUROC 0.975: Words in a row." in checked
    shown = _run("show", tmp_path / "a.safetensors").output.splitlines()
    assert "auroc       0.975" in shown
    assert "description Words in a row." in shown
    assert "histogram   -1 ▁█▃▂▁▁▂▅ 2.5, 140 scores" in shown


def test_json_probes_become_safetensors(tmp_path: Path) -> None:
    seed = tmp_path / "enc_3_kind.json"
    seed.write_text(json.dumps({"vector": [1.0, 2.0]}))
    assert _run("convert", seed, "--model", "toy").exit_code == 0
    made = load(tmp_path / "enc_3_kind.safetensors")
    assert (made.name, str(made.point), made.activation, made.model) == (
        *("kind", "post_block.3", "relu", "toy"),
    )


def test_nothing_is_converted_if_one_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "enc_3_a.json").write_text(json.dumps({"vector": [1.0]}))
    (tmp_path / "enc_3_b.json").write_text("{}")
    result = _run("convert", tmp_path / "enc_3_a.json", tmp_path / "enc_3_b.json")
    assert isinstance(result.exception, ProbeError)
    assert not [*tmp_path.glob("*.safetensors")]


def test_list_takes_files_or_a_server_and_not_both() -> None:
    assert _run("list", "x", "--url", "http://127.0.0.1:1").exit_code == 2


@pytest.mark.parametrize("command", ["list", "ls"])
def test_list_asks_the_server_on_the_default_port(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(url: str, _key: str | None) -> None:
        asked.append(url)
        raise typer.Exit(1)

    monkeypatch.setattr("clairai.cli.probe_commands.open_client", refuse)
    _run(command)
    assert asked == ["http://127.0.0.1:6969"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "http://"])
def test_an_address_is_http_and_nothing_else(url: str) -> None:
    assert isinstance(_run("list", "--url", url).exception, ConfigError)


def test_a_server_that_does_not_run_is_reported() -> None:
    result = _run("remove", "a", "--url", "http://127.0.0.1:1")
    assert isinstance(result.exception, ConfigError)
    assert "does not answer" in str(result.exception)


def _texts(folder: Path) -> tuple[Path, Path]:
    yes, no = folder / "yes.txt", folder / "no.txt"
    yes.write_text("oui\n")
    no.write_text("non\n")
    return yes, no


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a b", "--positive", "YES", "--negative", "NO"], "cannot name a probe"),
        (["a", "--description", "", "--positive", "YES", "--negative", "NO"], "printable"),
        (["a", "--positive", "YES"], "both --positive and --negative"),
        (["a"], "give --data"),
        (["a", "--data", "YES", "--positive", "YES", "--negative", "NO"], "give --data, or"),
        (["a", "--positive", "YES", "--negative", "NO", "--out", "FOLDER/a.json"], "safetensors"),
        (["a", "--positive", "YES", "--negative", "NO", "--out", "no/a.safetensors"], "is there"),
        (["a", "--positive", "YES", "--negative", "NO", "--engine", "[]"], "JSON object"),
        (["a", "--positive", "YES", "--negative", "NO", "--engine", "{"], "JSON object"),
        (["a", "--data", "YES"], "line 1"),
    ],
)
def test_training_refuses_before_it_starts_an_engine(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    yes, no = _texts(tmp_path)
    names = {"YES": str(yes), "NO": str(no), "FOLDER/a.json": str(tmp_path / "a.json")}
    result = _run("train", *(names.get(argument, argument) for argument in arguments))
    assert isinstance(result.exception, ConfigError | ProbeError), result.output
    assert reason in str(result.exception)


def test_training_without_scikit_learn_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("clairai.train")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for name in [name for name in sys.modules if name.startswith("sklearn.")]:
        monkeypatch.delitem(sys.modules, name)
    yes, no = _texts(tmp_path)
    result = _run("train", "a", "--positive", yes, "--negative", no)
    assert isinstance(result.exception, ConfigError)
    assert "clairai[train]" in str(result.exception)
