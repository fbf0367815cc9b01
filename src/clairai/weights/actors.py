"""Takes a Ray actor that holds vLLM's LLM or AsyncLLM; gives the questions a sender asks an engine.

Ray carries manifests and answers, as bytes; weights go over the engine's own socket, so the actor
is on the sender's machine. Ray is not imported here: who has an actor has imported it.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

from clairai import wire_weights
from clairai.errors import UnsupportedError, WeightsBusyError, WeightsError, WeightsTornError
from clairai.offline import ask
from clairai.weights.manifest import changes_model, parse
from clairai.weights.ways import Drain, InProcess

ANSWER_S: Final = 600.0
DRAIN_S: Final = 300.0  # requests that run longer keep the old weights serving


def is_actor(target: Any) -> bool:
    return hasattr(getattr(target, "collective_rpc", None), "remote")


class Called:
    """An actor as if it were here: a call returns when it has been answered."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def has(self, name: str) -> bool:
        return hasattr(self._actor, name)

    def call(self, name: str, *args: Any, timeout_s: float = ANSWER_S, **named: Any) -> Any:
        ray = sys.modules.get("ray")
        if ray is None:
            raise UnsupportedError("this has remote methods, and nobody has imported ray; do so")
        return ray.get(getattr(self._actor, name).remote(*args, **named), timeout=timeout_s)

    def collective_rpc(self, method: str, args: tuple[bytes, ...]) -> Any:
        return self.call("collective_rpc", method, args=args)

    def reset_prefix_cache(self) -> None:
        self.call("reset_prefix_cache")


class ByActor(InProcess):
    """An LLM answers one call after the other; an AsyncLLM is paused while its weights change."""

    def __init__(self, actor: Any, drain: Drain) -> None:
        self._called, self._drain = Called(actor), drain
        super().__init__(self._called)

    def commit(self, manifest: bytes) -> wire_weights.WeightsCommitted:
        if not self._called.has("pause_generation"):
            return super().commit(manifest)
        if not changes_model(parse(manifest)):
            return self._ask_commit(manifest)  # probes and vectors alone make nobody wait
        ask(self._called, wire_weights.VerifyWeights(manifest), wire_weights.WeightsPlanned)
        deadline_s = time.monotonic() + DRAIN_S
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
                f"requests still run after {DRAIN_S:.0f} s; send again, or with drain=abort"
            ) from None

    def _paused_commit(self, manifest: bytes) -> wire_weights.WeightsCommitted:
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

    def _ask_commit(self, manifest: bytes) -> wire_weights.WeightsCommitted:
        asked = wire_weights.CommitWeights(manifest)
        return ask(self._called, asked, wire_weights.WeightsCommitted)
