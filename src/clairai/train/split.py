"""Takes documents; gives each its fold: the last is held out, the others are left out in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from clairai.errors import ConfigError
from clairai.train.documents import Document

NUM_FOLDS: Final = 4
HELD_OUT: Final = NUM_FOLDS - 1  # chooses nothing and fits nothing: it is scored, once, at the end
MIN_DOCUMENTS: Final = 2 * NUM_FOLDS  # of each label


def folds(documents: Sequence[Document], *, seed: int) -> list[int]:
    """As the documents say, where they do; else both labels in each, and the same text in one."""
    given = [document.fold for document in documents if document.fold is not None]
    if given:
        assert len(given) == len(documents), "either all documents know their fold, or none does"
        return given
    return _drawn(documents, seed)


def _drawn(documents: Sequence[Document], seed: int) -> list[int]:
    """Whole documents are dealt out, never tokens: neighbours in a text say the same."""
    numbers: dict[object, int] = {}
    groups = [numbers.setdefault(document.key, len(numbers)) for document in documents]
    positive = np.array([document.is_positive for document in documents])
    for label, name in ((True, "with"), (False, "without")):
        num_texts = len({g for g, is_it in zip(groups, positive, strict=True) if is_it == label})
        if num_texts < MIN_DOCUMENTS:
            raise ConfigError(
                f"{num_texts} different documents {name} the concept; give at least {MIN_DOCUMENTS}"
            )
    dealt = [0] * len(documents)
    dealer = StratifiedGroupKFold(NUM_FOLDS, shuffle=True, random_state=seed)
    for fold, (_, chosen) in enumerate(dealer.split(positive, positive, groups)):
        for index in chosen.tolist():
            dealt[index] = fold
    return dealt
