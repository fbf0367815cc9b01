"""What a user of the machine gives: settings, keys, logs, prompts and labelled texts."""

from __future__ import annotations

import atexit
import io
import json
import os
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from clairai.batch.prompts import read_prompts
from clairai.launch.api_key import access_keys, api_key
from clairai.launch.engine_log import EngineLog
from clairai.settings import Settings
from clairai.train.documents import read_json_lines, read_pairs, read_texts
from tests.fuzz.spans import JSON_VALUES, json_spans
from tests.fuzz.target import Target

LOG = b"""\
(APIServer pid=5) INFO 11-01 10:00:00 [core.py:58] Initializing a V1 LLM engine (v0.32)
(EngineCore pid=6) INFO 11-01 10:00:01 [loader.py:3] Model loading took 0.5 GiB
(EngineCore pid=6) ERROR 11-01 10:00:02 [core.py:9] torch.OutOfMemoryError: no memory
Traceback (most recent call last):
RuntimeError: Engine core initialization failed.
"""


def targets() -> list[Target]:
    shared: dict[str, Any] = {"find_spans": json_spans, "values": JSON_VALUES}
    return [
        Target("settings", parse_settings, _settings(), share=3.0, **shared),
        Target("key_file", parse_key, _keys(), share=0.5, **shared),
        Target("engine_log", parse_log, [LOG], (), share=0.5),
        Target("prompts", parse_prompts, _prompts(), share=0.5, **shared),
        Target("documents", parse_documents, _documents(), share=0.5, **shared),
    ]


def _settings() -> list[bytes]:
    capture = {
        "folder": "x",
        "points": ["post_block.*"],
        "positions": ["prompt", {"from": -2}],
        "encoder": {"name": "int4", "group": 32},
        "sample": 0.5,
        "when": {"probe": "p", "above": 0.5},
        "staging_mib": 64,
        "tags": {"a": 1},
        "process": "own",
    }
    consumers = {"a": {"kind": "npz", "folder": "y"}, "fs": {"folder": "x"}}
    full = {
        "points": ["post_block.15", "pre_attn.0-3"],
        "probes": "probes",
        "vectors": ["v.gguf"],
        "steering": True,
        "steer_rows": 8,
        "capacity": 32,
        "ring_mib": 16,
        "ring_home": "device",
        "fused": False,
        "runtime_dir": "run",
        "capture": capture,
    }
    return [
        json.dumps(full).encode(),
        json.dumps({"capture": {"consumers": consumers, "to": ["a"]}}).encode(),
        b'{"points": "all"}',
    ]


def _keys() -> list[bytes]:
    listed = [
        {"name": "ci", "rights": ["read", "steer"], "key": "k" * 32},
        {"name": "ops", "rights": ["admin"], "sha256": "0" * 64},
    ]
    return [b"abc-DEF_123\n", b"k" * 64, json.dumps(listed).encode()]


def _prompts() -> list[bytes]:
    chat = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a", "tags": {"x": 1}}, {"messages": chat}, {"prompt_token_ids": [1, 2]}]
    return [b"\n".join(json.dumps(line).encode() for line in lines), b"one\n\ntwo\r\n"]


def _documents() -> list[bytes]:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    lines = [{"text": "a", "label": True}, {"messages": chat, "label": False}]
    pairs = [{"positive": "a", "negative": "b"}, {"positive": "a", "negative": "b", "prompt": "c"}]
    return [
        *(b"\n".join(json.dumps(line).encode() for line in part) for part in (lines, pairs)),
        b"one\ntwo\n%%\nthree\n",
    ]


def parse_settings(data: bytes) -> None:
    """What is accepted is written in one form, and that form reads as itself."""
    try:
        given = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # vLLM decodes the option, and refuses this
    settings = Settings.parse(given)
    assert Settings.parse(settings.as_dict()) == settings
    assert settings.is_steering in (True, False)


@cache
def _file(suffix: str) -> Path:
    """One file for all inputs, in memory where the system has such a folder."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    descriptor, name = tempfile.mkstemp(prefix="fuzz-", suffix=suffix, dir=folder)
    os.close(descriptor)
    atexit.register(_remove, Path(name))
    return Path(name)


def _write(data: bytes, suffix: str) -> Path:
    path = _file(suffix)
    with path.open("wb") as file:
        file.write(data)
    return path


def parse_key(data: bytes) -> None:
    """Accepted keys have a name each; a bare one is what the file says."""
    keys = access_keys(_write(data, ".key"))
    assert 1 <= len({key.name for key in keys}) == len(keys)
    if not data.lstrip().startswith(b"["):
        assert api_key(_file(".key")) == data.rstrip(b"\r\n").decode("ascii")


@cache
def _log() -> tuple[EngineLog, io.FileIO]:
    """A log as a server's parent has it, and what the server writes to."""
    path = _file(".log")
    log = EngineLog(path)
    file = log.create()
    atexit.register(_remove, path, path.with_name(f"{path.name}.old"))
    atexit.register(file.close)
    return log, io.FileIO(file.fileno(), "ab", closefd=False)


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def parse_log(data: bytes) -> None:
    """Whatever a server has printed, its stage is one of our words and its death is described."""
    log, file = _log()
    os.truncate(log.path, 0)
    file.write(data)
    assert log.stage().isascii()
    assert "\n" not in log.newest()
    assert all("\n" not in line for line in log.lines())
    assert log.describe_death()


def parse_prompts(data: bytes) -> None:
    """Each prompt has its line's number and content; equal files give equal prompts."""
    path = _write(data, ".jsonl" if data.startswith(b"{") else ".txt")
    found = read_prompts(path)
    assert found
    assert read_prompts(path) == found
    assert [one.number for one in found] == sorted({one.number for one in found})


def parse_documents(data: bytes) -> None:
    """Pairs, labelled lines or plain texts, by what the first line looks like."""
    path = _write(data, ".jsonl")
    if data.startswith(b'{"positive"'):
        positive, negative = read_pairs(path)
        assert len(positive) == len(negative) > 0
        return
    read = read_json_lines if data.startswith(b"{") else partial(read_texts, label=True)
    assert all(any(turn.text.strip() for turn in one.turns) for one in read(path))
