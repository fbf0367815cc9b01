"""Puts what `bench.gpu_release` found into docs/matrix.md.

Run: python -m scripts.gpu_matrix [DIR...]   (folders with VERSION-SHAPE.jsonl: kept, then shown)

Results of all releases are kept in bench/results, so that one of them can be measured again without
the others.
"""

from __future__ import annotations

import re
import shutil
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
DEFAULT_SHAPE: Final = "qwen3-0.6b"

COSTS: Final = {  # heading, by case and load
    ("1 layer x 16", "probes"): "16 probes, 1 layer",
    ("all layers x 16", "probes"): "16 probes, all layers",
    ("steering", "one vector, all layers"): "a vector, all layers",
    ("steering", "capture, one layer"): "capture, 1 layer",
}
CHECKED: Final = ("vLLM", "runner", "rows", "wrong", "missing", "values")


class Line(msgspec.Struct, frozen=True):
    """One line of a result; which fields are set depends on the part."""

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
    """What one release gave with one shape of model."""

    about: Line
    lines: tuple[Line, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.about.vllm)))

    @property
    def runners(self) -> list[str]:
        found = {line.runner for line in self.lines if line.part in ("rows", "overhead")}
        return sorted(found, reverse=True)

    def find(self, part: str, **what: Any) -> Line | None:
        """The newest that did not fail; else the newest."""
        found = [
            line
            for line in self.lines
            if line.part == part and all(getattr(line, name) == v for name, v in what.items())
        ]
        good = [line for line in found if line.failed is None]
        return (good or found)[-1] if found else None

    def checked(self, runner: str) -> tuple[str, ...]:
        rows, values = (self.find(part, runner=runner) for part in ("rows", "values"))
        return (self.about.vllm, runner, *_rows_cells(rows), _values_cell(values))

    def cost(self, runner: str, case: str, load: str) -> str:
        """Ratios at each batch; `failed` if it was tried in vain, nothing if it was not."""
        asked = {"runner": runner, "case": case, "load": load}
        tried = [one for one in self.lines if one.part == "overhead" and _has(one, asked)]
        batches = sorted({line.batch for line in tried} - {0})
        found = [self.find("overhead", **asked, batch=batch) for batch in batches]
        if not batches:
            return "failed" if tried else ""
        return " / ".join("-" if one is None or one.failed else f"{one.p50:.3f}" for one in found)

    def alone(self, runner: str) -> str:
        """Milliseconds a token of vLLM alone, at each batch."""
        found = [line for line in self.lines if line.part == "overhead" and line.runner == runner]
        batches = sorted({line.batch for line in found if line.failed is None})
        by_batch = [[o.alone_ms for o in found if o.batch == b and not o.failed] for b in batches]
        return " / ".join(f"{min(times):.2f}" for times in by_batch)

    def sent(self) -> tuple[str, ...]:
        ways = [self.find("weights", way=way) for way in ("clairai_ipc", "ipc", "ipc, packed")]
        return (
            self.about.vllm,
            *(
                "" if one is None else "failed" if one.failed else f"{one.ms:.0f} ms"
                for one in ways
            ),
        )

    @property
    def is_good(self) -> bool:
        """Rows were checked on each runner, and nothing checked was wrong."""
        rows = [line for line in self.lines if line.part == "rows"]
        wrong = [line.wrong_rows + line.unaccounted + line.lost for line in rows if not line.failed]
        values = [line for line in self.lines if line.part == "values" and not line.failed]
        return bool(wrong) and not any(wrong) and all(one.is_near for one in values)


def _has(line: Line, what: dict[str, str]) -> bool:
    return all(getattr(line, name) == value for name, value in what.items())


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
        shutil.copy(file, KEPT / file.name)
    releases = read_releases(KEPT)
    PAGE.write_text(replace_section(PAGE.read_text(), releases))
    return 0 if all(one.is_good for one in releases if one.about.shape == DEFAULT_SHAPE) else 1


def read_releases(folder: Path) -> list[Release]:
    """In order of version, the usual shape first."""
    decoder = msgspec.json.Decoder(Line)
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        lines = [decoder.decode(text) for text in file.read_bytes().splitlines() if text.strip()]
        about = next((line for line in reversed(lines) if line.part == "about"), None)
        if about is not None:
            found.append(Release(about, tuple(lines)))
    return sorted(found, key=lambda one: (one.about.shape != DEFAULT_SHAPE, one.order))


def replace_section(page: str, releases: Sequence[Release]) -> str:
    """The page with the section on GPUs written anew; all before it is kept."""
    before = page.partition(HEADING)[0].rstrip()
    return before + "\n\n" + "\n\n".join([HEADING, *_section(releases)]) + "\n"


def summary(releases: Iterable[Release]) -> str:
    """Rows, values and ratios of every release with the usual shape; no column that is empty."""
    rows = [
        (*one.checked(runner), *(one.cost(runner, *kind) for kind in COSTS))
        for one in releases
        if one.about.shape == DEFAULT_SHAPE
        for runner in one.runners
    ]
    headings = (*CHECKED, *COSTS.values())
    shown = [at for at in range(len(headings)) if any(row[at] for row in rows)]
    return numbers.table(
        [headings[at] for at in shown], [[row[at] for at in shown] for row in rows]
    )


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
The other columns are the time per token over vLLM without taps at batch {batches}, with the shape
of {shape}. On the V2 runner it is taken in one engine, by turns, between its graphs and graphs of
the same model without taps; on V1 between two engines side by side, which differ by up to 4 % for
reasons of their own."""


def _section(releases: Sequence[Release]) -> list[str]:
    usual = [one for one in releases if one.about.shape == DEFAULT_SHAPE]
    if not usual:
        return [
            "Not measured yet: `python -m bench.gpu_release --out DIR` on a machine with a GPU."
        ]
    about = usual[-1].about
    days = " and ".join(sorted({one.about.day for one in releases}))
    measured = {line.batch for one in usual for line in one.lines if line.part == "overhead"}
    batches = " / ".join(str(batch) for batch in sorted(measured - {0}))
    told = {"gpu": about.gpu, "torch": about.torch, "python": about.python}
    times = [TIMES.format(batches=batches, shape=DEFAULT_SHAPE)] if batches else []
    parts = [TEXT.format(days=days, **told), *times, summary(usual)]
    if any(line.part == "weights" for one in usual for line in one.lines):
        parts += _sent_section(usual)
    for one in releases:
        if one not in usual:
            parts += _other_shape(one)
    return parts


def _sent_section(releases: Sequence[Release]) -> list[str]:
    return [
        "New weights of that shape handed over by a process on the same GPU, until they serve, and "
        "by vLLM's own `ipc`, which verifies nothing, in the same run:",
        numbers.table(
            ("vLLM", "`clairai_ipc`", "`ipc`", "`ipc`, packed"), [one.sent() for one in releases]
        ),
    ]


def _other_shape(one: Release) -> list[str]:
    rows = [
        (
            *(one.about.vllm, runner, one.alone(runner)),
            *(one.cost(runner, *kind) for kind in COSTS),
        )
        for runner in one.runners
    ]
    return [
        f"The shape of {one.about.shape} on {one.about.day}, vLLM alone in ms:",
        numbers.table(("vLLM", "runner", "ms a token", *COSTS.values()), rows),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
