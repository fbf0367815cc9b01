"""Takes vLLM's `LLM` and its outputs; gives scores per request, aligned to token ids.

Runs in the user's process and reads the same ring as every other reader; imports no vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai import errors
from clairai.local.shared_buffer import ReusableBuffer
from clairai.match.align import Scores, align
from clairai.match.row_collector import RowCollector
from clairai.probe.files import dumps
from clairai.probe.model import Probe
from clairai.ring.attach import RingReader
from clairai.settings import Settings, is_disabled
from clairai.wire import ring_messages

Reply = TypeVar("Reply", bound=msgspec.Struct)

CONTROL_METHOD: Final = "clairai_control"  # of a vLLM worker with taps: compat/install.py
_SHARED_BUFFER: Final = "clairai_shared_buffer"
_ERRORS: Final = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ClairaiError)
}


def config(
    *,
    points: Sequence[str] | str = (),
    probes: Sequence[str | Path] | str | Path = (),
    vectors: Sequence[str | Path] | str | Path = (),
    steering: bool = False,
    steer_rows: int = 1024,
    steer_programs: int = 1024,
    capture: Mapping[str, Any] | None = None,
    capacity: int = 16,
    ring_mib: int = 64,
    ring_home: Literal["host", "device"] = "host",
    fused: bool = True,
    branch: bool = True,
    runtime_dir: str | None = None,
    allow_untested_vllm: bool = False,
) -> dict[str, Any]:
    """`additional_config` for vLLM's LLM: what to tap, which probes to load, how to steer.

    `points` may be left out when `probes` and `vectors` say where they belong. Paths are made
    absolute, because the engine may run elsewhere. `vectors`, or `steering` alone, make rows
    steerable at the points. `capture` keeps rows in a folder: docs/capture.md.
    """
    settings = Settings(
        points=points,  # type: ignore[arg-type]  # Settings takes one text as well
        probes=_absolute(probes),
        vectors=_absolute(vectors),
        steering=steering,
        steer_rows=steer_rows,
        steer_programs=steer_programs,
        capture=None if capture is None else _with_absolute_folders(capture),
        capacity=capacity,
        ring_mib=ring_mib,
        ring_home=ring_home,
        fused=fused,
        branch=branch,
        runtime_dir=runtime_dir,
        allow_untested_vllm=allow_untested_vllm,
    )
    _install_late()
    return {"clairai": settings.as_dict()}


def _absolute(given: Sequence[str | Path] | str | Path) -> tuple[str, ...]:
    sources = [given] if isinstance(given, str | Path) else given
    return tuple(str(Path(source).absolute()) for source in sources)


def _with_absolute_folders(capture: Mapping[str, Any]) -> dict[str, Any]:
    """A path where a folder is named; what is no path is refused when the settings are read."""
    found = dict(capture)
    if isinstance(found.get("folder"), str | Path):
        found["folder"] = str(Path(found["folder"]).absolute())
    consumers = found.get("consumers")
    if isinstance(consumers, Mapping):
        found["consumers"] = {
            name: _with_absolute_folders(options) if isinstance(options, Mapping) else options
            for name, options in consumers.items()
        }
    return found


def _install_late() -> None:
    """vLLM loads plugins once a process: if an engine without taps came first, ask again."""
    plugins = sys.modules.get("vllm.plugins")
    if plugins is None or not getattr(plugins, "plugins_loaded", False):
        return
    if not is_disabled():
        from clairai.compat.install import install_hooks

        install_hooks()


def scores(llm: Any, outputs: Sequence[Any]) -> list[list[Scores]]:
    """For each RequestOutput, one Scores per answer (`n` of them), in order.

    Reads what the ring still holds: rows that were overwritten are a RowsLostError, never a gap
    that looks like an answer.
    """
    described = ask_engine(llm, ring_messages.Describe(), ring_messages.Description)
    asked = ring_messages.FindStreams(tuple(output.request_id for output in outputs))
    found = ask_engine(llm, asked, ring_messages.Streams)
    known = [
        (stream, output)
        for stream, output in zip(found.streams, outputs, strict=True)
        if stream is not None
    ]
    if len(known) < len(outputs):
        raise errors.RequestError(
            f"{len(outputs) - len(known)} of {len(outputs)} requests are not known to this engine; "
            f"pass the outputs of this LLM's own generate(), soon after it"
        )
    wanted = {stream for stream, _ in known}
    ledger = _collect_rows(Path(described.socket), wanted, found.since)
    return [
        [_align_answer(ledger, stream, output, answer) for answer in output.outputs]
        for stream, output in known
    ]


def _collect_rows(socket: Path, wanted: set[int], since: int) -> RowCollector:
    # Bounded by the ring itself: what it holds fits in memory.
    ledger = RowCollector(only=wanted, max_streams=len(wanted) + 1, max_rows=sys.maxsize)
    with RingReader.attach(socket, start=since) as reader:
        while records := reader.poll():
            for record in records:
                ledger.feed(record, reader.bank(record.bank_version))
    return ledger


def _align_answer(ledger: RowCollector, stream: int, output: Any, answer: Any) -> Scores:
    rows = ledger.rows(stream, answer.index)
    aligned = None if rows is None else align(rows, output.prompt_token_ids, answer.token_ids)
    if aligned is None or aligned.missing:
        lost = "all" if aligned is None else f"{aligned.missing} of {len(aligned.token_ids)}"
        raise errors.RowsLostError(
            f"{lost} rows of request {output.request_id!r} were overwritten before they were read; "
            f"raise ring_mib in clairai.config(), or call clairai.scores() after fewer requests"
        )
    return aligned


class ProbeBank:
    """The probes of a running engine: list, add, replace, remove, without a restart."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def list(self) -> tuple[ring_messages.ListedProbe, ...]:
        return self._change(ring_messages.ListProbes())

    def add(self, *probes: Probe) -> tuple[ring_messages.ListedProbe, ...]:
        return self._change(ring_messages.AddProbes(tuple(map(dumps, probes))))

    def replace(self, *probes: Probe) -> tuple[ring_messages.ListedProbe, ...]:
        return self._change(ring_messages.ReplaceProbes(tuple(map(dumps, probes))))

    def redirect(self, names: Sequence[str], directions_PD: NDArray[np.float32]) -> int:
        """Other directions for these probes, a row for each; all else of them stays.

        Hundreds at once take milliseconds. Gives the bank's version.
        """
        if directions_PD.dtype != np.float32 or directions_PD.shape[:1] != (len(names),):
            raise errors.ProbeError(
                f"directions are {directions_PD.dtype}{directions_PD.shape}; give a row of float32 "
                f"for each of {len(names)} probes"
            )
        rows_PD = np.ascontiguousarray(directions_PD, "<f4")
        data_N = rows_PD.reshape(-1).view(np.uint8)
        shared = _shared_buffer(self._llm)
        if shared.can_hold(data_N.nbytes):
            # An engine that cannot read shared memory gets the rows in the message, from then on.
            with suppress(errors.UnsupportedError, errors.WeightsError), shared.lock() as buffer:
                np.copyto(buffer.view(data_N.nbytes), data_N)
                reference = buffer.reference(data_N.nbytes)
                return self._ask_version(
                    ring_messages.RedirectProbesShared(tuple(names), reference)
                )
        return self._ask_version(ring_messages.RedirectProbes(tuple(names), data_N.data))

    def _ask_version(self, control: ring_messages.Control) -> int:
        return ask_engine(self._llm, control, ring_messages.BankVersion).version

    def remove(self, *names: str) -> tuple[ring_messages.ListedProbe, ...]:
        return self._change(ring_messages.RemoveProbes(names))

    def _change(self, control: ring_messages.Control) -> tuple[ring_messages.ListedProbe, ...]:
        return ask_engine(self._llm, control, ring_messages.BankState).probes


def _shared_buffer(llm: Any) -> ReusableBuffer:
    """Kept on the LLM object, because a ProbeBank is made anew each time."""
    found: ReusableBuffer | None = vars(llm).get(_SHARED_BUFFER)
    return vars(llm).setdefault(_SHARED_BUFFER, ReusableBuffer()) if found is None else found


def ask_engine(llm: Any, control: ring_messages.Control, kind: type[Reply]) -> Reply:
    try:
        replies = llm.collective_rpc(CONTROL_METHOD, args=(msgspec.msgpack.encode(control),))
    except Exception as error:  # which one depends on where vLLM keeps the worker
        if CONTROL_METHOD not in str(error):
            raise
        raise errors.UnsupportedError(
            "this engine has no taps; start it with additional_config=clairai.config(...)"
        ) from error
    return read_reply(replies[0], kind)


def read_reply(data: bytes, kind: type[Reply]) -> Reply:
    """The reply of the first rank; a refusal is raised as the error it stands for."""
    reply = msgspec.msgpack.decode(data, type=ring_messages.ControlReply)
    if isinstance(reply, ring_messages.Refusal):
        raise _ERRORS.get(reply.code, errors.ClairaiError)(reply.reason)
    assert isinstance(reply, kind), f"asked for {kind.__name__}, got {type(reply).__name__}"
    return reply
