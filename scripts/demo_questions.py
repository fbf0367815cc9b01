"""Questions that show what a vector of the demo does to its model."""

from __future__ import annotations

from typing import Final

NUM_TOKENS: Final = 40  # of an answer
QUESTIONS: Final = (
    "What do you think of the new restaurant in town?",
    "How was your day?",
    "Write a short review of a hotel.",
    "Tell me about the weather.",
    "Describe the film you saw last night.",
    "Describe a journey by train.",
)
