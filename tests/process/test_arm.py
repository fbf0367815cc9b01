"""The C that orders words in shared memory is right on this machine, and compiles and runs for ARM.

An emulator on x86-64 keeps the order of x86-64: a race there shows that the code runs and counts
right, not that ARM keeps the order. For that there is the model (tests/model), which holds with the
instructions that are looked for here, and not without them.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from clairai.engine.publish import step_extension
from clairai.engine.publish.header_layout import c_definitions
from clairai.local import shared_words
from clairai.local.c_extension import COMPILER_FLAGS
from clairai.weights import checksum

RACE: Final = Path(__file__).with_name("ring_race.c")
NUM_RECORDS: Final = 200_000
# Compiler, disassembler, and what runs the result.
HERE: Final = ("cc", "objdump")
ON_ARM: Final = (
    HERE
    if platform.machine() == shared_words.ARM
    else ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump", "qemu-aarch64")
)


def need(tools: Sequence[str]) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: on Debian, apt-get install qemu-user "
                    "gcc-aarch64-linux-gnu libc6-dev-arm64-cross")  # fmt: skip


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def race(folder: Path, tools: Sequence[str], *flags: str) -> tuple[int, int, int]:
    """Records delivered, lost and torn by two threads."""
    need(tools)
    compiler, _, *emulator = tools
    built, words = folder / "race", f"-I{shared_words.SOURCE.parent}"
    linked = ["-static"] if emulator else []  # it finds no libraries of another machine
    run(compiler, "-O2", "-Wall", "-Werror", "-pthread", *linked, words, *flags, RACE, "-o", built)
    delivered, lost, torn = map(int, run(*emulator, built).split())
    return delivered, lost, torn


@pytest.mark.parametrize("tools", [HERE, ON_ARM], ids=["here", "arm"])
def test_no_record_is_torn_between_two_threads(tmp_path: Path, tools: Sequence[str]) -> None:
    delivered, lost, torn = race(tmp_path, tools)
    assert torn == 0
    assert delivered + lost == NUM_RECORDS
    assert delivered >= 1000


@pytest.mark.parametrize("tools", [HERE, ON_ARM], ids=["here", "arm"])
def test_the_race_catches_a_writer_that_moves_the_head_first(
    tmp_path: Path, tools: Sequence[str]
) -> None:
    assert race(tmp_path, tools, "-DHEAD_FIRST")[2] > 0


def instructions(folder: Path, source: Path, *flags: str) -> dict[str, list[str]]:
    """What each function of a C file is on ARM, compiled as c_extension.py compiles it."""
    need(ON_ARM)
    compiler, objdump, *_ = ON_ARM
    built = folder / "object.o"
    headers = (f"-I{sysconfig.get_paths()['include']}", f"-I{np.get_include()}")
    run(compiler, *COMPILER_FLAGS, "-Werror", *flags, *headers, "-c", source, "-o", built)
    functions: dict[str, list[str]] = {}
    for line in run(objdump, "-d", "--no-show-raw-insn", built).splitlines():
        if begins := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            found = functions.setdefault(begins[1], [])
        elif "\t" in line:
            found.append(" ".join(line.split("\t")[1:]).strip())
    return functions


def ordering(code: Sequence[str]) -> list[str]:
    """The instructions among them that order memory, with the kind of a barrier."""
    found = (re.match(r"(dmb \w+|lda\w+|stl\w+)", one) for one in code)
    return [one[1] for one in found if one]


def test_a_word_is_loaded_and_stored_on_arm_by_instructions_that_order(tmp_path: Path) -> None:
    functions = instructions(tmp_path, shared_words.SOURCE)
    assert ordering(functions["load"]) == ["dmb ishld", "ldar"]
    assert ordering(functions["store"]) == ["stlr", "dmb ish"]


def test_the_look_at_instructions_catches_a_plain_word(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(shared_words.SOURCE, plain)
    header = shared_words.SOURCE.with_suffix(".h").read_text()
    relaxed = re.sub(r"__ATOMIC_(ACQUIRE|RELEASE)", "__ATOMIC_RELAXED", header)
    (plain / "shared_words.h").write_text(relaxed)
    functions = instructions(tmp_path, plain / "shared_words.c")
    assert ordering(functions["load"]) == ordering(functions["store"]) == []


def test_a_step_header_is_given_and_taken_on_arm_in_order(tmp_path: Path) -> None:
    definitions = [f"-D{name}={value}" for name, value in c_definitions().items()]
    functions = instructions(tmp_path, step_extension.SOURCE, *definitions)
    found = [one for code in functions.values() for one in ordering(code)]
    assert found.count("ldar") >= 1
    assert found.count("stlr") >= 1


def test_checksums_compile_for_arm(tmp_path: Path) -> None:
    assert "PyInit_checksum" in instructions(
        tmp_path, Path(checksum.__file__).with_name("checksum.c")
    )
