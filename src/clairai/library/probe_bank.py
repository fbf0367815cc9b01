"""Lists and changes the probes of a running engine.

Runs in: the user's process. Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ProbeError, UnsupportedError, WeightsError
from clairai.library.engine_control import ask_engine
from clairai.local.shared_buffer import ReusableBuffer
from clairai.probe.files import dumps
from clairai.probe.model import Probe
from clairai.wire import control_messages

_SHARED_BUFFER: Final = "clairai_shared_buffer"


class ProbeBank:
    """The probes of a running engine: list, add, replace, remove, without a restart."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def list(self) -> tuple[control_messages.ListedProbe, ...]:
        return self._change(control_messages.ListProbes())

    def add(self, *probes: Probe) -> tuple[control_messages.ListedProbe, ...]:
        return self._change(control_messages.AddProbes(tuple(map(dumps, probes))))

    def replace(self, *probes: Probe) -> tuple[control_messages.ListedProbe, ...]:
        return self._change(control_messages.ReplaceProbes(tuple(map(dumps, probes))))

    def redirect(self, names: Sequence[str], directions_PD: NDArray[np.float32]) -> int:
        """Replace only the directions of these probes, one row for each; the bank's new version.

        Hundreds at once take milliseconds.
        """
        if directions_PD.dtype != np.float32 or directions_PD.shape[:1] != (len(names),):
            raise ProbeError(
                f"directions are {directions_PD.dtype}{directions_PD.shape}; give a row of float32 "
                f"for each of {len(names)} probes"
            )
        rows_PD = np.ascontiguousarray(directions_PD, "<f4")
        data_N = rows_PD.reshape(-1).view(np.uint8)
        shared = _shared_buffer(self._llm)
        if shared.can_hold(data_N.nbytes):
            # An engine that cannot read shared memory gets the rows in the message, from then on.
            with suppress(UnsupportedError, WeightsError), shared.lock() as buffer:
                np.copyto(buffer.view(data_N.nbytes), data_N)
                reference = buffer.reference(data_N.nbytes)
                return self._ask_version(
                    control_messages.RedirectProbesShared(tuple(names), reference)
                )
        return self._ask_version(control_messages.RedirectProbes(tuple(names), data_N.data))

    def _ask_version(self, control: control_messages.Control) -> int:
        return ask_engine(self._llm, control, control_messages.BankVersion).version

    def remove(self, *names: str) -> tuple[control_messages.ListedProbe, ...]:
        return self._change(control_messages.RemoveProbes(names))

    def _change(
        self, control: control_messages.Control
    ) -> tuple[control_messages.ListedProbe, ...]:
        return ask_engine(self._llm, control, control_messages.BankState).probes


def _shared_buffer(llm: Any) -> ReusableBuffer:
    """Kept on the LLM object, because a ProbeBank is made anew each time."""
    found: ReusableBuffer | None = vars(llm).get(_SHARED_BUFFER)
    return vars(llm).setdefault(_SHARED_BUFFER, ReusableBuffer()) if found is None else found
