"""Checks the page's sources, and that the built page and the generated types are up to date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.web import WEB, Tools, is_new_enough

pytestmark = pytest.mark.timeout(1800)

PAGE = WEB.parent / "src" / "clairai" / "proxy" / "page"
MAX_LINES = 300


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def differences(built: dict[str, bytes], kept: dict[str, bytes]) -> list[str]:
    names = sorted(built.keys() | kept.keys())
    return [name for name in names if built.get(name) != kept.get(name)]


CheckResults = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def check_results(tools: Tools) -> CheckResults:
    """The result of each checker; they run in parallel, because each keeps one core busy."""
    commands = {
        "tsc": ("-p", "."),
        "eslint": (".",),
        "prettier": ("--check", "."),
        "vitest": ("run",),
    }
    with ThreadPoolExecutor() as pool:
        running = {
            name: pool.submit(tools.run, "npx", name, *flags, timeout_s=1500)
            for name, flags in commands.items()
        }
        return {name: result.result() for name, result in running.items()}


@pytest.mark.parametrize("checker", ["tsc", "eslint", "prettier", "vitest"])
def test_the_page_passes_every_checker(checker: str, check_results: CheckResults) -> None:
    assert check_results[checker].returncode == 0, check_results[checker].stdout[-8000:]


def test_the_page_in_the_package_is_built_from_its_sources(tools: Tools, tmp_path: Path) -> None:
    built = tmp_path / "page"
    done = tools.run(
        "npx", "vite", "build", "--outDir", str(built), "--emptyOutDir", timeout_s=1500
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert differences(files_of(built), files_of(PAGE)) == [], "run `npm run build` in web/"


def test_a_stale_page_is_detected() -> None:
    kept = {"index.html": b"a", "assets/x.js": b"b"}
    assert differences(kept, kept) == []
    assert differences({**kept, "index.html": b"c"}, kept) == ["index.html"]
    assert differences({"index.html": b"a", "assets/y.js": b"b"}, kept) == [
        "assets/x.js",
        "assets/y.js",
    ]


def test_the_types_match_the_schema_of_the_server(tools: Tools, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    made = subprocess.run(
        [sys.executable, "-m", "clairai.proxy.schema"], capture_output=True, check=True
    )
    document.write_bytes(made.stdout)
    checked = tools.run("node", "scripts/types.mjs", "--check", str(document), timeout_s=600)
    assert checked.returncode == 0, checked.stdout
    planted = json.loads(made.stdout)
    del planted["components"]["schemas"]["TokenEvent"]["properties"]["tokens"]
    document.write_text(json.dumps(planted))
    stale = tools.run("node", "scripts/types.mjs", "--check", str(document), timeout_s=600)
    assert stale.returncode == 1
    assert "npm run types" in stale.stdout


def test_the_page_has_no_inline_script_or_style_and_loads_only_its_own_files() -> None:
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []
    assert re.findall(r'(?:src|href)="(?!\./assets/)', html) == []
    assert not list(PAGE.rglob("*.map"))


def test_the_lock_file_names_no_registry() -> None:
    lock = json.loads((WEB / "package-lock.json").read_text())
    packages = lock["packages"]
    assert [name for name, entry in packages.items() if "resolved" in entry] == []
    assert [name for name, entry in packages.items() if name and "integrity" not in entry] == []


def test_no_file_of_the_page_is_longer_than_300_lines() -> None:
    folders = [WEB / name for name in ("src", "tests", "journeys", "bench", "scripts")]
    sources = [file for folder in folders for file in folder.rglob("*.*") if file.is_file()]
    long = {str(file.relative_to(WEB)): len(file.read_text().splitlines()) for file in sources}
    assert sources
    assert {
        name: lines
        for name, lines in long.items()
        if lines > MAX_LINES and name != "src/api/schema.d.ts"
    } == {}


def test_every_file_of_the_page_opens_with_a_comment() -> None:
    sources = [*(WEB / "src").rglob("*.ts*"), *(WEB / "scripts").glob("*.mjs")]
    silent = [file.name for file in sources if not file.read_text().startswith("// ")]
    assert silent == []


@pytest.mark.parametrize(
    ("version", "is_good"),
    [
        ("v20.19.0", True),
        ("v24.1.0\n", True),
        ("v20.18.9", False),
        ("v18.20.1", False),
        ("", False),
        ("24", False),
    ],
)
def test_a_node_that_is_too_old_is_not_used(version: str, is_good: bool) -> None:
    assert is_new_enough(version) is is_good
