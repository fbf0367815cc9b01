"""What the commands `clairai vectors` print, write and send."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from clairai.cli.commands import app
from clairai.errors import ClairaiError, ConfigError, VectorError
from clairai.points import Point
from clairai.probe.files import save as save_probe
from clairai.vector import files, gguf_format
from clairai.vector.model import Vector
from tests.support.probes import numbers, probe
from tests.support.vectors import vector

BLOCKS = {Point("post_block", 0): numbers(1, 0), Point("post_block", 3): numbers(0, 2)}
ROUTE = "/v1/steering/vectors"


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["vectors", *map(str, arguments)])


def test_a_folder_of_vectors_is_listed_with_all_columns(tmp_path: Path) -> None:
    files.save(vector("a", scale=2.5, method="PCA"), tmp_path / "a.safetensors")
    many = {Point("post_block", layer): numbers(1) for layer in range(6)}
    files.save(vector("b", rows=many), tmp_path / "b.safetensors")
    result = _run("list", tmp_path)
    titles, first, second = result.output.splitlines()
    assert titles.split() == ["name", "points", "width", "scale", "method", "digest"]
    assert first.split()[:6] == ["a", "pre_attn.1,", "post_block.1", "3", "2.5", "PCA"]
    assert "post_block.3 and 2 more" in second
    assert first.endswith(vector().digest[:12])


def test_check_names_the_bad_file_and_fails(tmp_path: Path) -> None:
    files.save(vector("fine"), tmp_path / "good.safetensors")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    good = _run("check", tmp_path / "good.safetensors")
    said = "fine at pre_attn.1, post_block.1, width 3"
    assert (good.exit_code, said in good.output) == (0, True)
    both = _run("check", tmp_path / "bad.gguf", tmp_path / "good.safetensors")
    assert both.exit_code == 1
    assert "bad.gguf" in both.output
    assert said in both.output


def test_show_prints_one_vector_and_the_length_of_each_row(tmp_path: Path) -> None:
    files.save(vector(description="Words in a row.", scale=4), tmp_path / "v.safetensors")
    output = _run("show", tmp_path / "v.safetensors").output
    assert dict(line.split(maxsplit=1) for line in output.splitlines()) == {
        "name": "v",
        "width": "3",
        "scale": "4",
        "method": "none",
        "model": "any",
        "description": "Words in a row.",
        "digest": vector().digest,
        "pre_attn.1": "3",
        "post_block.1": "5",
    }


def test_gguf_and_json_become_safetensors(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(
        gguf_format.dumps(vector(rows={Point("post_block", 3): numbers(1)}))
    )
    (tmp_path / "b.json").write_text(json.dumps({"post_attn": {"2": [1, 2]}}))
    out = tmp_path / "out"
    out.mkdir()
    result = _run(
        *("import", tmp_path / "a.gguf", tmp_path / "b.json", "--out", out),
        *("--model", "toy", "--scale", "6"),
    )
    assert result.exit_code == 0, result.output
    made = [files.load(out / name) for name in ("a.safetensors", "b.safetensors")]
    assert [(one.name, str(one.points[0]), one.model, one.scale) for one in made] == [
        ("a", "post_block.3", "toy", 6.0),
        ("b", "post_attn.2", "toy", 6.0),
    ]


def test_nothing_is_imported_if_one_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"post_block": {"1": [1.0]}}))
    (tmp_path / "b.json").write_text("{}")
    result = _run("import", tmp_path / "a.json", tmp_path / "b.json")
    assert isinstance(result.exception, VectorError)
    assert not [*tmp_path.glob("*.safetensors")]


def test_a_vector_is_exported_for_llama_cpp_with_its_scale_beside_it(tmp_path: Path) -> None:
    source, out = tmp_path / "v.safetensors", tmp_path / "v.gguf"
    files.save(vector(rows=BLOCKS, scale=2.5), source)
    refused = _run("export", source, out)
    assert isinstance(refused.exception, VectorError)
    assert "post_block.0" in str(refused.exception)
    assert not out.exists()
    result = _run("export", source, out, "--points", "post_block.1-3")
    assert result.output.endswith("--control-vector-scaled is to be given its scale, 2.5\n")
    assert files.load(out).rows[Point("post_block", 3)].tolist() == [0, 2]
    none = _run("export", source, out, "--points", "pre_attn.2")
    assert "it has post_block.0, post_block.3" in str(none.exception)
    assert _run("export", source, tmp_path / "v.safetensors").exit_code == 2


def test_a_probe_becomes_a_vector_that_moves_its_raw_score_by_the_step(tmp_path: Path) -> None:
    kept = probe("sad", direction_D=numbers(3, -4, 1), bias=0.5, description="Sadness.", model="m")
    save_probe(tmp_path / "p.safetensors", kept)
    out = tmp_path / "v.safetensors"
    result = _run(
        *("make", "happy", "--probe", tmp_path / "p.safetensors", "--step", "2"),
        *("--scale", "-4", "--out", out, "--description", "Joy."),
    )
    assert result.exit_code == 0, result.output
    made = files.load(out)
    assert (made.name, made.scale, made.description, made.model) == ("happy", -4.0, "Joy.", "m")
    hidden_TD = np.array([[1.0, 2.0, 3.0]])
    moved = kept.apply(hidden_TD + made.rows[kept.point]) - kept.apply(hidden_TD)
    assert moved == pytest.approx([2.0], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a b", "--pairs", "PAIRS"], "cannot name a vector"),
        (["a", "--pairs", "PAIRS", "--description", "\x1b"], "printable"),
        (["a", "--pairs", "PAIRS", "--scale", "nan"], "finite"),
        (["a"], "give --pairs"),
        (["a", "--positive", "PAIRS"], "both --positive and --negative"),
        (["a", "--pairs", "PAIRS", "--positive", "PAIRS"], "give --pairs, or"),
        (["a", "--pairs", "PAIRS", "--out", "a.gguf"], "ending in .safetensors"),
        (["a", "--pairs", "PAIRS", "--out", "no/a.safetensors"], "is there"),
        (["a", "--pairs", "PAIRS", "--engine", "[]"], "JSON object"),
        (["a", "--pairs", "BROKEN"], "line 2"),
        (["a", "--pairs", "EMPTY"], "a text is empty"),
    ],
)
def test_making_refuses_before_it_starts_an_engine(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    texts = {
        "PAIRS": '{"positive": "yes", "negative": "no"}\n',
        "BROKEN": '{"positive": "yes", "negative": "no", "prompt": "?"}\n{"positive": "yes"}\n',
        "EMPTY": '{"positive": "yes", "negative": " "}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    result = _run("make", *(str(tmp_path / word) if word in texts else word for word in arguments))
    assert isinstance(result.exception, ConfigError | VectorError), result.output
    assert reason in str(result.exception)


def test_a_probe_takes_neither_texts_nor_points(tmp_path: Path) -> None:
    for more in (["--pairs", tmp_path / "x"], ["--points", "post_block.1"]):
        assert _run("make", "a", "--probe", tmp_path / "p.safetensors", *more).exit_code == 2


@dataclass
class Held:
    """What the small server was asked, and what it has."""

    vectors: dict[str, Vector] = field(default_factory=dict)
    keys: list[str | None] = field(default_factory=list)

    def listed(self) -> dict[str, Any]:
        data = [msgspec.to_builtins(one.listed()) for one in self.vectors.values()]
        capacity = {"rows": 1024, "programs": 64}
        return {"data": data, "version": 1, "points": ["post_block.1"], "capacity": capacity}

    def put(self, name: str, data: bytes, condition: tuple[str | None, str | None]) -> int:
        wants_known, wants_new = (text == "*" for text in condition)
        if (wants_known and name not in self.vectors) or (wants_new and name in self.vectors):
            return 412
        self.vectors[name] = files.loads(data, source="body", name=name)
        return 201


def _route(held: Held) -> type[BaseHTTPRequestHandler]:
    class Route(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def answer(self, status: int) -> None:
            held.keys.append(self.headers["Authorization"])
            refusal = {"error": {"message": "not under this condition"}}
            body = json.dumps(held.listed() if status < 400 else refusal).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def named(self) -> str:
            return unquote(self.path.removeprefix(f"{ROUTE}/"))

        def do_GET(self) -> None:
            self.answer(200 if self.path == ROUTE else 404)

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            conditions = self.headers["If-Match"], self.headers["If-None-Match"]
            self.answer(held.put(self.named(), data, conditions))

        def do_DELETE(self) -> None:
            self.answer(200 if held.vectors.pop(self.named(), None) else 404)

    return Route


@contextmanager
def _serving() -> Iterator[tuple[str, Held]]:
    held = Held()
    with ThreadingHTTPServer(("127.0.0.1", 0), _route(held)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", held
        finally:
            server.shutdown()
            thread.join()


def test_vectors_are_added_replaced_listed_and_removed_while_serving(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.gguf"
    files.save(vector("x/a", method="PCA"), first)
    files.save(vector(rows={Point("post_block", 3): numbers(1)}), second)
    with _serving() as (url, held):
        assert _run("add", first, second, "--url", url, "--api-key", "k").output == (
            "added x/a\nadded b\n"
        )
        assert set(held.keys) == {"Bearer k"}
        assert held.vectors["x/a"] == vector("x/a", method="PCA")
        again = _run("add", first, "--url", url)
        assert isinstance(again.exception, VectorError)
        assert "refused (412): not under this condition" in str(again.exception)
        files.save(vector("x/a", scale=3), first)
        assert _run("replace", first, "--url", url).output == "replaced x/a\n"
        listed = _run("list", "--url", url).output.splitlines()
        assert listed[1].split()[:5] == ["x/a", "pre_attn.1,", "post_block.1", "3", "3"]
        assert listed[-1] == (
            "2 vectors; unfinished requests share 1024 rows and 64 programs; "
            "steered at post_block.1"
        )
        assert _run("remove", "x/a", "--url", url).output == "removed x/a\n"
        assert [*held.vectors] == ["b"]
        assert isinstance(_run("replace", first, "--url", url).exception, VectorError)
        assert isinstance(_run("remove", "x/a", "--url", url).exception, VectorError)


def test_nothing_is_sent_if_one_file_is_bad(tmp_path: Path) -> None:
    files.save(vector("a"), tmp_path / "a.safetensors")
    (tmp_path / "b.json").write_text("{}")
    with _serving() as (url, held):
        result = _run("add", tmp_path / "a.safetensors", tmp_path / "b.json", "--url", url)
    assert isinstance(result.exception, VectorError)
    assert held.vectors == {}


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

    monkeypatch.setattr("clairai.cli.vector_commands.open_client", refuse)
    _run(command)
    assert asked == ["http://127.0.0.1:6969"]


def test_a_server_that_does_not_run_is_reported() -> None:
    result = _run("remove", "a", "--url", "http://127.0.0.1:1")
    assert isinstance(result.exception, ClairaiError)
    assert "does not answer" in str(result.exception)
