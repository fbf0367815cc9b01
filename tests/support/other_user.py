"""Makes files look as if another user owned them: really, for root; else by being somebody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

OTHER_UID: Final = 61234


def give_away(*paths: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards these belong to a user who is neither this one nor root."""
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, OTHER_UID, OTHER_UID, follow_symlinks=False)
        return
    # Everything this user has made is another's now; what root has is trusted as before.
    monkeypatch.setattr("os.geteuid", lambda: OTHER_UID)
