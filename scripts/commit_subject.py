"""Refuses a commit whose subject is not `area: change`, at most 72 characters."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

MAX_LENGTH: Final = 72
SUBJECT: Final = re.compile(r"[a-z][a-z0-9 ,/_.-]*: \S")


def find_fault(subject: str) -> str | None:
    """What is wrong with a subject; None if nothing is."""
    if subject.startswith(("fixup! ", "squash! ", "Merge ")):
        return None
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters, may have {MAX_LENGTH}; move the rest to the body"
    if not SUBJECT.match(subject):
        return "must read `area: change`, such as `ring: refuse a reader of another user`"
    return None


def main() -> int:
    subject = Path(sys.argv[1]).read_text().partition("\n")[0]
    fault = find_fault(subject)
    if fault is not None:
        sys.stderr.write(f"commit subject {fault}\n")
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main())
