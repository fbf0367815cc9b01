"""Finds the prompts whose rows are not in a capture folder yet.

The manifest decides: a batch of prompts is one commit, so a prompt that has any row there has all.
Prompts are identified by content, so lines may be added to the file between two runs.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.batch.prompts import Prompt
from clairai.errors import ConfigError, StoreBusyError, StoreError, quote
from clairai.store.disk import MANIFEST, claim_folder
from clairai.store.read import Store, StoredRequest
from clairai.store.read import open as open_store
from clairai.store.row_block import RequestNote

BUSY_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05
_PROMPT: Final = "prompt"
_RUN: Final = "run"


@dataclass(frozen=True)
class RunIdentity:
    """What determines the rows of a prompt; runs that differ here need different folders."""

    model: str
    points: tuple[str, ...]
    positions: str  # JSON
    encoder: str  # JSON
    max_tokens: int

    @property
    def digest(self) -> str:
        identity = msgspec.json.encode(
            [self.model, self.points, self.positions, self.encoder, self.max_tokens]
        )
        return hashlib.sha256(identity).hexdigest()[:16]

    def tags(self, prompt: Prompt) -> dict[str, Any]:
        """The tags that identify a prompt's rows; ConfigError if they are too long to store."""
        prompt_tag = {"line": prompt.number, "sha256": prompt.digest}
        tags = {**prompt.tags, _PROMPT: prompt_tag, _RUN: self.digest}
        try:
            RequestNote.of(tags)
        except StoreError as error:
            raise ConfigError(f"line {prompt.number}: {error.reason}") from None
        return tags


def find_unfinished(folder: Path, prompts: Sequence[Prompt], run: RunIdentity) -> list[Prompt]:
    """ConfigError if the folder has rows of a different run."""
    wait_for_writer(folder)
    if not (folder / MANIFEST).exists():
        return list(prompts)
    return leave_out_finished(open_store(folder), prompts, run, folder=str(folder))


def leave_out_finished(
    store: Store, prompts: Sequence[Prompt], run: RunIdentity, *, folder: str
) -> list[Prompt]:
    """ConfigError if the store has rows of a different run; `folder` is its name."""
    done = Counter(_finished_prompts(store, run, folder))
    # First those that are where they were: of lines with the same content, any may be done.
    moved = [prompt for prompt in prompts if not done[_place(prompt)]]
    done.subtract(map(_place, prompts))
    left = Counter[str]()
    for (_, digest), count in done.items():
        left[digest] += max(count, 0)
    found = []
    for prompt in moved:
        if left[prompt.digest]:
            left[prompt.digest] -= 1
        else:
            found.append(prompt)
    return found


def _place(prompt: Prompt) -> tuple[int, str]:
    return prompt.number, prompt.digest


def wait_for_writer(folder: Path) -> None:
    """Wait until nobody writes to the folder: a killed run's capture writer still commits.

    StoreBusyError if it takes too long.
    """
    if not folder.is_dir():
        return
    deadline_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            with claim_folder(folder):
                return
        except StoreBusyError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_S)


def _finished_prompts(store: Store, run: RunIdentity, folder: str) -> list[tuple[int, str]]:
    """The line and the digest of each."""
    requests = store.requests()
    other = next((one for one in requests if not _is_of_run(one.tags, run)), None)
    if other is not None:
        raise ConfigError(
            f"{quote(folder, 200)} has rows that this run would not make, such as "
            f"{_describe(other)}; "
            "give another folder, or the model and options that it was begun with"
        )
    tags = [request.tags[_PROMPT] for request in requests]
    return [(int(one.get("line", 0)), str(one["sha256"])) for one in tags]


def _is_of_run(tags: Mapping[str, Any], run: RunIdentity) -> bool:
    place = tags.get(_PROMPT)
    return tags.get(_RUN) == run.digest and isinstance(place, Mapping) and "sha256" in place


def _describe(request: StoredRequest) -> str:
    encoders = ", ".join(sorted({origin.encoder for origin in request.origins}))
    models = ", ".join(sorted({origin.model for origin in request.origins}))
    return f"{len(request.points)} points of {models} as {encoders}"
