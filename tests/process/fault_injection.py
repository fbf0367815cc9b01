"""Plants faults in a running process from outside: it is told nothing and changed in nothing.

Needs Linux and the rights of the process's owner; a full disk needs the right to mount, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PIDFD_GETFD: Final = 438  # of pidfd_getfd(2), the same on every architecture
_ATTACH, _DETACH, _GET_REGISTERS, _SET_REGISTERS = 16, 17, 12, 13  # of ptrace(2) on x86-64
_ALL_CHILDREN: Final = 0x40000000  # __WALL of wait(2)
_JUMP_TO_ITSELF: Final = b"\xeb\xfe"
_FILLER: Final = "filler"
_CHUNK: Final = bytes(1 << 16)

End = Callable[[], None]  # ends a fault


def kill(pid: int) -> End:
    os.kill(pid, signal.SIGKILL)
    return lambda: None


def stop(pid: int) -> End:
    """Suspend the process; the returned function lets it go on if it is still there."""
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return go_on


def spin(pid: int) -> End:
    """Have the main thread of the process loop for good, in machine code; other threads go on.

    The thread is sent to an instruction of the process's own code that jumps to itself, without a
    byte of it being changed. The returned function sends it back to where it was.
    """
    loop_at = _find_jump_to_itself(pid)
    with _traced(pid):
        before = _read_registers(pid)
        changed = _Registers.from_buffer_copy(before)
        changed.rip, changed.orig_rax = loop_at, -1  # a system call is not begun again
        _write_registers(pid, changed)

    def go_on() -> None:
        with contextlib.suppress(OSError), _traced(pid):
            _write_registers(pid, before)

    return go_on


class _Registers(ctypes.Structure):
    """user_regs_struct of x86-64 (sys/user.h)."""

    rip: int
    orig_rax: int
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx"),
            *("rdx", "rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base"),
            *("gs_base", "ds", "es", "fs", "gs"),
        )
    )


def _find_jump_to_itself(pid: int) -> int:
    """The address of such an instruction: two bytes, which some larger one is bound to contain."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, rights, *_, name = line.split()
            if rights != "r-xp" or not name.startswith("/"):
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            memory.seek(begin)
            at = memory.read(end - begin).find(_JUMP_TO_ITSELF)
            if at >= 0:
                return begin + at
    raise OSError(errno.ENOENT, "no instruction that jumps to itself")


@contextmanager
def _traced(pid: int) -> Iterator[None]:
    """The main thread stands still in this context: ptrace(2)."""
    _ptrace(_ATTACH, pid)
    os.waitpid(pid, _ALL_CHILDREN)
    try:
        yield
    finally:
        _ptrace(_DETACH, pid)


def _read_registers(pid: int) -> _Registers:
    made = _Registers()
    _ptrace(_GET_REGISTERS, pid, ctypes.byref(made))
    return made


def _write_registers(pid: int, registers: _Registers) -> None:
    _ptrace(_SET_REGISTERS, pid, ctypes.byref(registers))


def _ptrace(request: int, pid: int, data: object = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, pid, None, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def exhaust_fds(pid: int) -> End:
    """From now on the process can open no descriptor; those it has stay.

    The limit is its lowest unused number, so that every smaller one is taken.
    """
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_unused_fd(pid), hard))

    def give_back() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    return give_back


def lowest_unused_fd(pid: int) -> int:
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


def close_connections(pid: int, *, at: tuple[str, ...] = ()) -> End:
    """Shut down every connection of the process, as if its peers had gone.

    `at`: only those that came in at a Unix socket whose name begins so.
    """

    def is_wanted(sock: socket.socket) -> bool:
        return not _is_listening(sock) and _is_connected(sock) and _is_at(sock, at)

    _shut_down(pid, is_wanted)
    return lambda: None


def close_listeners(pid: int, *, at: tuple[str, ...]) -> End:
    """Shut down every Unix socket with such a name on which the process listens."""
    _shut_down(pid, lambda sock: _is_listening(sock) and _is_at(sock, at))
    return lambda: None


def _shut_down(pid: int, is_wanted: Callable[[socket.socket], bool]) -> None:
    for number in socket_fds(pid):
        with contextlib.suppress(OSError), _copy_socket(pid, number) as sock:
            if is_wanted(sock):
                sock.shutdown(socket.SHUT_RDWR)


def socket_fds(pid: int) -> list[int]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            if os.readlink(link).startswith("socket:"):
                found.append(int(link.name))
    return sorted(found)


def _copy_socket(pid: int, number: int) -> socket.socket:
    """A descriptor of our own for the same socket: pidfd_getfd(2)."""
    with _pidfd(pid) as pidfd:
        libc = ctypes.CDLL(None, use_errno=True)
        copied = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if copied < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    return socket.socket(fileno=copied)


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    opened = os.pidfd_open(pid)
    try:
        yield opened
    finally:
        os.close(opened)


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_connected(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.getpeername()
        return True
    return False


def _is_at(sock: socket.socket, names: tuple[str, ...]) -> bool:
    if not names:
        return True
    address = sock.getsockname()
    return isinstance(address, str) and Path(address).name.startswith(names)


class SmallDisk:
    """A file system of its own, in memory, that can be filled to the last byte."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Without the right to mount it is a plain folder, and cannot be filled."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        options = f"size={nbytes},mode=0700"
        mount = ["mount", "-t", "tmpfs", "-o", options, "clairai-faults", str(folder)]
        self.is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0

    def fill(self) -> End:
        """Until not one byte fits; the returned function makes room again."""
        if not self.is_mounted:
            raise PermissionError(f"{self.folder} is no disk of its own: we may not mount")
        filler = self.folder / _FILLER
        fd = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _write_until_full(fd)
        finally:
            os.close(fd)
        return lambda: filler.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            unmount = ["umount", "--lazy", str(self.folder)]
            subprocess.run(unmount, check=True, capture_output=True)


def _write_until_full(fd: int) -> None:
    nbytes = len(_CHUNK)
    while nbytes:
        try:
            os.write(fd, _CHUNK[:nbytes])
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            nbytes //= 2


def is_stopped(pid: int) -> bool:
    """True while the process is suspended."""
    return process_state(pid) == "T"


def process_state(pid: int) -> str:
    """The letter of proc_pid_stat(5); empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")
