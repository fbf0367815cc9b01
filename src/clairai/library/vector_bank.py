"""Takes vLLM's `LLM`; gives its steering vectors and what steers every request, while it runs.

Runs in the user's process; imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from clairai.library.engine_control import ask_engine
from clairai.vector import files
from clairai.vector.model import Vector
from clairai.wire import steering_messages

EntryJson = Mapping[str, Any]


class VectorBank:
    """The named vectors of a running engine: list, add, replace, remove, without a restart.

    What a running request was admitted with stays as it is: a change acts on later requests.
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
        """What steers every request: `base`, `prefill` and `decode`, each a list of entries."""
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
        """Steer every request from now on; a tier that is not given stays, [] clears it."""
        control = steering_messages.SetSteering(
            _encode_entries(base), _encode_entries(prefill), _encode_entries(decode)
        )
        return _decode_tiers(ask_engine(self._llm, control, steering_messages.SteeringState))

    def amend(self, stream: int, steer: Sequence[EntryJson]) -> tuple[int, ...]:
        """Steer a running request otherwise from its next step on.

        Gives for each of its running answers the position from which it is steered so. `stream` is
        the number the request was given with `clairai.request(stream=...)`.
        """
        encoded = _encode_entries(steer)
        assert encoded is not None
        return ask_engine(
            self._llm,
            steering_messages.ChangeSteering(stream, encoded),
            steering_messages.SteeringChanged,
        ).positions

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
    shown: dict[str, Any] = {name: msgspec.json.decode(text) for name, text in tiers.items()}
    return {**shown, "version": state.version}
