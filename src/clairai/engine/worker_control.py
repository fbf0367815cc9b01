"""Answers control messages in the worker: probes, captures, weights.

Runs in: the worker, between steps. A refusal is a reply and never an exception: with several ranks,
one that raises would leave the replies of the others to the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.engine.capture.capture_resolver import CAPTURE_OFF
from clairai.engine.capture.worker_capture import WorkerCapture
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.engine.score.held_bank import HeldBank
from clairai.errors import (
    CaptureOffError,
    ClairaiError,
    ProbeError,
    WeightsOffError,
    printable,
)
from clairai.probe.bank import EngineBank
from clairai.probe.files import loads
from clairai.wire import capture_messages, control_messages, ring_messages, weights_messages

_DECODER: Final = msgspec.msgpack.Decoder(control_messages.Control)
_ENCODER: Final = msgspec.msgpack.Encoder()
_WEIGHTS_OFF: Final = (
    "this engine takes no new weights; start it with "
    """--weight-transfer-config '{"backend": "clairai_ipc"}'"""
)


_BANK_CONTROL: Final = (
    control_messages.ListProbes,
    control_messages.AddProbes,
    control_messages.ReplaceProbes,
    control_messages.RemoveProbes,
    control_messages.RedirectProbes,
    control_messages.RedirectProbesShared,
)
BankHolder = StepPublisher | HeldBank
_NO_TAPS: Final = ring_messages.Refusal(
    "unsupported",
    "this worker has no taps: the engine was started without the clairai key, or disabled",
)


class WeightsReceiver(Protocol):
    """Takes new weights."""

    def answer(
        self, control: weights_messages.WeightsControl | weights_messages.RankControl
    ) -> weights_messages.WeightsReply: ...


def answer_control(
    step_publisher: StepPublisher | None,
    message: bytes,
    capture: WorkerCapture | None = None,
    weights: WeightsReceiver | None = None,
) -> bytes:
    """The encoded reply; `capture` and `weights` are None in an engine not started for them.

    Only the first rank has a `step_publisher`. The others take weights, and nothing else.
    """

    def answer(control: control_messages.Control) -> control_messages.ControlReply:
        if step_publisher is None and weights is None:
            return _NO_TAPS
        if isinstance(control, weights_messages.WeightsControl | weights_messages.RankControl):
            return _answer_weights(weights, control)
        if step_publisher is None:
            return _NO_TAPS
        if isinstance(control, capture_messages.CaptureControl):
            return _answer_capture(capture, control)
        if isinstance(control, weights_messages.FindVersions):
            found = map(step_publisher.first_weights_of, control.streams)
            return weights_messages.Versions(tuple(found))
        return _answer_probes(step_publisher, control)

    return _encode_reply(message, answer)


def follow_control(held: HeldBank, message: bytes, weights: WeightsReceiver | None = None) -> bytes:
    """The encoded reply of a rank without the ring: it follows changes of the bank, takes weights.

    Of a pipeline, where every rank scores.
    """

    def answer(control: control_messages.Control) -> control_messages.ControlReply:
        if isinstance(control, weights_messages.WeightsControl | weights_messages.RankControl):
            return _answer_weights(weights, control)
        if isinstance(control, _BANK_CONTROL):
            return _answer_bank(held, control)
        return ring_messages.Refusal("unsupported", "the rank with the ring answers this")

    return _encode_reply(message, answer)


def _encode_reply(
    message: bytes, answer: Callable[[control_messages.Control], control_messages.ControlReply]
) -> bytes:
    """What `answer` says to the message, or why it does not."""
    try:
        reply = answer(_DECODER.decode(message))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reply = ring_messages.Refusal(
            "request", f"control message not understood: {printable(error)}"
        )
    except ClairaiError as error:
        reply = ring_messages.Refusal(error.code, error.reason)
    return _ENCODER.encode(reply)


def _answer_capture(
    capture: WorkerCapture | None, control: capture_messages.CaptureControl
) -> capture_messages.CaptureReply:
    if capture is None:
        raise CaptureOffError(CAPTURE_OFF)
    return capture.answer(control)


def _answer_weights(
    weights: WeightsReceiver | None,
    control: weights_messages.WeightsControl | weights_messages.RankControl,
) -> weights_messages.WeightsReply:
    if weights is None:
        raise WeightsOffError(_WEIGHTS_OFF)
    return weights.answer(control)


def _answer_probes(
    step_publisher: StepPublisher, control: control_messages.Control
) -> control_messages.ControlReply:
    match control:
        case control_messages.Describe():
            return _describe(step_publisher)
        case control_messages.FindStreams(request_ids):
            return step_publisher.find_streams(request_ids)
        case _ if isinstance(control, _BANK_CONTROL):
            return _answer_bank(step_publisher, control)
        case _:
            return ring_messages.Refusal(
                "unsupported", "the engine core answers this, not a worker"
            )


def _answer_bank(
    holder: BankHolder, control: control_messages.Control
) -> control_messages.BankState | control_messages.BankVersion:
    match control:
        case control_messages.RedirectProbes(names, rows):
            return _redirect(holder, names, rows)
        case control_messages.RedirectProbesShared(names, shared):
            return _redirect(holder, names, holder.copier.copy_shared(shared))
        case (
            control_messages.AddProbes()
            | control_messages.ReplaceProbes()
            | control_messages.RemoveProbes()
        ):
            return _bank_state(holder.install(_apply_change(holder.bank, control)))
        case _:
            return _bank_state(holder.bank)


def _redirect(
    holder: BankHolder, names: tuple[str, ...], data: memoryview
) -> control_messages.BankVersion:
    redirected = holder.bank.redirect(names, _read_rows(names, data))
    return control_messages.BankVersion(holder.install(redirected).version)


def _read_rows(names: tuple[str, ...], data: memoryview) -> NDArray[np.float32]:
    if not names or len(data) % (4 * len(names)):
        raise ProbeError(
            f"{len(data)} bytes for {len(names)} probes; name one or more, and give a row of "
            f"float32 for each"
        )
    return np.frombuffer(data, "<f4").reshape(len(names), -1)


def _apply_change(
    bank: EngineBank,
    control: control_messages.AddProbes
    | control_messages.ReplaceProbes
    | control_messages.RemoveProbes,
) -> EngineBank:
    """The bank after the change; raises before anything has changed."""
    if isinstance(control, control_messages.RemoveProbes):
        return bank.remove(control.names)
    probes = [loads(data, source="control message") for data in control.files]
    if isinstance(control, control_messages.AddProbes):
        return bank.add(probes)
    return bank.replace(*probes)


def _bank_state(bank: EngineBank) -> control_messages.BankState:
    listed = tuple(probe.listed() for probe in bank.probes)
    return control_messages.BankState(bank.version, bank.capacity, listed)


def _describe(step_publisher: StepPublisher) -> control_messages.Description:
    step_publisher.flush()
    return control_messages.Description(
        socket=str(step_publisher.server.path),
        epoch=step_publisher.epoch,
        model=step_publisher.info.model,
        width=step_publisher.bank.width,
        points=step_publisher.info.points,
        capacity=step_publisher.bank.capacity,
        published=step_publisher.published,
        steps_lost=step_publisher.num_steps_lost,
        keeps_scores=step_publisher.keeps_scores(),
    )
