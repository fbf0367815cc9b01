"""Sends control messages to the engine of a vLLM `LLM`.

Runs in: the user's process. Imports no vllm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from clairai import errors
from clairai.wire import control_messages, ring_messages, steering_messages
from clairai.wire.control_messages import CONTROL_METHOD

Reply = TypeVar("Reply", bound=msgspec.Struct)


def ask_engine(llm: Any, control: control_messages.Control, kind: type[Reply]) -> Reply:
    """Send one control message through vLLM and wait for the reply, which must be of this kind."""
    with _explain_missing_taps():
        replies = llm.collective_rpc(CONTROL_METHOD, args=(msgspec.msgpack.encode(control),))
    return read_reply(replies[0], kind)


async def ask_async_engine(
    engine: Any, control: control_messages.Control, kind: type[Reply]
) -> Reply:
    """As `ask_engine`, of vLLM's AsyncLLM."""
    _require_one_core(engine)
    with _explain_missing_taps():
        replies = await engine.collective_rpc(
            CONTROL_METHOD, args=(msgspec.msgpack.encode(control),)
        )
    return read_reply(replies[0], kind)


def _require_one_core(engine: Any) -> None:
    from clairai.compat.engine_cores import find_core_calls

    if (num_cores := len(find_core_calls(engine))) > 1:
        raise errors.UnsupportedError(
            f"this engine has {num_cores} engine cores (data_parallel_size), each with a ring of "
            f"its own, and Python reads one; serve it with `clairai serve`, whose proxy reads all"
        )


@contextlib.contextmanager
def _explain_missing_taps() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # which one depends on where vLLM keeps the worker
        if type(error).__name__ == "EngineDeadError":  # v1/engine/exceptions.py, 0.26 and 0.32
            raise errors.EngineGoneError("vLLM has ended the engine; start it again") from error
        if CONTROL_METHOD not in str(error):
            raise
        raise errors.UnsupportedError(
            "this engine has no taps; start it with additional_config=clairai.config(...)"
        ) from error


def require_running(
    changed: steering_messages.SteeringChanged, stream: int
) -> steering_messages.SteeringChanged:
    """RequestError if no engine core runs a request of the stream whose steering was to change."""
    if not changed.positions:
        raise errors.RequestError(
            f"no request of stream {stream} is running; give the stream of one that is"
        )
    return changed


def read_reply(data: bytes, kind: type[Reply]) -> Reply:
    """Decode a reply; raise the error that a refusal stands for."""
    reply = msgspec.msgpack.decode(data, type=control_messages.ControlReply)
    if isinstance(reply, ring_messages.Refusal):
        raise errors.make_error(reply.code, reply.reason)
    assert isinstance(reply, kind), f"asked for {kind.__name__}, got {type(reply).__name__}"
    return reply
