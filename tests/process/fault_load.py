"""What a service is busy with when a fault comes: streams, captures, new weights."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from clairai.store.read import open as open_store
from tests.process.fault_matrix import State
from tests.process.faulted_service import FaultedService, wait_for

CLIENT_DEADLINE_S: Final = 60.0  # after so long without a byte a client gives up
BEGUN_TOKENS: Final = 4  # a stream that has sent so many runs
BEGIN_S: Final = 60.0
ASK_AGAIN_S: Final = 0.25
REFUSALS: Final = ("502", "503")
PROMPT: Final = "Once upon a time there was"


@dataclass
class Answer:
    """One streamed answer, as far as it came."""

    tokens: list[int] = field(default_factory=list)
    scores: list[list[float | None]] = field(default_factory=list)
    prompt_tokens: int = 0
    capture: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # empty: it is whole, or still running
    was_broken: bool = False  # the connection went, instead of an error that says why
    ended_s: float | None = None

    @property
    def is_whole(self) -> bool:
        return self.ended_s is not None and not self.error


@dataclass(frozen=True)
class Ask:
    """What a client asks for, again and again."""

    max_tokens: int
    captures: bool = False

    def body(self, model: str) -> dict[str, Any]:
        ours: dict[str, Any] = {"probes": "all"}
        if self.captures:
            ours["capture"] = {"positions": "all"}
        return {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "clairai": ours,
        }


def stream_answer(
    client: httpx.Client, body: dict[str, Any], answer: Answer, *, is_over: threading.Event
) -> None:
    """Fill in `answer` as it comes; returns when it has ended, in whatever way."""
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            _read(response, answer, is_over)
    except httpx.HTTPError as error:
        answer.error, answer.was_broken = f"{type(error).__name__}: {error}", True
    finally:
        answer.ended_s = time.monotonic()


def _read(response: httpx.Response, answer: Answer, is_over: threading.Event) -> None:
    if response.status_code != httpx.codes.OK:
        response.read()
        answer.error = f"{response.status_code}: {_error_text(response)}"
        return
    for data in _events(response):
        _apply(answer, data)
        if is_over.is_set():
            return
    if not answer.error and not answer.tokens:
        answer.error, answer.was_broken = "the stream ended without an end", True


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _apply(answer: Answer, data: dict[str, Any]) -> None:
    if "error" in data:
        answer.error = str(data["error"].get("message", data["error"]))
    answer.capture |= (data.get("clairai") or {}).get("capture") or {}
    for choice in data.get("choices", ()):
        answer.tokens += choice.get("token_ids") or []
        answer.scores += (choice.get("probe_scores") or {}).get("scores", [])
        answer.prompt_tokens = answer.prompt_tokens or len(choice.get("prompt_token_ids") or [])


def _error_text(response: httpx.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(response.json()["error"]["message"])
    return response.text[:200]


class Client:
    """Asks the same again and again, until it is told to stop or an answer fails."""

    def __init__(self, service: FaultedService, ask: Ask, *, may_be_refused: bool) -> None:
        """`may_be_refused`: a new request that is refused is asked again."""
        self._client, self._body = service.client(CLIENT_DEADLINE_S), ask.body(service.model)
        self._may_be_refused, self.num_refused = may_be_refused, 0
        self.answers: list[Answer] = []
        self._is_leaving = threading.Event()  # after this answer
        self._is_over = threading.Event()  # now
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def failed(self) -> Answer | None:
        return self.answers[-1] if self.answers and self.answers[-1].error else None

    def has_begun(self) -> bool:
        return bool(self.answers) and len(self.answers[-1].tokens) >= BEGUN_TOKENS

    def leave(self) -> None:
        """Take this answer to its end, and ask no more."""
        self._is_leaving.set()
        self._thread.join(CLIENT_DEADLINE_S)
        self.hang_up()

    def hang_up(self) -> None:
        self._is_leaving.set()
        self._is_over.set()
        self._thread.join(CLIENT_DEADLINE_S)
        self._client.close()

    def _run(self) -> None:
        while not self._is_leaving.is_set() and self.failed is None:
            self.answers.append(Answer())
            stream_answer(self._client, self._body, self.answers[-1], is_over=self._is_over)
            if self._may_be_refused and self.answers[-1].error.startswith(REFUSALS):
                self.answers.pop()
                self.num_refused += 1
                self._is_leaving.wait(ASK_AGAIN_S)


class Sends(Protocol):
    """What is used of clairai.weights.Sender."""

    def send(self, named: Any, *, label: str = "", progress: Any = None) -> Any: ...


class Transfer:
    """New weights on their way; held after the first buffer until `go_on`."""

    def __init__(self, sender: Sends, weights: Path) -> None:
        self.is_held = threading.Event()
        self._may_go_on = threading.Event()
        self.error = ""
        self.is_done = False
        self._thread = threading.Thread(
            target=self._run, args=(sender, weights), name="transfer", daemon=True
        )
        self._thread.start()

    def release(self, wait_s: float) -> None:
        """Let it go on while the fault lasts; a commit still waits for answers that run."""
        self._may_go_on.set()
        self._thread.join(wait_s)

    def go_on(self, timeout_s: float) -> None:
        """To its end, good or bad."""
        self._may_go_on.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.error = f"the sender had not ended after {timeout_s:g} s"

    def _run(self, sender: Sends, weights: Path) -> None:
        try:
            sender.send(weights, progress=self._hold)
            self.is_done = True
        except Exception as error:  # judged by the cell
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.is_held.set()

    def _hold(self, *_: int) -> None:
        self.is_held.set()
        self._may_go_on.wait()


ASKS: Final[dict[State, Sequence[Ask]]] = {
    State.IDLE: (),
    State.STREAMING: (Ask(6000),) * 2,
    State.CAPTURING: (Ask(32, captures=True),) * 2,
    State.SWAPPING: (Ask(24),),
}


@dataclass
class Load:
    """The clients of one cell, and a transfer if weights are being swapped."""

    clients: list[Client]
    transfer: Transfer | None = None

    @classmethod
    def begin(
        cls,
        service: FaultedService,
        state: State,
        sender: Sends,
        weights: Path,
        *,
        may_be_refused: bool,
    ) -> Load:
        """Returns when the service is in that state."""
        asks = ASKS[state]
        made = cls([Client(service, ask, may_be_refused=may_be_refused) for ask in asks])
        for client in made.clients:
            wait_for(client.has_begun, BEGIN_S, "a stream begins")
        if state is State.CAPTURING:
            wait_for(made._has_kept_rows, BEGIN_S, "rows of a first answer are kept")
        if state is State.SWAPPING:
            made.transfer = Transfer(sender, weights)
            made.transfer.is_held.wait(BEGIN_S)
            assert not made.transfer.error, made.transfer.error
        return made

    def _has_kept_rows(self) -> bool:
        first = self.clients[0]
        assert first.failed is None, first.failed
        return first.answers[0].capture.get("state") == "kept" and first.has_begun()

    def answers(self) -> list[Answer]:
        return [answer for client in self.clients for answer in client.answers]

    def leave(self) -> None:
        for client in self.clients:
            client.leave()

    def hang_up(self) -> None:
        for client in self.clients:
            client.hang_up()


def expected_rows(answer: Answer) -> int:
    """Of a whole answer, at the one point that is tapped: the last token is never forwarded."""
    return answer.prompt_tokens + len(answer.tokens) - 1


def stored_fault(folder: Path, answer: Answer, *, must_be_whole: bool) -> str:
    """What is wrong with the stored rows of an answer; empty if nothing is."""
    stream = int(answer.capture["id"], 16)
    store = open_store(folder)
    if not store.has(stream):
        return f"no row of {answer.capture['id']} is stored" if must_be_whole else ""
    rows = store.rows(stream)
    if must_be_whole and len(rows) != expected_rows(answer):
        return f"{len(rows)} of {expected_rows(answer)} rows of {answer.capture['id']} are stored"
    for position, token in zip(rows.position.tolist(), rows.token_id.tolist(), strict=True):
        index = position - answer.prompt_tokens
        if 0 <= index < len(answer.tokens) and answer.tokens[index] != token:
            return f"row {position} of {answer.capture['id']} has token {token}"
    if not bool((abs(rows[:]) < 1e6).all()):
        return f"rows of {answer.capture['id']} have wild values"
    return ""
