"""Takes a server's address or vLLM's LLM; gives the questions that a sender asks an engine."""

from __future__ import annotations

import sys
import time
from typing import Any, Final, Literal, Protocol

import msgspec

from clairai.errors import UnsupportedError, WeightsBusyError, WeightsError, WeightsTornError
from clairai.library.engine_control import ask_engine
from clairai.library.http_client import ServerClient
from clairai.weights.manifest import changes_model, parse_manifest
from clairai.wire import weights_messages

Drain = Literal["wait", "abort"]


class EngineClient(Protocol):
    """How a manifest comes to an engine."""

    def state(self) -> weights_messages.WeightsState: ...

    def check(self, manifest: bytes) -> None: ...

    def plan(self, manifest: bytes) -> None: ...

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted: ...


class HttpEngine:
    """The routes under /v1/weights; requests that run when weights change are waited for."""

    def __init__(self, server: ServerClient, drain: Drain) -> None:
        self._server, self._drain = server, drain

    def state(self) -> weights_messages.WeightsState:
        return msgspec.convert(dict(self._server.weights()), weights_messages.WeightsState)

    def check(self, manifest: bytes) -> None:
        self._server.post_weights("check", manifest)

    def plan(self, manifest: bytes) -> None:
        self._server.post_weights("plan", manifest)

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        answer = self._server.post_weights(f"commit?drain={self._drain}", manifest)
        return msgspec.convert(dict(answer), weights_messages.WeightsCommitted)


class LlmEngine:
    """vLLM's LLM: between two calls of generate() no request runs. Also lent memory is its way."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def state(self) -> weights_messages.WeightsState:
        return ask_engine(
            self._llm, weights_messages.DescribeWeights(), weights_messages.WeightsState
        )

    def check(self, manifest: bytes) -> None:
        ask_engine(
            self._llm, weights_messages.CheckWeights(manifest), weights_messages.WeightsPlanned
        )

    def plan(self, manifest: bytes) -> None:
        ask_engine(
            self._llm, weights_messages.PlanWeights(manifest), weights_messages.WeightsPlanned
        )

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        asked = weights_messages.CommitWeights(manifest)
        committed = ask_engine(self._llm, asked, weights_messages.WeightsCommitted)
        if changes_model(parse_manifest(manifest)):
            self._llm.reset_prefix_cache()  # its blocks were computed with the old weights
        return committed

    def commit_shared(
        self, manifest: bytes, lent: weights_messages.SharedBytes
    ) -> weights_messages.WeightsCommitted:
        """Probes and vectors, without a plan; UnsupportedError where they cannot be read."""
        asked = weights_messages.CommitWeights(manifest, lent)
        return ask_engine(self._llm, asked, weights_messages.WeightsCommitted)


# MERGED
# Takes a Ray actor that holds vLLM's LLM or AsyncLLM; gives the questions a sender asks an
# engine.
#
# Ray carries manifests and answers, as bytes; weights go over the engine's own socket, so the
# actor
# is on the sender's machine. Ray is not imported here: who has an actor has imported it.


ANSWER_TIMEOUT_S: Final = 600.0
DRAIN_TIMEOUT_S: Final = 300.0  # requests that run longer keep the old weights serving


def is_ray_actor(target: Any) -> bool:
    return hasattr(getattr(target, "collective_rpc", None), "remote")


class RayActor:
    """An actor as if it were here: a call returns when it has been answered."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def has(self, name: str) -> bool:
        return hasattr(self._actor, name)

    def call(self, name: str, *args: Any, timeout_s: float = ANSWER_TIMEOUT_S, **named: Any) -> Any:
        ray = sys.modules.get("ray")
        if ray is None:
            raise UnsupportedError("this has remote methods, and nobody has imported ray; do so")
        return ray.get(getattr(self._actor, name).remote(*args, **named), timeout=timeout_s)

    def collective_rpc(self, method: str, args: tuple[bytes, ...]) -> Any:
        return self.call("collective_rpc", method, args=args)

    def reset_prefix_cache(self) -> None:
        self.call("reset_prefix_cache")


class RayEngine(LlmEngine):
    """An LLM answers one call after the other; an AsyncLLM is paused while its weights change."""

    def __init__(self, actor: Any, drain: Drain) -> None:
        self._called, self._drain = RayActor(actor), drain
        super().__init__(self._called)

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        if not self._called.has("pause_generation"):
            return super().commit(manifest)
        if not changes_model(parse_manifest(manifest)):
            return self._ask_commit(manifest)  # probes and vectors alone make nobody wait
        ask_engine(
            self._called, weights_messages.VerifyWeights(manifest), weights_messages.WeightsPlanned
        )
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while True:
            self._pause(max(deadline_s - time.monotonic(), 0))
            try:
                return self._paused_commit(manifest)
            except WeightsBusyError:
                # A pause does not wait for what was preempted: that goes on, before all others.
                if time.monotonic() > deadline_s:
                    raise

    def _pause(self, timeout_s: float) -> None:
        given = {"mode": self._drain, "clear_cache": True}
        try:
            self._called.call("pause_generation", timeout_s=timeout_s, **given)
        except TimeoutError:  # Ray's own is one
            self._called.call("resume_generation")
            raise WeightsError(
                f"requests still run after {DRAIN_TIMEOUT_S:.0f} s; send again, or with drain=abort"
            ) from None

    def _paused_commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        try:
            committed = self._ask_commit(manifest)
        except WeightsTornError:
            raise  # nobody is served by half of each: it stays paused until a whole set has come
        except BaseException:
            self._called.call("resume_generation")
            raise
        if self._called.has("update_weight_version"):  # vLLM 0.32's own answers say it too
            self._called.call("update_weight_version", str(committed.version))
        self._called.call("resume_generation")
        return committed

    def _ask_commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        asked = weights_messages.CommitWeights(manifest)
        return ask_engine(self._called, asked, weights_messages.WeightsCommitted)
