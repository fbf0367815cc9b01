"""Draws the memory, descriptors and threads of a soak's processes as one SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final

from bench.soak_footprint import Sample, by_process

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 860, 180, 64, 210, 34, 44
LEGEND: Final = WIDTH - RIGHT + 16
COLOURS: Final = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#64748b")
PANELS: Final[tuple[tuple[str, Callable[[Sample], float]], ...]] = (
    ("own memory, MiB", lambda sample: sample.anon_kib / 1024),
    ("descriptors", lambda sample: float(sample.descriptors)),
    ("threads", lambda sample: float(sample.threads)),
)
NUM_TICKS: Final = 4


def draw(samples: Sequence[Sample], warm_s: float) -> str:
    """A panel for each quantity, a line for each process; what is before `warm_s` is shaded."""
    lines = by_process(samples)
    colours = {key: COLOURS[at % len(COLOURS)] for at, key in enumerate(lines)}
    end_s = max((sample.at_s for sample in samples), default=1.0) or 1.0
    height = TOP + len(PANELS) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for at, (title, value) in enumerate(PANELS):
        top = TOP + at * (PANEL + GAP)
        parts += _panel(title, value, lines, colours, top=top, end_s=end_s, warm_s=warm_s)
    for at, ((role, pid), colour) in enumerate(colours.items()):
        y = TOP + 14 * at + 8
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 16}" y="{y - 8}" width="10" height="4" fill="{colour}"/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT + 32}" y="{y - 3}">{escape(f"{role} ({pid})")}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    title: str,
    value: Callable[[Sample], float],
    lines: Mapping[tuple[str, int], Sequence[Sample]],
    colours: Mapping[tuple[str, int], str],
    *,
    top: int,
    end_s: float,
    warm_s: float,
) -> list[str]:
    highest = max((value(one) for own in lines.values() for one in own), default=1.0) or 1.0
    across = WIDTH - LEFT - RIGHT

    def x(at_s: float) -> float:
        return LEFT + across * at_s / end_s

    def y(number: float) -> float:
        return top + PANEL * (1 - number / highest)

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{escape(title)}</text>']
    parts.append(
        f'<rect x="{LEFT}" y="{top}" width="{x(warm_s) - LEFT:.1f}" height="{PANEL}" '
        'fill="#f1f5f9"/>'
    )
    for tick in range(NUM_TICKS + 1):
        number = highest * tick / NUM_TICKS
        parts.append(
            f'<path d="M{LEFT} {y(number):.1f}H{LEFT + across}" stroke="#e2e8f0" fill="none"/>'
            f'<text x="{LEFT - 6}" y="{y(number) + 4:.1f}" text-anchor="end">{number:.0f}</text>'
        )
        at_s = end_s * tick / NUM_TICKS
        parts.append(
            f'<text x="{x(at_s):.1f}" y="{top + PANEL + 14}" text-anchor="middle">'
            f"{at_s / 60:.1f} min</text>"
        )
    for key, own in lines.items():
        points = " ".join(f"{x(one.at_s):.1f},{y(value(one)):.1f}" for one in own)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[key]}" stroke-width="1.5"/>'
        )
    return parts
