"""Runs the tests of every layout and writes the table of docs/layouts.md: `make layouts`.

`python -m scripts.layouts` runs all; names of layouts after it run these alone, and leave the other
rows of the table as they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "layouts.md"
FEATURES: Final = ("scores", "steering, gates", "captures", "new weights")
_TABLE: Final = re.compile(r"<!-- layouts -->\n(.*?)<!-- /layouts -->\n", re.DOTALL)
_PARALLEL: Final = "tests/engine/test_tensor_parallel.py"
_PIPELINE: Final = "tests/engine/test_pipeline_parallel.py"
_WEIGHTS: Final = "tests/engine/test_weights_ranks.py"
_FAULTS: Final = "tests/engine/test_rank_faults.py"
_CORES: Final = "tests/engine/test_data_parallel.py"
_SPECULATION: Final = "tests/engine/test_speculation.py"


@dataclass(frozen=True)
class Layout:
    """A row of the table: tests for what runs, and why the rest does not."""

    name: str
    test: tuple[str, ...] = ()  # of pytest: a file, and how to choose from it
    fixed: Mapping[str, str] = field(default_factory=dict)  # what is not tested, by feature

    def cells(self, outcome: str) -> list[str]:
        return [self.fixed.get(feature, outcome) for feature in FEATURES]


def _refuse_all(name: str, reason: str) -> Layout:
    rest = dict.fromkeys(FEATURES[1:], "refused")
    return Layout(name, fixed={FEATURES[0]: f"refused: {reason}", **rest})


_UNTRIED: Final = {"new weights": "not tried"}
LAYOUTS: Final = (
    Layout(
        "tensor parallel, 2 ranks",
        (
            *(_PARALLEL, _WEIGHTS, _FAULTS),
            *("-k", "(tensor-2 or test_weights_ranks or test_rank_faults) and not pp2"),
        ),
    ),
    Layout("tensor parallel, 4 ranks", (_PARALLEL, "-k", "tensor-4"), _UNTRIED),
    Layout("expert parallel, 2 ranks", (_PARALLEL, "-k", "expert-2"), _UNTRIED),
    Layout(
        "tensor parallel, 2 ranks on 2 nodes of Ray",
        fixed={
            "scores": "run, by `make ray`",
            "steering, gates": "run, by `make ray`",
            "captures": "run, by `make ray`",
            "new weights": "refused: not tried",
        },
    ),
    _refuse_all("sequence-parallel residuals", "rows are sharded between ranks"),
    Layout("pipeline parallel, 2 stages", (_PIPELINE, _WEIGHTS, "-k", "pp2 and not tp2")),
    Layout(
        "pipeline parallel, 2 stages of 2 ranks",
        (_PIPELINE, _WEIGHTS, "-k", "pp2 and tp2"),
    ),
    Layout("data parallel, 2 engine cores", (_CORES, "-k", "plain")),
    Layout("data parallel, 2 engine cores of 3 ranks", (_CORES, "-k", "tensor-3")),
    _refuse_all("prefill context parallel", "rows are split between ranks"),
    _refuse_all("dual batch overlap", "the batch is cut inside the forward"),
    Layout("speculative decoding, one rank", (_SPECULATION, "-k", "not tp2")),
    Layout("speculative decoding, tensor parallel, 2 ranks", (_SPECULATION, "-k", "tp2")),
    Layout("speculative decoding, data parallel, 2 engine cores", (_CORES, "-k", "speculating")),
    Layout(
        "KV connector `ExampleConnector`",
        ("tests/engine/test_kv_connector.py",),
        {"new weights": "refused: [it keeps KV of the old ones](#kv-connectors)"},
    ),
    Layout(
        "other KV connectors",
        fixed={
            "scores": "served, not tested",
            "steering, gates": "refused: [keys without the plan](#kv-connectors)",
            "captures": "refused: tokens they bring are never forwarded",
            "new weights": "refused",
        },
    ),
)


def render(outcomes: Mapping[str, str]) -> str:
    """The table, with what became of each layout's test."""
    lines = [f"| layout | {' | '.join(FEATURES)} |", f"|---{'|---' * len(FEATURES)}|"]
    for layout in LAYOUTS:
        cells = layout.cells(outcomes.get(layout.name, "not run"))
        lines.append(f"| {layout.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def read_outcomes(page: str) -> dict[str, str]:
    """What the page says of each layout that has a test."""
    found = _TABLE.search(page)
    rows = [] if found is None else found[1].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    first = {name: dict(zip(FEATURES, rest, strict=True)) for name, *rest in cells}
    return {
        layout.name: next(
            said for feature, said in first[layout.name].items() if feature not in layout.fixed
        )
        for layout in LAYOUTS
        if layout.test and layout.name in first
    }


def replace_table(page: str, outcomes: Mapping[str, str]) -> str:
    table = f"<!-- layouts -->\n{render(outcomes)}<!-- /layouts -->\n"
    return _TABLE.sub(lambda _: table, page)


def run(layout: Layout) -> str:
    """One layout's tests, alone: each starts an engine of several processes."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "1800", *layout.test]
    is_good = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    return "run" if is_good else "**failed**"


def main(names: Sequence[str]) -> int:
    outcomes = read_outcomes(PAGE.read_text())
    chosen = [one for one in LAYOUTS if one.test and (not names or one.name in names)]
    for layout in chosen:
        print(f"== {layout.name}", flush=True)
        outcomes[layout.name] = run(layout)
        PAGE.write_text(replace_table(PAGE.read_text(), outcomes))
    return int(any(outcomes[layout.name] != "run" for layout in chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
