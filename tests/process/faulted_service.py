"""`clairai serve` as a user runs it, with a sidecar beside it, for faults to be planted in.

Its runtime folder, its captures and its output lie on small disks of their own, and its shared
memory in a folder of its own, so that each can be filled and looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from clairai.launch.process_guard import is_capture_writer, is_tracker
from clairai.store.disk import LocalDisk
from clairai.store.recover import verify
from tests.process.fault_injection import SmallDisk
from tests.process.fault_matrix import Role

ROOT: Final = Path(__file__).resolve().parents[2]
READY_S: Final = 300.0  # for an engine to start on a busy machine
END_S: Final = 60.0  # for a command that was told to end
SAMPLE_S: Final = 0.1
HEALTH_TIMEOUT_S: Final = 3.0  # after so long GET /health counts as silent
_COMPLETION: Final = b"clairai.proxy.processes.completion_process"
_SIZES: Final = {"r": 16 << 20, "c": 256 << 20, "o": 16 << 20, "s": 64 << 20}
# Made in the temporary folder by vLLM for torch.distributed, and by torch as a cache: both stay
# whenever vLLM runs (utils/network_utils.py, 0.32:154).
_ENGINES_OWN: Final = ("vllm_dist_", "torchinductor_")
# A mount of its own in front of the machine's shared memory: what is left in it can be seen.
_OWN_SHM: Final = 'mount --bind "$0" /dev/shm && exec "$@"'


class TooLate(AssertionError):
    """Something that must happen did not happen in time."""


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """How long it took; TooLate with `what` if it did not happen."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > timeout_s:
            raise TooLate(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)
    return time.monotonic() - began_s


@dataclass(frozen=True)
class Disks:
    """Where a service writes, each a file system of its own."""

    folder: Path
    runtime: SmallDisk
    captures: SmallDisk
    output: SmallDisk
    sidecar: SmallDisk

    @property
    def shm(self) -> Path:
        return self.folder / "shm"

    @property
    def scratch(self) -> Path:
        return self.folder / "tmp"

    @property
    def store(self) -> Path:
        return self.captures.folder / "store"


@contextmanager
def small_disks() -> Iterator[Disks]:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))  # short enough for a socket
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        made = []
        for name, nbytes in _SIZES.items():
            made.append(SmallDisk(folder / name, nbytes))
            undo.callback(made[-1].close)
        disks = Disks(folder, *made)
        disks.shm.mkdir()
        disks.scratch.mkdir()
        yield disks


@dataclass(frozen=True)
class Sample:
    """One look at GET /health."""

    at_s: float
    status: str
    reason: str | None = None
    since: str | float | None = None  # of ISO 8601, or in seconds since 1970


class HealthLog:
    """Asks for the health again and again, over one connection, and keeps the answers."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=HEALTH_TIMEOUT_S, trust_env=False)
        self._samples: list[Sample] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def last(self) -> Sample:
        return self._samples[-1] if self._samples else Sample(0.0, "silent")

    def since(self, at_s: float) -> list[Sample]:
        """Those that were answered after this moment."""
        return [one for one in self._samples if one.at_s >= at_s]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self._samples.append(self._ask())

    def _ask(self) -> Sample:
        try:
            found = self._client.get("/health").json()
            about = (found["status"], found["reason"], found.get("since"))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            about = ("silent", repr(error), None)
        return Sample(time.monotonic(), *about)


@dataclass
class FaultedService:
    """One running command. `model` is the name in requests."""

    disks: Disks
    environ: Mapping[str, str]
    model: str
    process: subprocess.Popen[bytes]
    sidecar: subprocess.Popen[bytes]
    url: str
    health: HealthLog

    @classmethod
    def start(
        cls,
        disks: Disks,
        command: Callable[[int], list[str]],
        environ: Mapping[str, str],
        model: str,
    ) -> FaultedService:
        """Returns when it serves."""
        port = free_port()
        environ = {
            **environ,
            "CLAIRAI_RUNTIME_DIR": str(disks.runtime.folder),
            "TMPDIR": str(disks.scratch),
            "PYTHONPATH": os.pathsep.join(
                (environ.get("PYTHONPATH", ""), f"{ROOT}", f"{ROOT}/src")
            ),
        }
        log = disks.output.folder / "command.log"
        process = _spawn(_with_own_shm(disks, command(port)), environ, log)
        url = f"http://127.0.0.1:{port}"
        made = cls(
            disks, environ, model, process, _start_sidecar(disks, environ), url, HealthLog(url)
        )
        try:
            made.await_ready()
        except BaseException:
            made.kill()
            raise
        return made

    def await_ready(self) -> float:
        return wait_for(self._is_ready, READY_S, f"ready; it says {self.health.last()}")

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise TooLate(f"the command ended ({self.process.returncode}): {self.said()[-2000:]}")
        return self.health.last().status in ("ready", "degraded")

    def said(self) -> str:
        return (self.disks.output.folder / "command.log").read_text(errors="replace")

    def engine_log(self) -> str:
        logs = sorted(self.disks.runtime.folder.glob("vllm-*.log"))
        return "".join(path.read_text(errors="replace") for path in logs)

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def epoch(self) -> str:
        with self.client() as client:
            return str(client.get("/v1/clairai").json()["epoch"])

    def pid(self, role: Role) -> int:
        return self.pids()[role]

    def pids(self) -> dict[Role, int]:
        """Every role that has a process now."""
        found = {Role.PROXY: self.process.pid, Role.SIDECAR: self.sidecar.pid}
        children, completing = _children(), self.completion_pids()
        if completing:
            found[Role.COMPLETION] = completing[0]
        own = children.get(self.process.pid, [])
        _add(found, Role.GUARD, [pid for pid in own if pid not in completing])
        below_guard = children.get(found.get(Role.GUARD, -1), [])
        _add(found, Role.CAPTURE, [pid for pid in below_guard if is_capture_writer(pid)])
        _add(found, Role.API_SERVER, [pid for pid in below_guard if not is_capture_writer(pid)])
        _add(found, Role.CORE, children.get(found.get(Role.API_SERVER, -1), []))
        _add(found, Role.WORKER, children.get(found.get(Role.CORE, -1), []))
        if Role.CORE in found:  # one rank: the worker lives in the core's process
            found.setdefault(Role.WORKER, found[Role.CORE])
        return found

    def completion_pids(self) -> list[int]:
        own = _children().get(self.process.pid, [])
        return sorted(pid for pid in own if _COMPLETION in _command_line(pid))

    def processes(self) -> list[int]:
        """Everything that runs for this service, without the command and the sidecar."""
        mark = f"CLAIRAI_RUNTIME_DIR={self.disks.runtime.folder}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return sorted(set(found) - {self.process.pid, self.sidecar.pid})

    def restart_sidecar(self) -> None:
        self.sidecar.kill()
        self.sidecar.wait()
        self.sidecar = _start_sidecar(self.disks, self.environ)

    def sidecar_nbytes(self) -> int:
        return (self.disks.sidecar.folder / "rows").stat().st_size

    def sidecar_said(self) -> str:
        return (self.disks.folder / "sidecar.err").read_text(errors="replace")

    def trim_output(self) -> None:
        """Make room for more output; both files are opened for appending."""
        os.truncate(self.disks.output.folder / "command.log", 0)
        os.truncate(self.disks.sidecar.folder / "rows", 0)

    def end(self) -> list[str]:
        """Tell it to end; what is left behind, or wrong with what it has written."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return [f"the command had not ended {END_S:g} s after SIGTERM"]
        return self.leftovers()

    def leftovers(self, timeout_s: float = END_S) -> list[str]:
        """After the command's end."""
        self.health.close()
        self.sidecar.kill()
        self.sidecar.wait()
        with contextlib.suppress(TooLate):
            wait_for(lambda: not self.processes(), timeout_s, "all processes end")
        left = [f"process {_describe(pid)}" for pid in self.processes()]
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        names = [path.name for path in self.disks.runtime.folder.iterdir()]
        left += [f"runtime/{name}" for name in names if not name.startswith(("vllm-", "filler"))]
        left += [f"shm/{path.name}" for path in self.disks.shm.iterdir()]
        names = [path.name for path in self.disks.scratch.iterdir()]
        left += [f"tmp/{name}" for name in names if not name.startswith(_ENGINES_OWN)]
        return [f"left behind: {one}" for one in left] + self._store_faults()

    def _store_faults(self) -> list[str]:
        if not self.disks.store.is_dir():
            return []
        checked = verify(LocalDisk(self.disks.store))
        return [f"{one.name}: {one.fault}" for one in checked if one.fault]

    def kill(self) -> None:
        """Whatever its state: end everything, and look at nothing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(TooLate):
            wait_for(lambda: not self.processes(), 15.0, "")
        self.leftovers(timeout_s=1.0)
        for folder in (self.disks.runtime.folder, self.disks.shm, self.disks.scratch):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _with_own_shm(disks: Disks, command: list[str]) -> list[str]:
    if not disks.runtime.is_mounted:
        return command
    return ["unshare", "--mount", "sh", "-c", _OWN_SHM, str(disks.shm), *command]


def _spawn(command: list[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _start_sidecar(disks: Disks, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "clairai.cli", "sidecar", "--json", "--events"]
    command += ["--from", "newest", "--runtime-dir", str(disks.runtime.folder)]
    out, err = disks.sidecar.folder / "rows", disks.folder / "sidecar.err"
    with out.open("ab") as output, err.open("wb") as errors:
        return subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )


def _add(found: dict[Role, int], role: Role, candidates: list[int]) -> None:
    """Exactly one process, besides resource trackers."""
    real = [pid for pid in candidates if not is_tracker(pid)]
    if len(real) == 1:
        found[role] = real[0]


def _children() -> dict[int, list[int]]:
    """The living children of every process of the machine."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (
                (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
            if state not in "ZX":
                found.setdefault(int(parent), []).append(int(folder.name))
    return found


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _describe(pid: int) -> str:
    return f"{pid} {_command_line(pid).replace(bytes(1), b' ')[:120].decode(errors='replace')}"
