"""Takes a bank before and after a change; gives the directions that have to be written, and where.

P = probes, D = model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clairai.probe.model import Probe
from clairai.probe.turned import Place


class Slots(NamedTuple):
    """New directions for neighbouring slots of a site."""

    site: int
    slot: int  # the first of them
    rows_PD: NDArray[np.float32]


def changed_slots(
    before: Mapping[Place, Probe | None], after: Mapping[Place, Probe]
) -> Iterator[Slots]:
    """What has to be written to come from one to the other; both are in order of places."""
    first, rows = (0, 0), list[NDArray[np.float32]]()
    for (site, slot), probe in after.items():
        if before.get((site, slot)) is probe:
            continue
        if rows and (site, slot) != (first[0], first[1] + len(rows)):
            yield Slots(*first, np.stack(rows))
            rows = []
        if not rows:
            first = (site, slot)
        rows.append(probe.direction_D)
    if rows:
        yield Slots(*first, np.stack(rows))


def block_slots(places: Sequence[Place], block_PD: NDArray[np.float32]) -> Iterator[Slots]:
    """All places, in order, whose rows are the block's."""
    begin = 0
    for end in range(1, len(places) + 1):
        site, slot = places[begin]
        if end == len(places) or places[end] != (site, slot + end - begin):
            yield Slots(site, slot, block_PD[begin:end])
            begin = end
