"""Fetches the scores of an answer by its id, for libraries whose clients drop them.

A monitor must not break what it watches: a failure is a result with a reason, a warning and a
count, and an error only where that was asked for. Runs in: the user's process.
"""

from __future__ import annotations

import http.client
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from clairai.errors import NoScoresError
from clairai.library.http_client import ServerClient

DEFAULT_URL: Final = "http://127.0.0.1:6969/v1"
TIMEOUT_S: Final = 10.0
KEY: Final = "clairai"  # under which scores are put into the metadata of others
HEADER: Final = "X-Clairai-Scores"  # of a request: which probes to score it with
_OBJECT: Final = "clairai.scores"
_log: Final = logging.getLogger(__name__)

FailureKind = Literal["no-id", "no-scores", "refused", "not-clairai", "unreachable"]


@dataclass(frozen=True)
class ChoiceScores:
    """One choice of an answer, as `GET /v1/scores/{id}` has it; or why there is nothing."""

    fields: Mapping[str, Any]
    failure: FailureKind | None = None
    reason: str | None = None

    def metadata(self) -> dict[str, Any]:
        """As it is put into the metadata of others: JSON alone."""
        if self.failure is not None:
            return {"error": self.failure, "reason": self.reason}
        return dict(self.fields)


@dataclass(frozen=True)
class FetchedScores:
    """The scores of an answer, or why there are none."""

    id: str | None
    status: str | None = None
    choices: tuple[Mapping[str, Any], ...] = ()
    failure: FailureKind | None = None
    reason: str | None = None

    def choice(self, index: int) -> ChoiceScores:
        if self.failure is not None:
            return ChoiceScores({}, self.failure, self.reason)
        found = next((one for one in self.choices if one.get("index") == index), None)
        if found is None:
            reason = f"the scores of {self.id} have no choice {index}"
            return ChoiceScores({}, "no-scores", reason)
        return ChoiceScores({"id": self.id, "status": self.status, **found})


class ScoreFetcher:
    """Asks one proxy; may be used by several threads. `failures` counts by kind."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        strict: bool = False,
    ) -> None:
        """`base_url` is that of the OpenAI client; `strict` raises NoScoresError."""
        self._client = ServerClient(base_url.rstrip("/").removesuffix("/v1"), api_key)
        self._timeout_s, self._strict = timeout_s, strict
        self._counting = threading.Lock()
        self.failures: Counter[FailureKind] = Counter()

    def fetch(self, response_id: str | None) -> FetchedScores:
        """The scores of the answer that the client knows by this id."""
        found = self._fetch(response_id)
        if found.failure is None:
            return found
        with self._counting:
            self.failures[found.failure] += 1
        if self._strict:
            raise NoScoresError(found.reason or found.failure)
        _log.warning("an answer has no scores: %s", found.reason)
        return found

    def _fetch(self, response_id: str | None) -> FetchedScores:
        if not response_id:
            reason = "the library has dropped the id of the answer; docs/integrations.md says when"
            return FetchedScores(None, failure="no-id", reason=reason)
        url = self._client.url
        try:
            status, answer = self._client.ask_scores(response_id, self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            reason = f"{url} does not answer ({error})"
            return FetchedScores(response_id, failure="unreachable", reason=reason)
        if status == HTTPStatus.OK and answer.get("object") == _OBJECT:
            return FetchedScores(response_id, answer.get("status"), _choices(answer))
        failure, reason = _explain(status, answer, url)
        return FetchedScores(response_id, failure=failure, reason=reason)


def _choices(answer: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    found = answer.get("choices")
    return tuple(one for one in found if isinstance(one, dict)) if isinstance(found, list) else ()


def _explain(status: int, answer: Mapping[str, Any], url: str) -> tuple[FailureKind, str]:
    error = answer.get("error")
    fields = error if isinstance(error, dict) else {}
    message = str(fields.get("message", ""))
    if fields.get("code") == NoScoresError.code:
        return "no-scores", message
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return "refused", f"{url} refuses this key ({status}): {message}"
    if status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return "not-clairai", f"{url} is no proxy of clairai: /v1/scores was answered {status}"
    return "unreachable", f"{url} answered {status}: {message}"
