"""Takes nothing; gives what the host knows of the steps it has sent, for Python and for C.

One truth for both: Python writes steps of any kind, C those that are like the one before.
"""

from __future__ import annotations

import ctypes
from typing import Final

NUM_BRIEFS: Final = 8  # as in ledger.h
WORD: Final = ctypes.c_int64
NO_FORM: Final = 0


class Sheet(ctypes.Structure):
    """One brief: where its words are, which step of all it is for, and which form it has."""

    words: int
    number: int
    form: int
    _fields_ = (("words", WORD), ("number", WORD), ("form", WORD))


class Ledger(ctypes.Structure):
    """struct ledger of ledger.h"""

    sent: int
    published: int
    step: int  # the number of the last one that had rows
    form: int  # of the last step, like the four below
    num_records: int
    num_requests: int
    num_tokens: int
    plan_words: int  # of one field of the plan, in every brief
    tokens_at: int  # the word of a brief at which the tokens' requests begin
    sheets: ctypes.Array[Sheet]
    _fields_ = (
        *((name, WORD) for name in ("sent", "published", "step", "form", "num_records")),
        *((name, WORD) for name in ("num_requests", "num_tokens", "plan_words", "tokens_at")),
        ("sheets", Sheet * NUM_BRIEFS),
    )

    @property
    def address(self) -> int:
        return ctypes.addressof(self)
