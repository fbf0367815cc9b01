"""Takes what is known of engine and ring; gives the one word that /health answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["starting", "ready", "degraded", "failed"]


@dataclass(frozen=True)
class EngineWord:
    """What whoever started the engine says of it; upstream's own /health is asked only if None."""

    status: Literal["starting", "failed"]
    reason: str


class Health:
    """The last word on the engine; `clairai serve` tells it, the route reads it."""

    def __init__(self) -> None:
        self.word: EngineWord | None = None
        self.was_ready = False

    def tell(self, word: EngineWord | None) -> None:
        """From any thread; None takes the last word back: look for yourself."""
        self.word = word
