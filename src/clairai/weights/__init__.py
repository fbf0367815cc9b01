"""Takes a trainer's new weights and probes; gives them to a serving engine, whole or not at all.

    from clairai.weights import Sender

    sent = Sender("http://127.0.0.1:8000").send(model.named_parameters())

Importing this imports no torch: who only reads a manifest needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clairai.weights.manifest import bank as bank
    from clairai.weights.sender import Sender as Sender
    from clairai.weights.sender import Sent as Sent

__all__ = ["Sender", "Sent", "bank"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'clairai.weights' has no attribute {name!r}")
    from clairai.weights import manifest, sender

    return getattr(manifest if name == "bank" else sender, name)
