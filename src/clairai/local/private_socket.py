"""Takes what the user set; gives the private folder where engines and readers meet."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Final

import msgspec

from clairai.errors import HandshakeError, RingError
from clairai.wire.ring_messages import MAX_MESSAGE_BYTES, RingMessage

MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of unix(7), less its final NUL
NEW_SUFFIX: Final = ".new"
NEW_AGE_S: Final = 60.0
_PEER_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid: struct ucred of unix(7)


def runtime_dir(explicit: str | None = None) -> Path:
    """The folder to meet in, made if it is not there; RingError if others can reach into it."""
    folder = _runtime_path(explicit)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RingError(
            f"runtime folder {folder} cannot be made ({error.strerror}); "
            "set CLAIRAI_RUNTIME_DIR to a folder of yours"
        ) from error
    _require_private(folder)
    return folder


def socket_path(folder: Path, epoch: int, kind: str = "engine") -> Path:
    """Where the engine of this epoch listens: for readers, or for what `kind` says."""
    path = folder / f"{kind}-{epoch:016x}.sock"
    nbytes = len(os.fsencode(path)) + len(NEW_SUFFIX)
    if nbytes > MAX_SOCKET_PATH_BYTES:
        raise RingError(
            f"socket path {path} takes {nbytes} bytes, may take {MAX_SOCKET_PATH_BYTES}; "
            "set CLAIRAI_RUNTIME_DIR to a shorter path"
        )
    return path


def engine_sockets(folder: Path, kind: str = "engine") -> list[Path]:
    """Our engines' sockets, newest first, whether or not anybody still listens."""
    made = {path: _own_socket_time(path) for path in folder.glob(f"{kind}-*.sock")}
    ours = {path: made_s for path, made_s in made.items() if made_s is not None}
    return sorted(ours, key=ours.__getitem__, reverse=True)


def live_engine_sockets(folder: Path) -> list[Path]:
    """The sockets of the engines that are alive, newest first."""
    return [path for path in engine_sockets(folder) if not _is_dead(path)]


def remove_dead_sockets(folder: Path, kind: str = "engine") -> None:
    """Delete the sockets that dead engines left; never anything that is not ours."""
    for path in engine_sockets(folder, kind):
        if _is_dead(path):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"{kind}-*.sock{NEW_SUFFIX}"):
        made_s = _own_socket_time(path)
        is_old = made_s is not None and time.time() - made_s > NEW_AGE_S
        if is_old and _is_dead(path):
            path.unlink(missing_ok=True)


def listen(path: Path) -> socket.socket:
    """A socket that is already listening when it appears at `path`, for our user alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    starting = path.with_name(path.name + NEW_SUFFIX)
    try:
        listener.bind(os.fspath(starting))
        starting.chmod(0o600)
        listener.listen()
        listener.setblocking(False)
        # Until it listens it would look deserted, and another engine's start would remove it.
        starting.rename(path)
    except OSError as error:
        listener.close()
        starting.unlink(missing_ok=True)
        raise RingError(f"no socket at {path} ({error}); set CLAIRAI_RUNTIME_DIR") from error
    return listener


def peer_uid(sock: socket.socket) -> int:
    """Who is at the other end, as the kernel knows it."""
    return _peer_credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """Which process is at the other end, as the kernel knows it."""
    return _peer_credentials(sock)[0]


def _peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, gid = _PEER_CREDENTIALS.unpack(raw)
    return int(pid), int(uid), int(gid)


def _runtime_path(explicit: str | None) -> Path:
    if chosen := explicit or os.environ.get("CLAIRAI_RUNTIME_DIR"):
        return Path(chosen).expanduser().absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime).absolute() / "clairai"
    return Path.home() / ".local" / "state" / "clairai" / "run"


def _require_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RingError(f"runtime folder {folder} is a link or a file, must be a folder; remove it")
    if status.st_uid != os.geteuid():
        raise RingError(
            f"runtime folder {folder} belongs to user {status.st_uid}, must belong to "
            f"{os.geteuid()}; set CLAIRAI_RUNTIME_DIR to a folder of yours"
        )
    if mode := status.st_mode & 0o077:
        raise RingError(
            f"runtime folder {folder} lets others in (mode bits {mode:03o}), must be 0700; "
            f"chmod 700 it or set CLAIRAI_RUNTIME_DIR"
        )


def _own_socket_time(path: Path) -> float | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    is_ours = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
    return status.st_mtime if is_ours else None


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False  # its queue is full, or anything else: not known to be dead
    return False


# MERGED
# Takes messages; gives frames for a stream socket (length u32, msgpack), and messages back.


MAX_REQUEST_BYTES: Final = 4096  # all that a reader may say at once
RECEIVE_BYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct("<I")
_DECODER: Final[msgspec.msgpack.Decoder[RingMessage]] = msgspec.msgpack.Decoder(RingMessage)


def encode_frame(message: msgspec.Struct) -> bytes:
    """One frame; HandshakeError if the message is longer than a peer would take."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise HandshakeError(
            f"message has {len(body)} bytes, may have {MAX_MESSAGE_BYTES}; load fewer probes"
        )
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Received bytes that are not a whole message yet."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._raw = bytearray()

    def feed(self, raw: bytes) -> None:
        """Add what a socket gave."""
        self._raw += raw

    def take(self) -> RingMessage | None:
        """The next whole message, if it is there; HandshakeError if it is not one of ours."""
        if len(self._raw) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._raw)
        if nbytes > self._limit:
            raise HandshakeError(f"peer sends {nbytes} bytes, may send {self._limit}; not ours")
        end = _LENGTH.size + nbytes
        if len(self._raw) < end:
            return None
        body = bytes(self._raw[_LENGTH.size : end])
        del self._raw[:end]
        return _decode(body)


def _decode(body: bytes) -> RingMessage:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"peer sent no message of ours ({error}); update one end") from error
