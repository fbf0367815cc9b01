"""Takes one control message as bytes; gives the reply as bytes. Runs in the worker, between steps.

A refusal is a reply, never a raise: with several ranks, one that raises would leave the replies of
the others to the next call.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai import wire, wire_capture, wire_weights
from clairai.capture.resolve import CAPTURE_OFF
from clairai.errors import CaptureOffError, ClairaiError, ProbeError, WeightsOffError
from clairai.probe.columns import Columns
from clairai.probe.files import loads
from clairai.tap.capture import Capture
from clairai.tap.station import Station

_DECODER: Final = msgspec.msgpack.Decoder(wire.Control)
_ENCODER: Final = msgspec.msgpack.Encoder()
_WEIGHTS_OFF: Final = (
    "this engine takes no new weights; start it with "
    """--weight-transfer-config '{"backend": "clairai_ipc"}'"""
)


class Handover(Protocol):
    """Who takes new weights."""

    def answer(self, control: wire_weights.Control) -> wire_weights.Reply: ...


def answer(
    station: Station,
    message: bytes,
    capture: Capture | None = None,
    handover: Handover | None = None,
) -> bytes:
    """`capture` and `handover` are None in an engine that was not started for them."""
    try:
        control = _DECODER.decode(message)
        if isinstance(control, wire_capture.Control):
            reply: wire.ControlReply = _captured(capture, control)
        elif isinstance(control, wire_weights.FindVersions):
            reply = wire_weights.Versions(tuple(map(station.began_with, control.streams)))
        elif isinstance(control, wire_weights.Control):
            reply = _handed(handover, control)
        else:
            reply = _reply(station, control)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reply = wire.Refusal("request", f"control message not understood: {error}")
    except ClairaiError as error:
        reply = wire.Refusal(error.code, error.reason)
    return _ENCODER.encode(reply)


def _captured(capture: Capture | None, control: wire_capture.Control) -> wire_capture.Reply:
    if capture is None:
        raise CaptureOffError(CAPTURE_OFF)
    return capture.answer(control)


def _handed(handover: Handover | None, control: wire_weights.Control) -> wire_weights.Reply:
    if handover is None:
        raise WeightsOffError(_WEIGHTS_OFF)
    return handover.answer(control)


def _reply(station: Station, control: wire.Control) -> wire.ControlReply:
    match control:
        case wire.ListProbes():
            return _state(station.columns)
        case wire.Describe():
            return _describe(station)
        case wire.FindStreams(request_ids):
            return station.streams_of(request_ids)
        case wire.RedirectProbes(names, rows):
            turned = station.columns.redirect(names, _rows(names, rows))
            return wire.BankVersion(station.install(turned).version)
        case wire.TurnProbes(names, lent):
            turned = station.columns.redirect(names, _rows(names, station.borrower.borrowed(lent)))
            return wire.BankVersion(station.install(turned).version)
        case wire.AddProbes() | wire.ReplaceProbes() | wire.RemoveProbes():
            return _state(station.install(_changed(station.columns, control)))
        case _:
            return wire.Refusal("unsupported", "the engine core answers this, not a worker")


def _rows(names: tuple[str, ...], data: memoryview) -> NDArray[np.float32]:
    if not names or len(data) % (4 * len(names)):
        raise ProbeError(
            f"{len(data)} bytes for {len(names)} probes; name one or more, and give a row of "
            f"float32 for each"
        )
    return np.frombuffer(data, "<f4").reshape(len(names), -1)


def _changed(
    columns: Columns, control: wire.AddProbes | wire.ReplaceProbes | wire.RemoveProbes
) -> Columns:
    """The bank after the change; raises before anything has changed."""
    if isinstance(control, wire.RemoveProbes):
        return columns.remove(control.names)
    probes = [loads(data, source="control message") for data in control.files]
    if isinstance(control, wire.AddProbes):
        return columns.add(probes)
    return columns.replace(*probes)


def _state(columns: Columns) -> wire.BankState:
    listed = tuple(probe.listed() for probe in columns.probes)
    return wire.BankState(columns.version, columns.capacity, listed)


def _describe(station: Station) -> wire.Description:
    station.flush()
    return wire.Description(
        socket=str(station.server.path),
        epoch=station.epoch,
        model=station.about.model,
        width=station.columns.width,
        points=station.about.points,
        capacity=station.columns.capacity,
        published=station.published,
    )
