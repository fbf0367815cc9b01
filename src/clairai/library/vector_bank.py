"""`clairai.VectorBank`: lists and changes the vectors and the global steering of a running engine.

Runs in: the user's process; imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from clairai.library.engine_control import ask_engine, require_running
from clairai.vector import files
from clairai.vector.model import Vector
from clairai.wire import steering_messages

EntryJson = Mapping[str, Any]


class VectorBank:
    """The named vectors of a running engine, and what steers every request.

    A change acts on later requests; those that are running keep what they were admitted with.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def list(self) -> tuple[steering_messages.ListedVector, ...]:
        return self._state(steering_messages.ListVectors())

    def get(self, name: str) -> Vector:
        reply = ask_engine(
            self._llm, steering_messages.GetVector(name), steering_messages.VectorFile
        )
        return files.loads(reply.data, source=f"vector {name}")

    def add(self, *vectors: Vector | str | Path) -> tuple[steering_messages.ListedVector, ...]:
        return self._state(steering_messages.PutVectors(tuple(map(_to_file_bytes, vectors)), "add"))

    def replace(self, *vectors: Vector | str | Path) -> tuple[steering_messages.ListedVector, ...]:
        return self._state(
            steering_messages.PutVectors(tuple(map(_to_file_bytes, vectors)), "replace")
        )

    def remove(self, *names: str) -> tuple[steering_messages.ListedVector, ...]:
        return self._state(steering_messages.RemoveVectors(names))

    def tiers(self) -> dict[str, Any]:
        """What steers every request: lists of entries under `base`, `prefill` and `decode`."""
        return _decode_tiers(
            ask_engine(self._llm, steering_messages.GetSteering(), steering_messages.SteeringState)
        )

    def set_tiers(
        self,
        *,
        base: Sequence[EntryJson] | None = None,
        prefill: Sequence[EntryJson] | None = None,
        decode: Sequence[EntryJson] | None = None,
    ) -> dict[str, Any]:
        """Change what steers every later request; None leaves a tier as it is, [] clears it."""
        control = steering_messages.SetSteering(
            _encode_entries(base), _encode_entries(prefill), _encode_entries(decode)
        )
        return _decode_tiers(ask_engine(self._llm, control, steering_messages.SteeringState))

    def amend(self, stream: int, steer: Sequence[EntryJson]) -> tuple[int, ...]:
        """Change the steering of a running request from its next step on.

        Returns the first position of the change for each of its running answers. `stream` is the
        number that was given with `clairai.request(stream=...)`.
        """
        control = steering_messages.ChangeSteering(stream, msgspec.json.encode(list(steer)))
        changed = ask_engine(self._llm, control, steering_messages.SteeringChanged)
        return require_running(changed, stream).positions

    def _state(
        self, control: steering_messages.SteeringControl
    ) -> tuple[steering_messages.ListedVector, ...]:
        return ask_engine(self._llm, control, steering_messages.VectorState).vectors


def _to_file_bytes(vector: Vector | str | Path) -> bytes:
    return files.dumps(vector if isinstance(vector, Vector) else files.load(Path(vector)))


def _encode_entries(entries: Sequence[EntryJson] | None) -> bytes | None:
    return None if entries is None else msgspec.json.encode(list(entries))


def _decode_tiers(state: steering_messages.SteeringState) -> dict[str, Any]:
    tiers = {name: getattr(state, name) for name in ("base", "prefill", "decode")}
    decoded: dict[str, Any] = {name: msgspec.json.decode(text) for name, text in tiers.items()}
    return {**decoded, "version": state.version}
