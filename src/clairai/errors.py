"""Every error that clairai raises: one class for each thing that a caller can do about it.

ClairaiError
├── ConfigError          a setting is wrong; the message names it, its bound and the way out
│   ├── PointError       a tap point that does not exist, or is not tapped in this engine
│   ├── SteeringOffError this engine was not started to steer
│   ├── CaptureOffError  this engine was not started to capture
│   └── WeightsOffError  this engine was not started to take new weights
├── ProbeError           a probe or a probe file is wrong; the running bank is untouched
│   └── CapacityError    the bank is full
├── VectorError          a steering vector or its file is wrong; the bank is untouched
│   └── VectorCapacityError  the steering of unfinished requests fills the engine's tables
├── WeightsError         new weights do not fit the engine; it keeps serving the old ones
│   ├── WeightsBusyError unfinished requests still use the present weights
│   ├── WeightsRoomError there is no memory for new weights beside the old ones
│   └── WeightsTornError loading stopped half-way; the engine is paused until it is repaired
├── RequestError         one request's clairai fields are wrong; other requests are untouched
├── RequestFailedError   the engine could not go on with one request; others are untouched
├── UnsupportedError     this vLLM, architecture or mode is not served; the message says why
├── TapMissingError      a configured tap did not run during warm-up; the engine must not serve
├── RanksDisagreeError   the ranks of an engine do not have the same residual stream; it ends
├── CoresDifferError     a change reached some engine cores of an engine, and not all
├── RingError            the ring or its socket cannot be used
│   ├── HandshakeError   the peer is not clairai, or sent something that is not accepted
│   └── EngineGoneError  the engine has ended or restarted; attach again
├── StoreError           a capture folder, or what shall be written into it, cannot be used
│   ├── StoreBusyError   another writer has the folder
│   ├── StoreDamagedError  bytes on disk are not the bytes that were committed
│   ├── StoreStoppedError  accepted rows could not be committed; the message says why
│   └── CaptureDownError  nothing is captured now: the capture writer is being replaced
├── EncodingError        rows, or encoded rows, do not fit the encoder; nothing was changed
├── NoScoresError        no scores are kept under this id, or no longer
├── RowsLostError        requested scores were overwritten before they were read
└── ModelError           the demo model cannot be built from its package

While streaming, loss is not an error: it is counted, and always reported.
"""

from __future__ import annotations

from typing import ClassVar, Final


def quote(value: object, limit: int = 60) -> str:
    """`repr`, cut to `limit`: an error never repeats the whole of something hostile."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"  # repr refuses the largest
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def printable(said: object, limit: int = 200) -> str:
    """What a decoder or a server says, cut and printable: it may repeat a part of the input."""
    text = str(said)[:limit]
    return text if text.isprintable() else ascii(text)[1 : limit + 1]


class ClairaiError(Exception):
    """The base class. `code` is stable, and names a page under docs/errors/."""

    code: ClassVar[str] = "error"

    def __str__(self) -> str:
        return f"{super().__str__()} (docs/errors/{self.code}.md)"

    @property
    def reason(self) -> str:
        """The message without the page."""
        return super().__str__()


class ConfigError(ClairaiError, ValueError):
    code = "config"


class PointError(ConfigError):
    code = "point"


class SteeringOffError(ConfigError):
    code = "steering-off"


class CaptureOffError(ConfigError):
    code = "capture-off"


class WeightsOffError(ConfigError):
    code = "weights-off"


class ProbeError(ClairaiError, ValueError):
    code = "probe"


class CapacityError(ProbeError):
    code = "capacity"


class VectorError(ClairaiError, ValueError):
    code = "vector"


class VectorCapacityError(VectorError):
    code = "vector-capacity"


class WeightsError(ClairaiError, ValueError):
    code = "weights"


class WeightsBusyError(WeightsError):
    code = "weights-busy"


class WeightsRoomError(WeightsError):
    code = "weights-room"


class WeightsTornError(WeightsError):
    code = "weights-torn"


class RequestError(ClairaiError, ValueError):
    code = "request"


class ForbiddenError(ClairaiError):
    """An API key has not the right that a request needs."""

    code = "forbidden"


class RequestFailedError(ClairaiError):
    code = "request-failed"


class UnsupportedError(ClairaiError):
    code = "unsupported"


class TapMissingError(ClairaiError):
    code = "tap-missing"


class RanksDisagreeError(ClairaiError, RuntimeError):
    code = "ranks-disagree"


class CoresDifferError(ClairaiError):
    code = "cores-differ"


class RingError(ClairaiError):
    code = "ring"


class HandshakeError(RingError):
    code = "handshake"


class EngineGoneError(RingError):
    code = "engine-gone"


class StoreError(ClairaiError, ValueError):
    code = "store"


class StoreBusyError(StoreError):
    code = "store-busy"


class StoreDamagedError(StoreError):
    code = "store-damaged"


class StoreStoppedError(StoreError):
    code = "store-stopped"


class CaptureDownError(StoreError):
    code = "capture-down"


class NoScoresError(ClairaiError):
    code = "no-scores"


class RowsLostError(ClairaiError):
    code = "rows-lost"


class EncodingError(ClairaiError, ValueError):
    code = "encoding"


class ModelError(ClairaiError):
    code = "model"


def missing_extra(library: str, extra: str) -> ConfigError:
    return ConfigError(f"this needs {library}; run `pip install 'clairai[{extra}]'`")


def describe_os_error(error: OSError | ValueError) -> str:
    """Why a path could not be used, in the operating system's words where it has any."""
    return (error.strerror if isinstance(error, OSError) else None) or "the path is not usable"


_BY_CODE: Final = {
    kind.code: kind
    for kind in tuple(vars().values())
    if isinstance(kind, type) and issubclass(kind, ClairaiError)
}


def make_error(
    code: str, reason: str, otherwise: type[ClairaiError] = ClairaiError
) -> ClairaiError:
    """The error that another process has reported; `otherwise` if none of ours has this code."""
    return _BY_CODE.get(code, otherwise)(reason)
