"""Builds the documentation site in build/site; `python -m scripts.docs --serve` shows it live.

Pages are those of docs/, with the four at the top of the repository and the notebooks beside them.
Links from a page to a file that is not on the site become plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[1]
BUILD: Final = ROOT / "build"
PAGES: Final = BUILD / "docs"
CONFIG: Final = BUILD / "mkdocs.yml"
TOP: Final = ("ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def main() -> None:
    collect_pages()
    write_config()
    command = "serve" if "--serve" in sys.argv else "build"
    mkdocs = [sys.executable, "-m", "mkdocs", command, "-q", "-f", str(CONFIG)]
    subprocess.run(mkdocs, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    sys.stdout.write(f"docs: {BUILD / 'site' / 'index.html'}\n")


def collect_pages() -> None:
    """Copy every page below build/docs, with links that hold there."""
    shutil.rmtree(BUILD / "docs", ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    shutil.copytree(ROOT / "examples", PAGES / "notebooks", ignore=shutil.ignore_patterns("*.py"))
    for name in TOP:
        shutil.copy(ROOT / name, PAGES / name.lower())
    for page in PAGES.rglob("*.md"):
        page.write_text(LINK.sub(partial(_relink, page), page.read_text()))


def _source_of(page: Path) -> Path:
    """Where in the repository a page comes from."""
    inner = page.relative_to(PAGES)
    return {Path(name.lower()): ROOT / name for name in TOP}.get(inner, ROOT / "docs" / inner)


def _relink(page: Path, link: re.Match[str]) -> str:
    mark, text, path, anchor = link[1], link[2], link[3], link[4] or ""
    if not path or "://" in path:
        return link[0]
    target = _page_for((_source_of(page).parent / path).resolve())
    if target is None:
        return text
    steps = len(page.relative_to(PAGES).parts) - 1
    return f"{mark}[{text}]({'../' * steps}{target.relative_to(PAGES)}{anchor})"


def _page_for(file: Path) -> Path | None:
    """The site's copy of a file of the repository; None if it has none."""
    if file.name in TOP and file.parent == ROOT:
        return PAGES / file.name.lower()
    if file == ROOT / "README.md":
        return PAGES / "index.md"
    if file.is_relative_to(ROOT / "docs") and file.is_file():
        return PAGES / file.relative_to(ROOT / "docs")
    if file.is_relative_to(ROOT / "examples") and file.suffix == ".ipynb":
        return PAGES / "notebooks" / file.name
    return None


def write_config() -> None:
    """mkdocs.yml, with every error and every decision in the navigation."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config |= {"docs_dir": str(PAGES), "site_dir": str(BUILD / "site")}
    for title, folder in (("Errors", "errors"), ("Decisions", "decisions")):
        names = sorted(page.name for page in (PAGES / folder).glob("*.md"))
        config["nav"].append({title: [f"{folder}/{name}" for name in names]})
    CONFIG.write_text(yaml.safe_dump(config, sort_keys=False))


if __name__ == "__main__":
    main()
