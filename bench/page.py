"""What one change costs on the page, at 10,000 tokens and 64 probes.

A cost is the time from a frame's first callback until it is rendered: script, style, layout, paint.
An append is one more token with its 64 scores in tokens, chart of 8 lines, matrix and log.
Run: python -m bench.page
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from scripts.numbers import stamp, table, write_section
from scripts.web import ToolsMissing, prepare

LIMIT_S: Final = 300.0
BOUNDS_MS: Final = {"append": 20, "switch": 60}
SHOWN: Final = {
    "append": "a token is appended",
    "switch": "another probe is chosen",
    "hover": "another token is pointed at",
}


def main() -> int:
    began_s = time.monotonic()
    try:
        measured = measure()
    except ToolsMissing as missing:
        print(missing)
        return 1
    took = f"{time.monotonic() - began_s:.0f} s"
    text = summary(measured)
    print(text)
    what = (
        f"{measured['tokens']} tokens, {measured['probes']} probes, {measured['times']} changes of "
        f"each kind, headless Chromium {measured['chromium_version']} without a GPU, 1280 x 800. "
        "Milliseconds from the frame's first callback until it is rendered."
    )
    write_section("Page", [stamp("python -m bench.page", took=took), what, text])
    return 0 if is_within(measured) else 1


def measure() -> dict[str, Any]:
    """What web/bench/run.mjs says, the last line of its output."""
    done = prepare().run("node", "bench/run.mjs", timeout_s=LIMIT_S)
    if done.returncode:
        raise ToolsMissing(f"{done.stdout[-4000:]}\nthe benchmark failed")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(measured: dict[str, Any]) -> str:
    """A Markdown table."""
    rows = [
        [what, *(str(measured[f"{name}_ms"][part]) for part in ("p50", "p95", "max"))]
        for name, what in SHOWN.items()
    ]
    return table(["when", "p50, ms", "p95, ms", "max, ms"], rows)


def is_within(measured: dict[str, Any]) -> bool:
    """Whether 95 of 100 changes keep what is promised."""
    return all(measured[f"{name}_ms"]["p95"] <= bound for name, bound in BOUNDS_MS.items())


if __name__ == "__main__":
    sys.exit(main())
