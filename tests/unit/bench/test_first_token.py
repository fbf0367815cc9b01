"""How the stages of requests are noted in other processes, and what is made of the notes."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.first_token import CAME, SENT, TRACING, table
from bench.trace_stages import STAGES, VARIABLE, Noted, Stage, read_notes

ROOT = TRACING.parent.parent
ASK = """
import types
from clairai.proxy.upstream import Upstream
for number in (7, 7, 8):
    headers = {"X-Request-Id": f"trace{number}"}
    Upstream._send(types.SimpleNamespace(), "POST", "/", headers, b"", 1.0).close()
"""


def test_a_process_with_the_folder_on_its_path_notes_each_request_once(tmp_path: Path) -> None:
    told = tmp_path / "stages.tsv"
    variables = {VARIABLE: str(told), "PYTHONPATH": f"{TRACING}{os.pathsep}{ROOT}"}
    for environment in ({**os.environ, **variables}, {**os.environ, **variables, VARIABLE: ""}):
        subprocess.run([sys.executable, "-c", ASK], check=True, env=environment)
    notes = read_notes(told)
    assert [(one.stage, one.request) for one in notes] == [
        ("proxy sends it", "trace7"),
        ("proxy sends it", "trace8"),
    ]
    assert notes[0].ns < notes[1].ns


def test_a_stage_is_told_by_its_time_after_the_client_and_after_the_stage_before() -> None:
    ms = 10**6
    notes = [
        Noted(stage, f"trace{number}", number * 1000 + at * ms)
        for number in (1, 2, 3)
        for stage, at in ((SENT, 0), ("core has it", 2 + number), (CAME, 20))
    ]
    notes.append(Noted(SENT, "trace9", 0))  # no answer came: it does not count
    notes.append(Noted("core has it", "trace2", 1))  # of another process, before: nor does it
    rows = table(notes)
    assert [(row["stage"], row["at_ms"], row["took_ms"], row["requests"]) for row in rows] == [
        ("core has it", 4.0, 4.0, 3),
        (CAME, 20.0, 16.0, 3),
    ]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_is_a_function_that_there_is(stage: Stage) -> None:
    """Read, not imported: vLLM takes seconds to import."""
    package, *names = stage.module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent.joinpath(*names).with_suffix(".py")
    found: ast.AST = ast.parse(file.read_text())
    for name in stage.function.split("."):
        held = (one for one in ast.iter_child_nodes(found) if getattr(one, "name", None) == name)
        found = next(held)
