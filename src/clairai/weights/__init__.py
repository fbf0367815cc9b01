"""Send new weights, probes and vectors to an engine while it serves, all or nothing.

    from clairai.weights import Sender

    sent = Sender("http://127.0.0.1:8000").send(model.named_parameters())

The sender runs in the trainer, the receiver in the worker; over HTTP, the API server relays.
Importing this package imports no torch: reading a manifest needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clairai.compat.weight_trainer import TrainerInitInfo as TrainerInitInfo
    from clairai.weights.manifest import bank as bank
    from clairai.weights.sender import Sender as Sender
    from clairai.weights.sender import Sent as Sent

__all__ = ["Sender", "Sent", "bank"]  # and TrainerInitInfo, which needs vLLM


def __getattr__(name: str) -> object:
    if name == "TrainerInitInfo":
        from clairai.compat.weight_trainer import TrainerInitInfo

        return TrainerInitInfo
    if name not in __all__:
        raise AttributeError(f"module 'clairai.weights' has no attribute {name!r}")
    from clairai.weights import manifest, sender

    return getattr(manifest if name == "bank" else sender, name)
