"""What `bench.gpu_release` does around its engines, without one."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_release, weights_stock
from scripts import gpu_matrix

NEAR = {
    f"{kind} {name}": error
    for kind in ("values", "rows")
    for name, error in (("float32", 0.06), ("bfloat16", 0.0), ("floor", 0.08))
}


def test_a_failure_is_a_line_and_the_next_part_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = gpu_release.Results(tmp_path, "qwen3-0.6b")
    with results.attempt("rows", runner="V1"):
        raise RuntimeError("no such runner")
    with results.attempt("rows", runner="V2"):
        results.add("rows", runner="V2", rows=7)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [(one["runner"], one.get("failed"), one.get("rows")) for one in lines] == [
        ("V1", "no such runner", None),
        ("V2", None, 7),
    ]
    assert '"rows": 7' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("point", "kind", "error", "is_near", "is_exact"),
    [
        ("post_block.3", "values float32", 0.06, True, True),
        ("post_block.3", "values float32", 0.2, False, True),
        ("post_block.7", "rows float32", 0.2, False, True),
        ("pre_attn.0", "values bfloat16", 1e-6, True, False),
    ],
)
def test_values_may_be_as_far_off_as_hugging_face_in_bfloat16(
    point: str, kind: str, error: float, *, is_near: bool, is_exact: bool
) -> None:
    errors = {name: dict(NEAR) for name in gpu_release.POINTS}
    errors[point][kind] = error
    found = gpu_release.judge_values(errors)
    assert (found["is_near"], found["is_first_exact"]) == (is_near, is_exact)


def test_plugins_are_found_where_only_the_sources_are_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", _is_absent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    gpu_release.register_plugin(tmp_path / "packages")
    code = (
        "import importlib.metadata as m\n"
        "found = m.distributions(path=[PATH])\n"
        "print([(e.group, e.value) for d in found for e in d.entry_points])"
    ).replace("PATH", repr(str(tmp_path / "packages")))
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "('vllm.general_plugins', 'clairai.plugin:register')" in shown.stdout
    assert "('clairai.capture_consumers', 'clairai.store.folder_consumers:fs')" in shown.stdout


def _is_absent(name: str) -> Any:
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_tables_know_every_kind_that_is_measured() -> None:
    asked = gpu_release.parse(["--out", "x", "--runners", "V2"])
    bench = gpu_release.Bench(asked, Path("x"), results=None)  # type: ignore[arg-type]
    kinds = {
        (one.case.name.removeprefix("V2 "), load.name)
        for one in bench.list_cases()
        for load in one.loads
    }
    assert kinds == set(gpu_matrix.COSTS)


def test_handles_of_vllms_own_transfer_are_pickled_and_nothing_else_is() -> None:
    sent: list[Any] = []

    class Llm:
        def update_weights(self, request: Any) -> None:
            sent.append(request)

    info = {"names": ["a"], "ipc_handles": [{"gpu": (1,)}], "tensor_sizes": None}
    weights_stock.Client(Llm()).update_weights(info)
    assert sent[0]["update_info"].keys() == {"names", "ipc_handles_pickled"}
