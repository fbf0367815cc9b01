"""Private Unix sockets: the folder where a user's engines listen, and messages over a connection.

A message is a u32 length and msgpack; file descriptors may travel with it. A socket is open to the
processes of one user on one machine: the folder is 0700, the socket 0600, and both ends ask the
kernel who the other is.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from clairai.errors import ClairaiError, HandshakeError, RingError, printable
from clairai.wire.ring_messages import MAX_MESSAGE_BYTES

_MessageT = TypeVar("_MessageT")

MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of unix(7), less its final NUL
NEW_SUFFIX: Final = ".new"
NEW_AGE_S: Final = 60.0
SEND_TIMEOUT_S: Final = 10.0
_PEER_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid: struct ucred of unix(7)
_LENGTH: Final = struct.Struct("<I")


def runtime_dir(explicit: str | None = None) -> Path:
    """Return the folder of the sockets, creating it; RingError if other users can reach into it."""
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
    """The socket of the engine of this epoch: `engine` for readers, or another `kind`."""
    path = folder / f"{kind}-{epoch:016x}.sock"
    nbytes = len(os.fsencode(path)) + len(NEW_SUFFIX)
    if nbytes > MAX_SOCKET_PATH_BYTES:
        raise RingError(
            f"socket path {path} takes {nbytes} bytes, may take {MAX_SOCKET_PATH_BYTES}; "
            "set CLAIRAI_RUNTIME_DIR to a shorter path"
        )
    return path


def engine_sockets(folder: Path, kind: str = "engine") -> list[Path]:
    """List this user's sockets, newest first, whether or not an engine still listens."""
    made = {path: _own_socket_time(path) for path in folder.glob(f"{kind}-*.sock")}
    ours = {path: made_s for path, made_s in made.items() if made_s is not None}
    return sorted(ours, key=ours.__getitem__, reverse=True)


def live_engine_sockets(folder: Path) -> list[Path]:
    """List the sockets at which an engine listens, newest first."""
    return [path for path in engine_sockets(folder) if not _is_dead(path)]


def remove_dead_sockets(folder: Path, kind: str = "engine") -> None:
    """Delete the sockets that dead engines left, and nothing else."""
    for path in engine_sockets(folder, kind):
        if _is_dead(path):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"{kind}-*.sock{NEW_SUFFIX}"):
        made_s = _own_socket_time(path)
        is_old = made_s is not None and time.time() - made_s > NEW_AGE_S
        if is_old and _is_dead(path):
            path.unlink(missing_ok=True)


def listen(path: Path) -> socket.socket:
    """Return a socket that already listens when it appears at `path`, for this user only."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    starting = path.with_name(path.name + NEW_SUFFIX)
    try:
        listener.bind(os.fspath(starting))
        starting.chmod(0o600)
        listener.listen()
        listener.setblocking(False)
        # A socket that does not listen yet looks dead, and a starting engine would remove it.
        starting.rename(path)
    except OSError as error:
        listener.close()
        starting.unlink(missing_ok=True)
        raise RingError(f"no socket at {path} ({error}); set CLAIRAI_RUNTIME_DIR") from error
    return listener


def connect(path: Path, *, timeout_s: float, error: type[ClairaiError]) -> socket.socket:
    """Connect to an engine; OSError if none listens, `error` if it belongs to another user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        sock.connect(os.fspath(path))
        if (uid := peer_uid(sock)) != os.geteuid():
            raise error(f"{path} belongs to user {uid}, we are {os.geteuid()}; not ours")
    except BaseException:
        sock.close()
        raise
    return sock


def call_in_forked_child(method: Callable[[], None], lock: threading.Lock | None = None) -> None:
    """Call a bound method in every forked child, for as long as its object lives.

    A child that kept an inherited socket open would hide its parent's death from the other end.
    No fork happens while `lock` is held: its holder can make a socket known to `method` first.
    """
    reference = weakref.WeakMethod(method)
    lock = lock or threading.Lock()

    def call() -> None:
        lock.release()
        if (inherited := reference()) is not None:
            inherited()

    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=call)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end, according to the kernel."""
    return _peer_credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """The process at the other end, according to the kernel."""
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
            f"runtime folder {folder} is open to others (mode bits {mode:03o}), must be 0700; "
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
            return False  # its queue is full, or something else: not known to be dead
    return False


def encode_frame(message: msgspec.Struct) -> bytes:
    """Encode one message; HandshakeError if it is longer than a peer accepts."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise HandshakeError(
            f"message has {len(body)} bytes, may have {MAX_MESSAGE_BYTES}; load fewer probes"
        )
    return _LENGTH.pack(len(body)) + body


class MessageFormat(Generic[_MessageT]):
    """What one end accepts: the types of messages, their size, and the error for anything else."""

    def __init__(self, types: Any, *, max_bytes: int, error: type[ClairaiError]) -> None:
        """`types` is a union of msgspec structs."""
        self._decoder: msgspec.msgpack.Decoder[_MessageT] = msgspec.msgpack.Decoder(types)
        self._max_bytes = max_bytes
        self.error = error

    def body_nbytes(self, head: bytes | bytearray) -> int:
        (nbytes,) = _LENGTH.unpack_from(head)
        if nbytes > self._max_bytes:
            raise self.error(f"peer sends {nbytes} bytes, may send {self._max_bytes}; not ours")
        return int(nbytes)

    def decode(self, body: bytes) -> _MessageT:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(
                f"peer sent no message of ours ({printable(error)}); update one end"
            ) from error


class FrameBuffer(Generic[_MessageT]):
    """Bytes received by a server that never blocks, cut into messages."""

    def __init__(self, accepted: MessageFormat[_MessageT]) -> None:
        self._accepted = accepted
        self._raw = bytearray()

    def feed(self, raw: bytes) -> None:
        self._raw += raw

    def take(self) -> _MessageT | None:
        """Return the next message; None until all of it is here."""
        if len(self._raw) < _LENGTH.size:
            return None
        end = _LENGTH.size + self._accepted.body_nbytes(self._raw)
        if len(self._raw) < end:
            return None
        body = bytes(self._raw[_LENGTH.size : end])
        del self._raw[:end]
        return self._accepted.decode(body)


class Connection(Generic[_MessageT]):
    """One end of a connected socket. Every wait has a deadline; one thread receives, any may send.

    ConnectionResetError means that the peer has hung up between two messages,
    ConnectionAbortedError that it did so within one.
    """

    def __init__(
        self, sock: socket.socket, accepted: MessageFormat[_MessageT], *, max_fds: int
    ) -> None:
        """Takes over the socket; a message may come with up to `max_fds` descriptors."""
        sock.settimeout(SEND_TIMEOUT_S)
        self._sock = sock
        self._accepted = accepted
        self._max_fds = max_fds
        self._raw = bytearray()  # of the message that is being received
        self._fds: list[int] = []
        self._sending = threading.Lock()
        self._readable, self._hangup = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._hangup.register(sock, select.POLLRDHUP)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        frame = encode_frame(message)
        with self._sending:
            num_sent = socket.send_fds(self._sock, [frame], fds) if fds else 0
            if rest := frame[num_sent:]:  # sending nothing fails too, once the peer has refused
                self._sock.sendall(rest)

    def receive(self, timeout_s: float) -> tuple[_MessageT, list[int]]:
        """Return the next message and its descriptors, which belong to the caller.

        After a TimeoutError the next call goes on with the same message.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            self._fill(_LENGTH.size, deadline_s)
            self._fill(_LENGTH.size + self._accepted.body_nbytes(self._raw), deadline_s)
            message = self._accepted.decode(bytes(self._raw[_LENGTH.size :]))
        except TimeoutError:
            raise
        except BaseException:
            self._drop_fds()
            raise
        self._raw.clear()
        fds, self._fds = self._fds, []
        return message, fds

    def _fill(self, nbytes: int, deadline_s: float) -> None:
        """Receive until `nbytes` of the current message are here."""
        while len(self._raw) < nbytes:
            self._wait_readable(deadline_s)
            part, fds, flags, _ = socket.recv_fds(
                self._sock, nbytes - len(self._raw), self._max_fds, socket.MSG_CMSG_CLOEXEC
            )
            self._fds += fds
            if flags & socket.MSG_CTRUNC or len(self._fds) > self._max_fds:
                raise self._accepted.error(
                    f"more than {self._max_fds} descriptors came with a message; not ours"
                )
            if not part:
                if self._raw:
                    raise ConnectionAbortedError("peer hung up in the middle of a message")
                raise ConnectionResetError("peer has hung up")
            self._raw += part

    def _drop_fds(self) -> None:
        close_all(self._fds)
        self._fds = []

    def _wait_readable(self, deadline_s: float) -> None:
        # Not the socket's own timeout: that is also the limit of another thread's send.
        if not self._readable.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
            raise TimeoutError("peer did not answer in time")

    @property
    def is_same_process(self) -> bool:
        return self.peer_pid == os.getpid()

    @property
    def peer_pid(self) -> int:
        return peer_pid(self._sock)

    @property
    def is_open(self) -> bool:
        """True while the peer holds its end; never blocks."""
        return not self._hangup.poll(0)

    @property
    def is_closed(self) -> bool:
        """True once this end has been closed."""
        return self._sock.fileno() < 0

    def hang_up(self, timeout_s: float) -> None:
        """Send nothing more, and wait until the peer hangs up too; OSError if it does not."""
        self._sock.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + timeout_s
        is_ended = False
        while not is_ended:
            self._wait_readable(deadline_s)
            is_ended = not self._sock.recv(MAX_MESSAGE_BYTES)  # a reply nobody waits for any more

    def shut_down(self) -> None:
        """End both directions; a thread that waits for the peer wakes up."""
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._drop_fds()
        self._sock.close()


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
