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

    def __init__(self, tables: ScoreTables, bank: EngineBank) -> None:
        self._tables, self.bank = tables, bank
        self.copier = BufferCopier()
        tables.load(bank)

    def install(self, bank: EngineBank) -> EngineBank:
        """Score with this bank from the next step on."""
        self._tables.load(bank)
        self.bank = replace(bank, version=self.bank.version + 1)
        return self.bank
