"""The targets, by name: one for each parser."""

from __future__ import annotations

from functools import cache

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    completions,
    control,
    doors,
    local_files,
    probes_and_vectors,
    requests,
    rings,
    stores,
    weights,
)


@cache
def all_targets() -> dict[str, Target]:
    rooms = (doors, requests, completions, probes_and_vectors, stores, rings, control, weights)
    found = [target for room in (*rooms, local_files) for target in room.targets()]
    assert len({target.name for target in found}) == len(found)
    return {target.name: target for target in found}
