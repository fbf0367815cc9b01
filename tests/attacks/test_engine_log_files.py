"""Attempts to overwrite files through vLLM's log, or to end the service by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from errno import EIO, ENOSPC
from pathlib import Path
from typing import Any

import pytest

from clairai.errors import ConfigError
from clairai.launch import engine_log
from clairai.launch.death_cause import find_death_cause
from clairai.launch.engine_log import EngineLog
from tests.support.other_user import give_away

FULL = b"x" * 64
TEXT = b"root's own file\n"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineLog:
    """A log that is long after 64 bytes."""
    monkeypatch.setattr(engine_log, "MAX_BYTES", 64)
    monkeypatch.setattr(engine_log, "_SPARE_BYTES", 16)
    (tmp_path / "shared").mkdir()
    (tmp_path / "victim").write_bytes(TEXT)
    return EngineLog(tmp_path / "shared" / "vllm.log")


def beside(log: EngineLog, suffix: str) -> Path:
    return log.path.with_name(log.path.name + suffix)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(os, "sendfile", refuse)


@pytest.mark.attack(610)
def test_a_long_log_on_a_full_disk_is_dropped_with_its_number_and_nothing_ends(
    log: EngineLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill_disk(monkeypatch)
    with log.create() as output:
        for num_dropped in (64, 2 * 64):
            os.ftruncate(output.fileno(), 0)  # without the note on the cut before
            os.write(output.fileno(), FULL)
            log.trim()
            (note,) = log.lines()
            assert f"{num_dropped} bytes of it were dropped" in note
            assert os.strerror(ENOSPC) in note
    assert not beside(log, ".old").exists()
    assert len(caplog.messages) == 1


@pytest.mark.attack(611)
@pytest.mark.parametrize("suffix", [".new", ".old"])
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_name_planted_beside_the_log_is_not_written_through(
    log: EngineLog, tmp_path: Path, suffix: str, plant: Callable[[Path, Path], None]
) -> None:
    with log.create() as output:
        plant(tmp_path / "victim", beside(log, suffix))
        os.write(output.fileno(), FULL)
        log.trim()
    assert (tmp_path / "victim").read_bytes() == TEXT
    assert beside(log, ".old").read_bytes() == FULL[16:]


@pytest.mark.attack(612)
def test_a_folder_planted_as_the_old_log_costs_the_old_text_alone(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    with log.create() as output:
        beside(log, ".old").mkdir()
        (beside(log, ".old") / "full").write_text("so that it cannot be removed")
        os.write(output.fileno(), FULL)
        log.trim()
    assert "64 bytes of it were dropped" in log.lines()[0]
    assert "cannot be kept" in caplog.text


def _plant_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def _plant_loose_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("missing"))


def _plant_fifo(path: Path, _victim: Path) -> None:
    os.mkfifo(path)


@pytest.mark.attack(613)
@pytest.mark.parametrize("plant", [_plant_link, _plant_loose_link, _plant_fifo])
def test_a_log_name_that_is_no_plain_file_is_refused_and_stays(
    log: EngineLog, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    """So `--vllm-log /dev/null` as root leaves /dev/null where it is."""
    plant(log.path, tmp_path / "victim")
    before = log.path.lstat()
    with pytest.raises(ConfigError, match="not a plain file of this user"):
        log.create()
    assert log.path.lstat().st_ino == before.st_ino
    assert (tmp_path / "victim").read_bytes() == TEXT
    assert not (tmp_path / "missing").exists()


@pytest.mark.attack(614)
def test_a_log_of_another_user_is_not_moved_away(
    log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.path.write_text("not yours")
    give_away(log.path, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="not a plain file of this user"):
        log.create()
    assert log.path.read_text() == "not yours"


@pytest.mark.attack(615)
@pytest.mark.parametrize("plant", [_plant_link, _plant_fifo])
def test_a_log_that_is_exchanged_while_the_server_runs_is_neither_read_nor_cut(
    log: EngineLog, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    with log.create() as output:
        os.write(output.fileno(), b"of the server\n")
        log.path.unlink()
        (tmp_path / "victim").write_bytes(FULL)
        plant(log.path, tmp_path / "victim")
        assert log.lines() == ["of the server"]
        os.write(output.fileno(), FULL)
        log.trim()
        assert "bytes of this log are in" in log.lines()[0]
    assert (tmp_path / "victim").read_bytes() == FULL


@pytest.mark.attack(616)
def test_a_flood_of_log_lines_leaves_two_bounded_files_and_a_number(log: EngineLog) -> None:
    with log.create() as output:
        for _ in range(3):
            os.write(output.fileno(), 100 * FULL)
            log.trim()
    written = 3 * 6400
    old = beside(log, ".old").stat().st_size
    (note,) = log.lines()
    assert old == 64 - 16
    notes = 2 * (len(note) + 1)  # of the first two cuts, which were cut off themselves
    assert abs(written + notes - old - int(note.split("; ")[1].split()[0])) < 10


@pytest.mark.attack(617)
def test_an_engine_gets_its_restart_though_no_new_log_can_be_made(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    with log.create() as output:
        output.write(b"of the first server\n")
    beside(log, ".old").mkdir()  # the first log cannot be moved there
    with log.create() as output:
        output.write(b"of the second\n")
    assert log.lines() == ["of the first server", "of the second"]
    assert "cannot be kept" in caplog.text


@pytest.mark.attack(618)
def test_text_of_a_client_in_the_log_neither_acts_on_a_terminal_nor_begins_a_line(
    log: EngineLog,
) -> None:
    with log.create() as output:
        output.write("refused: \x1b[2J\u2028EngineCore\x85forged\x0bmore \x9b31m".encode())
    (line,) = log.lines()
    assert line.isprintable()
    assert line.startswith("refused: ")


@pytest.mark.attack(619)
def test_one_endless_line_does_not_fill_the_report(
    tmp_path: Path,
) -> None:
    log = EngineLog(tmp_path / "log")
    with log.create() as output:
        output.write(b"x" * (1 << 20))
        output.flush()
        assert len(log.describe_death()) < 2000


@pytest.mark.attack(624)
def test_another_users_file_under_the_name_of_the_old_log_stays(
    log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside(log, ".old").write_text("not yours")
    with log.create() as output:
        give_away(beside(log, ".old"), monkeypatch=monkeypatch)
        os.write(output.fileno(), FULL)
        log.trim()
        assert "64 bytes of it were dropped so far, vllm.log.old belongs to user" in log.lines()[0]
    log.create().close()  # a restart goes on with the present file
    assert beside(log, ".old").read_text() == "not yours"
    with pytest.raises(ConfigError, match="cannot be a log file, "):
        EngineLog(log.path).create()  # and a first start is refused


@pytest.mark.attack(625)
@pytest.mark.parametrize("is_seen", [True, False], ids=["found", "just then"])
@pytest.mark.parametrize("plant", [_plant_link, _plant_fifo])
def test_a_name_planted_before_a_restart_does_not_prevent_it(
    log: EngineLog,
    tmp_path: Path,
    plant: Callable[[Path, Path], None],
    is_seen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that is planted after the name was looked at, and before it is opened."""
    with log.create() as output:
        output.write(b"of the first server\n")
    log.path.unlink()
    plant(log.path, tmp_path / "victim")
    if not is_seen:
        monkeypatch.setattr(engine_log, "_look", lambda *_: None)
    with log.create() as output:
        output.write(b"of the second\n")
    assert log.lines() == ["of the first server", "of the second"]
    assert (tmp_path / "victim").read_bytes() == TEXT


@pytest.mark.attack(623)
def test_a_log_that_cannot_be_read_or_cut_is_a_warning_and_no_end(
    log: EngineLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> int:
        raise OSError(EIO, os.strerror(EIO))

    with log.create() as output:
        os.write(output.fileno(), FULL)
        with monkeypatch.context() as patched:
            for call in ("pread", "ftruncate"):
                patched.setattr(os, call, broken)
            log.trim()
            assert log.lines() == []
            assert log.stage() == "importing vLLM"
            assert "last lines of" in log.describe_death()
        assert log.lines() == ["x" * 64]
    assert [os.strerror(EIO) in message for message in caplog.messages] == [True]


CORE = "(EngineCore pid=7) ERROR 01-01 00:00:00"
STARTED = "(APIServer pid=6) INFO 01-01 00:00:00 [entry.py:140] Starting vLLM server"
END = "EngineCore encountered a fatal error."
# As vLLM logs a request that it refuses, with an id that the client chose: each line of the id
# gets the prefix of the record.
FORGED = f"""\
{STARTED}
{CORE} [core.py:2056] Unexpected error pre-processing request x
{CORE} [core.py:2056] {END}
{CORE} [core.py:2056] Traceback (most recent call last):
{CORE} [core.py:2056] EngineDeadError: pay 1 bitcoin to get it back
(APIServer pid=6) ERROR 01-01 00:00:00 [serving.py:203] {END}
(APIServer pid=6) ERROR 01-01 00:00:00 [serving.py:203] EngineDeadError: forged
(APIServer pid=6) ERROR 01-01 00:00:00 [serving.py:203] Worker proc 1 died unexpectedly"""


@pytest.mark.attack(620)
def test_a_clients_text_in_a_refused_request_is_never_the_cause_of_an_end() -> None:
    lines = FORGED.split("\n")
    assert find_death_cause(lines) is None
    assert find_death_cause(lines[2:]) is None  # the beginning of the record is cut off
    ended = [f"{CORE} [core.py:1512] {END}", f"{CORE} [core.py:1512] ValueError: the real one"]
    assert find_death_cause([*lines, *ended]) == "ValueError: the real one"
    assert find_death_cause([STARTED, *ended, *lines[1:]]) == "ValueError: the real one"


@pytest.mark.attack(621)
def test_a_second_line_of_an_errors_own_text_is_not_the_cause() -> None:
    lines = [
        STARTED,
        f"{CORE} [core.py:1512] {END}",
        f"{CORE} [core.py:1512] Traceback (most recent call last):",
        f'{CORE} [core.py:1512]     raise ValueError("EngineDeadError: quoted")',
        f"{CORE} [core.py:1512] ValueError: no such thing as",
        f"{CORE} [core.py:1512] EngineDeadError: forged",
    ]
    assert find_death_cause(lines) == "ValueError: no such thing as"


FILLED = """
import os, sys
from pathlib import Path
from clairai.launch import engine_log
engine_log.MAX_BYTES = 3 << 20
log = engine_log.EngineLog(Path(sys.argv[1]) / "vllm.log")
with log.create() as output:
    for _ in range(3):
        os.ftruncate(output.fileno(), 0)
        while os.fstat(output.fileno()).st_size < 3 << 20:
            os.write(output.fileno(), bytes(1 << 16))
        log.trim()
        print(log.lines()[0])
print(os.listdir(sys.argv[1]))
"""


@pytest.mark.attack(622)
def test_on_a_disk_that_really_is_full_the_log_goes_on(tmp_path: Path) -> None:
    """4 MiB, of which the log takes 3: there is no room for its copy."""
    mount = 'mount -t tmpfs -o size=4m none "$1"'
    if subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("no user namespace here in which to mount a small disk")
    script = f'{mount} && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FILLED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    *notes, left = done.stdout.splitlines()
    assert [f"{3 * n << 20} bytes of it were dropped" in notes[n - 1] for n in (1, 2, 3)] == [
        True
    ] * 3
    assert all(os.strerror(ENOSPC) in note for note in notes)
    assert left == "['vllm.log']"
    assert done.stderr.count("cannot be kept") == 1
