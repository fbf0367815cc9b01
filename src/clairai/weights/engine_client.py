"""What a sender asks an engine: over HTTP, through vLLM's LLM, or through a Ray actor of it.

Runs in: the trainer. Only manifests and replies go this way; buffers go by a transport.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from clairai.errors import UnsupportedError, WeightsBusyError, WeightsError, WeightsTornError
from clairai.library.engine_control import ask_engine
from clairai.library.http_client import ServerClient
from clairai.weights.manifest import changes_model, parse_manifest
from clairai.wire import weights_messages

Drain = Literal["wait", "abort"]
ANSWER_TIMEOUT_S: Final = 600.0
DRAIN_TIMEOUT_S: Final = 300.0  # the old weights go on serving if requests run longer


@runtime_checkable
class EngineClient(Protocol):
    """The questions a sender asks about a manifest."""

    def state(self) -> weights_messages.WeightsState: ...

    def check(self, manifest: bytes) -> None: ...

    def plan(self, manifest: bytes) -> None: ...

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted: ...


class HttpEngine:
    """A server, through its routes under /v1/weights."""

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
    """vLLM's LLM in this process; no request runs between two calls of generate()."""

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
        self, manifest: bytes, shared: weights_messages.SharedBytes
    ) -> weights_messages.WeightsCommitted:
        """Commit probes and vectors without a plan; UnsupportedError if they cannot be read."""
        asked = weights_messages.CommitWeights(manifest, shared)
        return ask_engine(self._llm, asked, weights_messages.WeightsCommitted)


def is_ray_actor(target: Any) -> bool:
    return hasattr(getattr(target, "collective_rpc", None), "remote")


class _RayActor:
    """Calls a Ray actor and waits for the answer. Whoever has an actor has imported ray."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def has(self, name: str) -> bool:
        return hasattr(self._actor, name)

    def call(self, name: str, *args: Any, timeout_s: float = ANSWER_TIMEOUT_S, **named: Any) -> Any:
        ray = sys.modules.get("ray")
        if ray is None:
            raise UnsupportedError(
                "this object has remote methods, but ray is not imported; import it"
            )
        return ray.get(getattr(self._actor, name).remote(*args, **named), timeout=timeout_s)

    def collective_rpc(self, method: str, args: tuple[bytes, ...]) -> Any:
        return self.call("collective_rpc", method, args=args)

    def reset_prefix_cache(self) -> None:
        self.call("reset_prefix_cache")


class RayEngine(LlmEngine):
    """A Ray actor of an LLM or AsyncLLM; an AsyncLLM is paused while its weights change.

    The actor must be on this machine: buffers go over the engine's own socket.
    """

    def __init__(self, actor: Any, drain: Drain) -> None:
        self._ray, self._drain = _RayActor(actor), drain
        super().__init__(self._ray)

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        if not self._ray.has("pause_generation"):
            return super().commit(manifest)
        if not changes_model(parse_manifest(manifest)):
            return self._ask_commit(manifest)  # no request has to wait for probes and vectors
        ask_engine(
            self._ray, weights_messages.VerifyWeights(manifest), weights_messages.WeightsPlanned
        )
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while True:
            self._pause(max(deadline_s - time.monotonic(), 0))
            try:
                return self._commit_paused(manifest)
            except WeightsBusyError:
                # vLLM's pause does not wait for preempted requests: those go on first.
                if time.monotonic() > deadline_s:
                    raise

    def _pause(self, timeout_s: float) -> None:
        options = {"mode": self._drain, "clear_cache": True}
        try:
            self._ray.call("pause_generation", timeout_s=timeout_s, **options)
        except TimeoutError:  # ray.exceptions.GetTimeoutError is one
            self._ray.call("resume_generation")
            raise WeightsError(
                f"requests still run after {DRAIN_TIMEOUT_S:.0f} s; send again, or with drain=abort"
            ) from None

    def _commit_paused(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        try:
            committed = self._ask_commit(manifest)
        except WeightsTornError:
            raise  # stay paused until a whole set of weights has come
        except BaseException:
            self._ray.call("resume_generation")
            raise
        if self._ray.has("update_weight_version"):  # vLLM 0.32 has it in its own responses
            self._ray.call("update_weight_version", str(committed.version))
        self._ray.call("resume_generation")
        return committed

    def _ask_commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        asked = weights_messages.CommitWeights(manifest)
        return ask_engine(self._ray, asked, weights_messages.WeightsCommitted)
