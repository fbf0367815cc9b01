"""Probes for a model whose scores identify the token that they were computed for.

Random projections at pre_attn.0, where the residual stream is the token's embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from clairai.probe.files import save
from tests.engine.attribution import probes, projections

TOLERANCE = 1e-3


class Embedding:
    """What each token must score; V = vocabulary, P = probes."""

    def __init__(self, model: Path) -> None:
        with safe_open(model / "model.safetensors", "np") as file:
            vocabulary_VD = np.asarray(file.get_tensor("model.embed_tokens.weight"), np.float32)
        self._directions_DP = projections(vocabulary_VD)
        self._expected_VP: NDArray[np.float32] = vocabulary_VD @ self._directions_DP

    def save_probes(self, folder: Path) -> None:
        for probe in probes(self._directions_DP):
            save(folder / f"{probe.name.replace(':', '-')}.safetensors", probe)

    def wrong(self, token_ids: list[int], scores: list[list[float | None]]) -> list[str]:
        """Where a score is not its own token's; one that is missing is wrong too."""
        if len(scores) != len(token_ids):
            return [f"{len(scores)} rows for {len(token_ids)} tokens"]
        found = []
        for at, (token_id, row) in enumerate(zip(token_ids, scores, strict=True)):
            if None in row:
                found.append(f"token {at} has no score")
            elif not self._is_own(token_id, row):
                found.append(f"token {at} was scored as token {self._nearest(row)}, is {token_id}")
        return found

    def _is_own(self, token_id: int, row: list[Any]) -> bool:
        expected_P = self._expected_VP[token_id]
        return bool(np.allclose(row, expected_P, rtol=TOLERANCE, atol=TOLERANCE))

    def _nearest(self, row: list[Any]) -> int:
        return int(np.abs(self._expected_VP - np.array(row)).max(axis=1).argmin())
