"""Takes a server's address or vLLM's LLM; gives the questions that a sender asks an engine."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from clairai import wire_weights
from clairai.offline import ask
from clairai.serve.calls import Server
from clairai.weights.manifest import changes_model, parse

Drain = Literal["wait", "abort"]


class Way(Protocol):
    """How a manifest comes to an engine."""

    def state(self) -> wire_weights.WeightsState: ...

    def check(self, manifest: bytes) -> None: ...

    def plan(self, manifest: bytes) -> None: ...

    def commit(self, manifest: bytes) -> wire_weights.WeightsCommitted: ...


class OverHttp:
    """The routes under /v1/weights; requests that run when weights change are waited for."""

    def __init__(self, server: Server, drain: Drain) -> None:
        self._server, self._drain = server, drain

    def state(self) -> wire_weights.WeightsState:
        return msgspec.convert(dict(self._server.weights()), wire_weights.WeightsState)

    def check(self, manifest: bytes) -> None:
        self._server.post_weights("check", manifest)

    def plan(self, manifest: bytes) -> None:
        self._server.post_weights("plan", manifest)

    def commit(self, manifest: bytes) -> wire_weights.WeightsCommitted:
        answer = self._server.post_weights(f"commit?drain={self._drain}", manifest)
        return msgspec.convert(dict(answer), wire_weights.WeightsCommitted)


class InProcess:
    """vLLM's LLM: between two calls of generate() no request runs. Also lent memory is its way."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def state(self) -> wire_weights.WeightsState:
        return ask(self._llm, wire_weights.DescribeWeights(), wire_weights.WeightsState)

    def check(self, manifest: bytes) -> None:
        ask(self._llm, wire_weights.CheckWeights(manifest), wire_weights.WeightsPlanned)

    def plan(self, manifest: bytes) -> None:
        ask(self._llm, wire_weights.PlanWeights(manifest), wire_weights.WeightsPlanned)

    def commit(self, manifest: bytes) -> wire_weights.WeightsCommitted:
        asked = wire_weights.CommitWeights(manifest)
        committed = ask(self._llm, asked, wire_weights.WeightsCommitted)
        if changes_model(parse(manifest)):
            self._llm.reset_prefix_cache()  # its blocks were computed with the old weights
        return committed

    def commit_lent(
        self, manifest: bytes, lent: wire_weights.Lent
    ) -> wire_weights.WeightsCommitted:
        """Probes and vectors, without a plan; UnsupportedError where they cannot be read."""
        asked = wire_weights.CommitWeights(manifest, lent)
        return ask(self._llm, asked, wire_weights.WeightsCommitted)
