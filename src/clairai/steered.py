"""Takes vLLM's `LLM`; gives its steering vectors and what steers every request, while it runs.

Runs in the user's process; imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from clairai import wire_steer
from clairai.offline import ask
from clairai.steer import files
from clairai.steer.vector import Vector

Entry = Mapping[str, Any]


class VectorBank:
    """The named vectors of a running engine: list, add, replace, remove, without a restart.

    What a running request was admitted with stays as it is: a change acts on later requests.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def list(self) -> tuple[wire_steer.ListedVector, ...]:
        return self._state(wire_steer.ListVectors())

    def get(self, name: str) -> Vector:
        reply = ask(self._llm, wire_steer.GetVector(name), wire_steer.VectorFile)
        return files.loads(reply.data, source=f"vector {name}")

    def add(self, *vectors: Vector | str | Path) -> tuple[wire_steer.ListedVector, ...]:
        return self._state(wire_steer.PutVectors(tuple(map(_data, vectors)), "add"))

    def replace(self, *vectors: Vector | str | Path) -> tuple[wire_steer.ListedVector, ...]:
        return self._state(wire_steer.PutVectors(tuple(map(_data, vectors)), "replace"))

    def remove(self, *names: str) -> tuple[wire_steer.ListedVector, ...]:
        return self._state(wire_steer.RemoveVectors(names))

    def tiers(self) -> dict[str, Any]:
        """What steers every request: `base`, `prefill` and `decode`, each a list of entries."""
        return _shown(ask(self._llm, wire_steer.GetSteering(), wire_steer.SteeringState))

    def set_tiers(
        self,
        *,
        base: Sequence[Entry] | None = None,
        prefill: Sequence[Entry] | None = None,
        decode: Sequence[Entry] | None = None,
    ) -> dict[str, Any]:
        """Steer every request from now on; a tier that is not given stays, [] clears it."""
        control = wire_steer.SetSteering(_json(base), _json(prefill), _json(decode))
        return _shown(ask(self._llm, control, wire_steer.SteeringState))

    def amend(self, stream: int, steer: Sequence[Entry]) -> tuple[int, ...]:
        """Steer a running request otherwise from its next step on.

        Gives for each of its running answers the position from which it is steered so. `stream` is
        the number the request was given with `clairai.request(stream=...)`.
        """
        encoded = _json(steer)
        assert encoded is not None
        return ask(self._llm, wire_steer.Amend(stream, encoded), wire_steer.Amended).positions

    def _state(self, control: wire_steer.Control) -> tuple[wire_steer.ListedVector, ...]:
        return ask(self._llm, control, wire_steer.VectorState).vectors


def _data(vector: Vector | str | Path) -> bytes:
    return files.dumps(vector if isinstance(vector, Vector) else files.load(Path(vector)))


def _json(entries: Sequence[Entry] | None) -> bytes | None:
    return None if entries is None else msgspec.json.encode(list(entries))


def _shown(state: wire_steer.SteeringState) -> dict[str, Any]:
    tiers = {name: getattr(state, name) for name in ("base", "prefill", "decode")}
    shown: dict[str, Any] = {name: msgspec.json.decode(text) for name, text in tiers.items()}
    return {**shown, "version": state.version}
