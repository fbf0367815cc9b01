"""The bank of a rank that scores and does not publish.

Runs in: the workers of a pipeline, except for the one with the ring.
"""

from __future__ import annotations

from dataclasses import replace

from clairai.engine.score.score_tables import ScoreTables
from clairai.local.shared_buffer import BufferCopier
from clairai.probe.bank import EngineBank


class HeldBank:
    """Follows every change of the bank: what is asked of one rank is asked of all."""

    def __init__(self, tables: ScoreTables, bank: EngineBank, weights: int | None = None) -> None:
        """`weights`: the version it starts with; None: they cannot change."""
        self._tables, self.bank, self.weights = tables, bank, weights
        self.copier = BufferCopier()
        tables.load(bank)

    def install(self, bank: EngineBank) -> EngineBank:
        """Score with this bank from the next step on."""
        self._tables.load(bank)
        self.bank = replace(bank, version=self.bank.version + 1)
        return self.bank

    def set_weights_version(self, version: int, bank_version: int | None = None) -> None:
        """Other weights are another version of the bank, as in the rank with the ring."""
        self.weights = version
        self.bank = replace(self.bank, version=bank_version or self.bank.version + 1)
