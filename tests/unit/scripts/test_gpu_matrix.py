"""What the tables of docs/matrix.md make of the lines that `bench.gpu_release` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts import gpu_matrix, matrix
from scripts.matrix import Verdict

SHAPE = "llama-3.1-8b"
ABOUT = {"vllm": "0.31.0", "shape": SHAPE, "gpu": "NVIDIA H200", "day": "2026-11-17"}
ROWS = {"rows": 95432, "wrong_rows": 0, "unaccounted": 0, "lost": 0, "wrong": []}
VALUES = {"is_near": True, "is_first_exact": True, "worst": 0.0616, "floor": 0.083, "errors": {}}
COST = {"case": "all layers x 16", "load": "probes", "alone_ms": 1.5, "p99": 1.0}


def write(
    folder: Path,
    *lines: tuple[str, dict[str, Any]],
    version: str = "0.31.0",
    shape: str = SHAPE,
) -> Path:
    folder.mkdir(exist_ok=True)
    told = [("about", ABOUT | {"vllm": version, "shape": shape}), *lines]
    text = "".join(json.dumps({"part": part, **found}) + "\n" for part, found in told)
    (folder / f"{version}-{shape}.jsonl").write_text(text)
    return folder


def test_a_release_has_a_row_for_each_runner(tmp_path: Path) -> None:
    write(
        tmp_path,
        ("rows", {"runner": "V1", **ROWS}),
        ("rows", {"runner": "V2", **ROWS, "wrong_rows": 2, "lost": 3, "unaccounted": 4}),
        ("values", {"runner": "V2", **VALUES}),
        *(("overhead", {"runner": "V2", **COST, "batch": b, "p50": 1 + b / 1e3}) for b in (16, 1)),
    )
    (release,) = gpu_matrix.read_releases(tmp_path)
    assert release.checked("V2") == ("0.31.0", "V2", "95,432", "2", "7", "6.2e-02 (8.3e-02)")
    assert release.cost((1, 16), SHAPE, "V2", "all layers x 16", "probes") == "1.001 / 1.016"
    assert release.cost((1, 64), SHAPE, "V1", "all layers x 16", "probes") == ""
    assert release.cost((1, 64), "another", "V2", "all layers x 16", "probes") == ""
    assert release.list_runners("rows") == ["V2", "V1"]
    assert release.list_runners("overhead", shape=SHAPE) == ["V2"]
    assert not release.is_good


def test_what_failed_is_shown_and_what_was_measured_again_counts(tmp_path: Path) -> None:
    failed = {"runner": "V2", "failed": "out of memory"}
    cost = {"runner": "V2", **COST}
    write(
        tmp_path,
        ("rows", failed),
        ("values", {"runner": "V2", **VALUES, "is_first_exact": False}),
        ("overhead", {**cost, "batch": 1, "p50": 1.5}),
        ("overhead", {**cost, "batch": 1, "p50": 1.002}),
        ("overhead", {**cost, "batch": 1, "failed": "out of memory"}),
        ("overhead", {**cost, "batch": 64, "failed": "left out"}),
        ("overhead", {**failed, "case": "1 layer x 16", "load": "probes"}),
        ("weights", {"way": "clairai_ipc", "ms": 131.2, "found": {}}),
        ("weights", {"way": "ipc", "failed": "no"}),
        ("weights", {"way": "ipc, packed", "failed": "CUDA out of memory. Tried to"}),
    )
    (release,) = gpu_matrix.read_releases(tmp_path)
    assert release.checked("V2")[2:] == ("failed", "", "", "wrong: 6.2e-02")
    assert release.cost((1, 64), SHAPE, "V2", "all layers x 16", "probes") == "1.002 / -"
    assert release.cost((1, 64), SHAPE, "V2", "1 layer x 16", "probes") == "failed"
    assert release.sent() == ("0.31.0", "131 ms", "failed", "no memory left")
    assert not release.is_good


def test_a_run_that_was_cut_short_still_counts(tmp_path: Path) -> None:
    file = write(tmp_path, ("rows", {"runner": "V2", **ROWS})) / f"0.31.0-{SHAPE}.jsonl"
    file.write_text(file.read_text() + "\n")
    (release,) = gpu_matrix.read_releases(tmp_path)
    assert release.is_good


def test_shapes_of_one_release_have_tables_of_their_own(tmp_path: Path) -> None:
    cost = {"runner": "V2", **COST, "batch": 64}
    write(tmp_path, ("rows", {"runner": "V2", **ROWS}), ("overhead", {**cost, "p50": 1.002}))
    write(tmp_path, ("overhead", {**cost, "p50": 1.25}), shape="qwen3-30b-a3b")
    releases = gpu_matrix.read_releases(tmp_path)
    assert [one.shapes for one in releases] == [{SHAPE, "qwen3-30b-a3b"}]
    page = gpu_matrix.replace_section("", releases)
    assert page.count("| 0.31.0 | V2 | 95,432 |") == 1
    assert page.index("1.002") < page.index("shape of qwen3-30b-a3b") < page.index("1.250")


def test_a_batch_that_one_runner_alone_was_tried_with_has_a_place_in_every_row(
    tmp_path: Path,
) -> None:
    for runner, batches in (("V2", (1, 64)), ("V1", (1, 16, 64))):
        costs = [{"runner": runner, **COST, "batch": at, "p50": 1 + at / 1000} for at in batches]
        write(tmp_path, *(("overhead", cost) for cost in costs), version=f"0.3{len(batches)}.0")
    page = gpu_matrix.replace_section("", gpu_matrix.read_releases(tmp_path))
    assert "at batch 1 / 16 / 64" in page
    assert "| 1.001 / - / 1.064 |" in page
    assert "| 1.001 / 1.016 / 1.064 |" in page


def test_a_part_that_is_measured_later_is_kept_beside_the_others(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    for new in ("a\nb\n", "a\nb\n", "b\nc\n"):
        (tmp_path / "new.jsonl").write_text(new)
        gpu_matrix.keep(tmp_path / "new.jsonl", kept)
    assert kept.read_text() == "a\nb\nc\n"


def test_releases_stand_in_the_order_of_their_versions(tmp_path: Path) -> None:
    for version in ("0.100.0", "0.31.0", "0.26.0"):
        write(tmp_path, version=version)
    found = [release.about.vllm for release in gpu_matrix.read_releases(tmp_path)]
    assert found == ["0.26.0", "0.31.0", "0.100.0"]


def test_the_page_keeps_what_it_says_of_cpus(tmp_path: Path) -> None:
    releases = gpu_matrix.read_releases(write(tmp_path, ("rows", {"runner": "V2", **ROWS})))
    page = gpu_matrix.replace_section("# vLLM releases\n\nCPU\n", releases)
    assert page.startswith("# vLLM releases\n\nCPU\n\n## On a GPU\n")
    assert gpu_matrix.summary(releases) in page
    assert gpu_matrix.replace_section(page, releases) == page


def test_times_and_transfers_are_spoken_of_only_if_they_were_measured(tmp_path: Path) -> None:
    checked = ("rows", {"runner": "V2", **ROWS})
    page = gpu_matrix.replace_section("", gpu_matrix.read_releases(write(tmp_path, checked)))
    assert "| vLLM | runner | rows | wrong | missing | values |\n" in page
    assert "ms a token" not in page
    assert "`ipc`" not in page
    measured = ("overhead", {"runner": "V2", **COST, "batch": 64, "p50": 1.002})
    sent = ("weights", {"way": "clairai_ipc", "ms": 131.2})
    write(tmp_path, checked, measured, sent)
    page = gpu_matrix.replace_section("", gpu_matrix.read_releases(tmp_path))
    assert "| vLLM | runner | ms a token | 16 probes, all layers |\n" in page
    assert f"The shape of {SHAPE} with dummy weights at batch 64 (`-`: not run);" in page
    assert "| 0.31.0 | 131 ms |" in page


def test_a_new_matrix_of_cpus_keeps_the_section_on_gpus(tmp_path: Path, monkeypatch: Any) -> None:
    page = tmp_path / "matrix.md"
    page.write_text("# old\n\n## On a GPU\n\nmeasured\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    matrix.write_page([Verdict("0.32.0", (), (), 1.0)])
    written = page.read_text()
    assert "# old" not in written
    assert written.endswith("\n\n## On a GPU\n\nmeasured\n")
