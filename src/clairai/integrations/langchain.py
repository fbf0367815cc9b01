"""LangChain: a callback that puts the scores of each answer into its metadata.

Written against langchain-core and langchain-openai 1.7. Runs in: the user's process.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import Any, Final
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, Generation, LLMResult
from langchain_openai import ChatOpenAI

from clairai.integrations.fetch_scores import (
    DEFAULT_URL,
    HEADER,
    KEY,
    TIMEOUT_S,
    FetchedScores,
    ScoreFetcher,
)

MAX_HELD: Final = 1024
_RUN_PREFIX: Final = "lc_run--"  # of a message's id, before that of its run


class ScoresOfRuns:
    """The scores of the last runs, which are also in the metadata of their messages.

    Chunks of a stream were handed out before the scores are known: `of` finds them by any chunk.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self._fetcher = ScoreFetcher(base_url, api_key, timeout_s=timeout_s, strict=strict)
        self.raise_error = strict  # LangChain logs other errors of callbacks, and goes on
        self._holding = threading.Lock()
        self._held: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by run, the oldest first

    @property
    def failures(self) -> dict[str, int]:
        """Answers without scores, by kind."""
        return {str(kind): count for kind, count in self._fetcher.failures.items()}

    def of(self, message: BaseMessage) -> dict[str, Any] | None:
        """The scores of a message, or of a chunk of a stream that has ended; None if not held."""
        own: dict[str, Any] | None = message.response_metadata.get(KEY)
        if own is not None or message.id is None:
            return own
        with self._holding:
            return self._held.get(message.id.removeprefix(_RUN_PREFIX))

    def _attach(self, response: LLMResult, run_id: UUID) -> None:
        found = self._fetcher.fetch(find_response_id(response))
        for index, generation in enumerate(response.generations[0]):
            _put(generation, index, found)
        with self._holding:
            self._held[str(run_id)] = found.choice(0).metadata()
            while len(self._held) > MAX_HELD:
                self._held.popitem(last=False)


class ScoresCallback(ScoresOfRuns, BaseCallbackHandler):
    """For `invoke`, `batch` and `stream`; `ainvoke` runs it in a thread."""

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        self._attach(response, run_id)


class AsyncScoresCallback(ScoresOfRuns, AsyncCallbackHandler):
    """For `ainvoke`, `abatch` and `astream`."""

    async def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        await asyncio.to_thread(self._attach, response, run_id)


class ChatClairai(ChatOpenAI):
    """ChatOpenAI that asks for scores, and keeps the id of a streamed answer, which it drops."""

    def __init__(self, *, probes: str = "all", **fields: Any) -> None:
        """`probes` is `all`, or names with commas between them."""
        headers = {HEADER: probes, **(fields.pop("default_headers", None) or {})}
        super().__init__(default_headers=headers, **fields)

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], *more: Any, **named: Any
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, *more, **named)
        if made is not None and chunk.get("id"):
            made.message.response_metadata["id"] = chunk["id"]
        return made


def find_response_id(response: LLMResult) -> str | None:
    """The id that the server gave to the answer."""
    for generation in response.generations[0]:
        message = getattr(generation, "message", None)
        found = None if message is None else message.response_metadata.get("id")
        if found:
            return str(found)
    found = (response.llm_output or {}).get("id")
    return None if found is None else str(found)


def _put(generation: Generation, index: int, found: FetchedScores) -> None:
    made = found.choice(index).metadata()
    message = getattr(generation, "message", None)
    if message is not None:
        message.response_metadata[KEY] = made
    generation.generation_info = {**(generation.generation_info or {}), KEY: made}
