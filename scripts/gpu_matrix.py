"""Puts what `bench.gpu_release` found into docs/matrix.md.

Run: python -m scripts.gpu_matrix [DIR...]   (folders with VERSION-SHAPE.jsonl: kept, then shown)

Results of all releases are kept in bench/results, so that one of them, or a part of it, can be
measured again without the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from scripts import numbers

ROOT: Final = Path(__file__).resolve().parent.parent
KEPT: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "docs" / "matrix.md"
HEADING: Final = "## On a GPU"

COSTS: Final = {  # heading, by case and load
    ("1 layer x 16", "probes"): "16 probes, 1 layer",
    ("all layers x 16", "probes"): "16 probes, all layers",
    ("steering", "one vector, all layers"): "a vector, all layers",
    ("steering", "capture, one layer"): "capture, 1 layer",
}
CHECKED: Final = ("vLLM", "runner", "rows", "wrong", "missing", "values")


class Line(msgspec.Struct, frozen=True):
    """One line of a result; which fields are set depends on the part.

    The shape is that of the model whose times are taken.
    """

    part: str
    failed: str | None = None
    vllm: str = ""
    shape: str = ""
    gpu: str = ""
    torch: str = ""
    python: str = ""
    day: str = ""
    runner: str = ""
    case: str = ""
    load: str = ""
    batch: int = 0
    p50: float = 0.0
    alone_ms: float = 0.0
    tapped_ms: float = 0.0
    method: str = "one engine"
    rows: int = 0
    wrong_rows: int = 0
    unaccounted: int = 0
    lost: int = 0
    is_near: bool = False
    is_first_exact: bool = False
    worst: float = 0.0
    floor: float = 0.0
    way: str = ""
    ms: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Release:
    """What one release gave."""

    about: Line
    lines: tuple[Line, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.about.vllm)))

    @property
    def shapes(self) -> set[str]:
        """Of models whose times were taken."""
        return {line.shape for line in self.lines if line.part == "overhead"}

    def list_runners(self, part: str, **what: Any) -> list[str]:
        found = {line.runner for line in self.lines if line.part == part and _has(line, what)}
        return sorted(found, reverse=True)

    def find(self, part: str, **what: Any) -> Line | None:
        """The newest that did not fail; else the newest."""
        found = [line for line in self.lines if line.part == part and _has(line, what)]
        good = [line for line in found if line.failed is None]
        return (good or found)[-1] if found else None

    def checked(self, runner: str) -> tuple[str, ...]:
        rows, values = (self.find(part, runner=runner) for part in ("rows", "values"))
        return (self.about.vllm, runner, *_rows_cells(rows), _values_cell(values))

    def cost(self, batches: Sequence[int], shape: str, runner: str, case: str, load: str) -> str:
        """Ratios at each batch; `failed` if it was tried in vain, nothing if it was not."""
        asked = {"shape": shape, "runner": runner, "case": case, "load": load}
        tried = [one for one in self.lines if one.part == "overhead" and _has(one, asked)]
        found = [self.find("overhead", **asked, batch=batch) for batch in batches]
        if not any(found):
            return "failed" if tried else ""
        return " / ".join("-" if one is None or one.failed else f"{one.p50:.3f}" for one in found)

    def alone(self, batches: Sequence[int], shape: str, runner: str) -> str:
        """Milliseconds a token of vLLM alone, at each batch."""
        asked = {"shape": shape, "runner": runner}
        found = [line for line in self.lines if line.part == "overhead" and _has(line, asked)]
        by_batch = [[o.alone_ms for o in found if o.batch == b and not o.failed] for b in batches]
        return " / ".join(f"{min(times):.2f}" if times else "-" for times in by_batch)

    def sent(self) -> tuple[str, ...]:
        ways = [self.find("weights", way=way) for way in ("clairai_ipc", "ipc", "ipc, packed")]
        return (
            self.about.vllm,
            *("" if one is None else _why_failed(one) or f"{one.ms:.0f} ms" for one in ways),
        )

    @property
    def is_good(self) -> bool:
        """Rows were checked on each runner, and nothing checked was wrong."""
        rows = [line for line in self.lines if line.part == "rows"]
        wrong = [line.wrong_rows + line.unaccounted + line.lost for line in rows if not line.failed]
        values = [line for line in self.lines if line.part == "values" and not line.failed]
        return bool(wrong) and not any(wrong) and all(one.is_near for one in values)


def _has(line: Line, what: dict[str, Any]) -> bool:
    return all(getattr(line, name) == value for name, value in what.items())


def _why_failed(line: Line) -> str:
    """Nothing if it did not; releases that are measured beside each other share a GPU's memory."""
    if line.failed is None:
        return ""
    return "no memory left" if "out of memory" in line.failed else "failed"


def _rows_cells(rows: Line | None) -> tuple[str, str, str]:
    if rows is None:
        return "", "", ""
    if rows.failed is not None:
        return "failed", "", ""
    return f"{rows.rows:,}", str(rows.wrong_rows), str(rows.unaccounted + rows.lost)


def _values_cell(values: Line | None) -> str:
    if values is None:
        return ""
    if values.failed is not None:
        return "failed"
    is_right = values.is_near and values.is_first_exact
    return f"{values.worst:.1e} ({values.floor:.1e})" if is_right else f"wrong: {values.worst:.1e}"


def main(arguments: Sequence[str]) -> int:
    KEPT.mkdir(exist_ok=True)
    for file in (found for folder in arguments for found in sorted(Path(folder).glob("*.jsonl"))):
        keep(file, KEPT / file.name)
    releases = read_releases(KEPT)
    PAGE.write_text(replace_section(PAGE.read_text(), releases))
    return 0 if all(one.is_good for one in releases) else 1


def keep(file: Path, kept: Path) -> None:
    """Add what was not kept before."""
    before = kept.read_text().splitlines() if kept.exists() else []
    new = [line for line in file.read_text().splitlines() if line not in before]
    kept.write_text("".join(f"{line}\n" for line in [*before, *new]))


def read_releases(folder: Path) -> list[Release]:
    """In order of version; a file has one shape, and a release may have several files."""
    decoder = msgspec.json.Decoder(Line)
    found: dict[str, list[Line]] = {}
    about: dict[str, Line] = {}
    for file in sorted(folder.glob("*.jsonl")):
        lines = [decoder.decode(text) for text in file.read_bytes().splitlines() if text.strip()]
        of_file = next((line for line in reversed(lines) if line.part == "about"), None)
        if of_file is None:
            continue
        about[of_file.vllm] = of_file
        known = found.setdefault(of_file.vllm, [])
        known += [msgspec.structs.replace(line, shape=of_file.shape) for line in lines]
    releases = [Release(about[version], tuple(lines)) for version, lines in found.items()]
    return sorted(releases, key=lambda one: one.order)


def replace_section(page: str, releases: Sequence[Release]) -> str:
    """The page with the section on GPUs written anew; all before it is kept."""
    before = page.partition(HEADING)[0].rstrip()
    return before + "\n\n" + "\n\n".join([HEADING, *_section(releases)]) + "\n"


def summary(releases: Iterable[Release]) -> str:
    """Rows and values of every release and runner."""
    rows = [one.checked(runner) for one in releases for runner in one.list_runners("rows")]
    return numbers.table(CHECKED, rows)


TEXT: Final = """\
`python -m bench.gpu_release --out DIR` on {days}: {gpu}, torch {torch}, Python {python}, CUDA
graphs and vLLM's other defaults. *Rows*: 1,000 requests, 256 at once, with preemption,
prefix-cache hits and aborts; the score of each row names the token it was computed for. *Wrong*
rows say another token, position, phase or request; *missing* ones are missing, doubled or lost.
*Values*: the 99.9th percentile, at the worst of four points, of the relative difference to
Hugging Face in float32, and in brackets that of Hugging Face in bfloat16; before the first block
both are equal bit by bit. The model is a small Llama with random weights. A runner of a release
that is not listed was not run."""

TIMES: Final = """\
Time per token, with taps over without. On the V2 runner both are taken in one engine, by turns,
between its graphs and graphs of the same model without taps; on V1 in two engines side by side,
which differ by up to 4 % for reasons of their own. A batch of 256 steered rows takes less time than
one that is not: [why](numbers.md#rows-that-are-alike-are-multiplied-faster)."""

SHAPE: Final = """\
The shape of {shape} with dummy weights at batch {batches} (`-`: not run);
milliseconds are without taps:"""


def _section(releases: Sequence[Release]) -> list[str]:
    if not releases:
        return [
            "Not measured yet: `python -m bench.gpu_release --out DIR` on a machine with a GPU."
        ]
    about = releases[-1].about
    days = " and ".join(sorted({line.day for one in releases for line in one.lines} - {""}))
    told = {"gpu": about.gpu, "torch": about.torch, "python": about.python}
    parts = [TEXT.format(days=days, **told), summary(releases)]
    shapes = sorted({shape for one in releases for shape in one.shapes})
    parts += [TIMES] if shapes else []
    for shape in shapes:
        parts += _times_section(shape, releases)
    if any(line.part == "weights" for one in releases for line in one.lines):
        parts += _sent_section(releases)
    return parts


def _times_section(shape: str, releases: Sequence[Release]) -> list[str]:
    """No column that is empty."""
    lines = [line for one in releases for line in one.lines if line.part == "overhead"]
    batches = sorted({line.batch for line in lines if line.shape == shape} - {0})
    rows = [
        (
            *(one.about.vllm, runner, one.alone(batches, shape, runner)),
            *(one.cost(batches, shape, runner, *kind) for kind in COSTS),
        )
        for one in releases
        for runner in one.list_runners("overhead", shape=shape)
    ]
    headings = ("vLLM", "runner", "ms a token", *COSTS.values())
    shown = [at for at in range(len(headings)) if any(row[at] for row in rows)]
    return [
        SHAPE.format(batches=" / ".join(map(str, batches)), shape=shape),
        numbers.table([headings[at] for at in shown], [[row[at] for at in shown] for row in rows]),
    ]


def _sent_section(releases: Sequence[Release]) -> list[str]:
    return [
        "New weights of the shape of qwen3-0.6b handed over by a process on the same GPU, until "
        "they serve, and by vLLM's own `ipc`, which verifies nothing, in the same run:",
        numbers.table(
            ("vLLM", "`clairai_ipc`", "`ipc`", "`ipc`, packed"), [one.sent() for one in releases]
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
