"""A batch run stores the rows of each prompt once, wherever it is stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clairai.batch import resume, run_job
from clairai.batch.capture_engine import BatchCapture, CapturingEngine
from clairai.batch.prompts import Prompt, read_prompts
from clairai.batch.resume import RunIdentity
from clairai.batch.run_job import parse_job
from clairai.errors import ConfigError, StoreBusyError, StoreStoppedError
from clairai.fields.positions import PositionSpan, parse_positions
from clairai.store.read import open as open_store
from clairai.store.write import Writer
from tests.support.row_blocks import block
from tests.unit.library.test_message_range import Letters

RUN = RunIdentity("tiny", ("post_block.3",), '"all"', '{"name":"raw"}', 1)


class ToyEngine:
    """Writes rows of prompts through a real writer; can be stopped within a batch."""

    nbytes_per_token = 1 << 20
    batch_nbytes = 256 << 20
    max_len = 300

    def __init__(self, folder: Path, *, dies_after: int | None = None) -> None:
        self._folder, self._left = folder, dies_after
        self.forwarded: list[int] = []

    def num_tokens(self, prompt: Prompt) -> int:
        return len(prompt.content.prompt or "x")

    def forward(self, prompts: Sequence[Prompt], tags: Sequence[dict[str, Any]]) -> None:
        writer = Writer(self._folder, commits="on_flush")
        try:
            for prompt, said in zip(prompts, tags, strict=True):
                self._forward(writer, prompt, said)
            writer.flush()
        finally:
            with suppress(StoreStoppedError):  # nothing of a stopped batch is committed
                writer.close()

    def _forward(self, writer: Writer, prompt: Prompt, tags: dict[str, Any]) -> None:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left = None if self._left is None else self._left - 1
        self.forwarded.append(prompt.number)
        stream = 1000 * (len(open_store(self._folder).commits) + 1) + prompt.number
        writer.begin(stream, tags=tags)
        writer.offer(block(stream, self.num_tokens(prompt)))
        writer.finish(stream)


def _file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def _run(engine: ToyEngine, folder: Path, file: Path) -> list[tuple[int, int]]:
    wanted = resume.find_unfinished(folder, read_prompts(file), RUN)
    planned = run_job.plan_batches(engine, wanted, 1)
    return list(run_job.run_batches(engine, planned, RUN))[1:]


def _lines(folder: Path) -> list[int]:
    return sorted(request.tags["prompt"]["line"] for request in open_store(folder).requests())


@pytest.mark.parametrize("dies_after", range(1, 12))
def test_a_stopped_run_continues_without_losing_or_repeating_a_prompt(
    dies_after: int, tmp_path: Path
) -> None:
    file = _file(tmp_path / "p.txt", *("x" * (60 + line) for line in range(12)))
    first = ToyEngine(tmp_path / "s", dies_after=dies_after)
    with pytest.raises(KeyboardInterrupt):
        _run(first, tmp_path / "s", file)
    kept = _lines(tmp_path / "s")
    second = ToyEngine(tmp_path / "s")
    _run(second, tmp_path / "s", file)
    assert _lines(tmp_path / "s") == list(range(1, 13))
    assert set(second.forwarded) == set(range(1, 13)) - set(kept)
    assert _run(ToyEngine(tmp_path / "s"), tmp_path / "s", file) == []


def test_prompts_are_identified_by_content_and_not_by_line(tmp_path: Path) -> None:
    _run(ToyEngine(tmp_path / "s"), tmp_path / "s", _file(tmp_path / "p.txt", "a", "b", "a"))
    more = _file(tmp_path / "p.txt", "new", "a", "b", "a", "a")
    engine = ToyEngine(tmp_path / "s")
    _run(engine, tmp_path / "s", more)
    assert engine.forwarded == [1, 5]


def test_a_run_waits_for_what_a_killed_run_is_still_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file(tmp_path / "p.txt", "a", "b")
    (prompt, other) = read_prompts(file)
    writer = Writer(tmp_path / "s")

    def commit_and_end(_: float) -> None:
        writer.begin(7, tags=RUN.tags(prompt))
        writer.offer(block(7, 1))
        writer.close()

    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=float, sleep=commit_and_end))
    assert resume.find_unfinished(tmp_path / "s", [prompt, other], RUN) == [other]
    moments = iter((0.0, resume.BUSY_TIMEOUT_S + 1))
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    with Writer(tmp_path / "s"), pytest.raises(StoreBusyError):
        resume.find_unfinished(tmp_path / "s", [prompt, other], RUN)


def test_progress_is_reported_after_each_commit(tmp_path: Path) -> None:
    file = _file(tmp_path / "p.txt", *["x" * 120] * 3)
    steps = _run(ToyEngine(tmp_path / "s"), tmp_path / "s", file)
    assert steps == [(2, 242), (3, 363)]
    assert [len(c.shards) for c in open_store(tmp_path / "s").commits] == [0, 1, 1]


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    file = _file(tmp_path / "p.txt", "a")
    _run(ToyEngine(tmp_path / "s"), tmp_path / "s", file)
    other = RunIdentity("tiny", ("post_block.3",), '"all"', '{"name":"rp8","k":512}', 1)
    with pytest.raises(ConfigError, match="rows that this run would not make"):
        resume.find_unfinished(tmp_path / "s", read_prompts(file), other)
    with Writer(tmp_path / "t") as writer:
        writer.offer(block(1))
    with pytest.raises(ConfigError, match="give another folder"):
        resume.find_unfinished(tmp_path / "t", read_prompts(file), RUN)


@pytest.mark.parametrize(
    ("text", "said"), [("x" * 300, "line 2 has 300 tokens"), ("x" * 270, "gives 271 MiB of rows")]
)
def test_a_prompt_that_is_too_long_is_refused_before_anything_is_forwarded(
    text: str, said: str, tmp_path: Path
) -> None:
    file = _file(tmp_path / "p.txt", "a", text)
    with pytest.raises(ConfigError, match=said):
        run_job.plan_batches(ToyEngine(tmp_path / "s"), read_prompts(file), 1)


def test_a_line_of_json_is_a_prompt_a_chat_or_tokens(tmp_path: Path) -> None:
    chat = '{"messages": [{"role": "user", "content": "hi"}], "tags": {"label": 1}}'
    file = _file(tmp_path / "p.jsonl", '{"prompt": "a"}', "", chat, '{"prompt_token_ids": [1, 2]}')
    found = read_prompts(file)
    assert [prompt.number for prompt in found] == [1, 3, 4]
    assert (found[1].tags, found[2].content.prompt_token_ids) == ({"label": 1}, (1, 2))
    assert len({prompt.digest for prompt in found}) == 3
    assert RUN.tags(found[1])["label"] == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1 of"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "give one of"),
        ('{"prompt": ""}', "not an empty one"),
        ("{}", "give one of"),
        ('{"prompt": "a", "tags": {"run": 1}}', "the tag run is set by the run"),
        ('{"prompt": "a", "bananas": 1}', "bananas"),
        ('{"prompt_token_ids": [-1]}', "line 1 of"),
    ],
)
def test_the_error_names_a_line_that_is_no_prompt(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_prompts(_file(tmp_path / "p.jsonl", line))


def test_a_file_without_prompts_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(_file(tmp_path / "p.txt", "", " "))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="line 1 of"):
        read_prompts(tmp_path / "b.txt")


JOB: dict[str, Any] = {
    "prompts": Path("p.txt"),
    "folder": Path("s"),
    "points": ["post_block.1"],
    "positions": "all",
    "encoder": "raw",
    "max_tokens": 1,
    "batch_mib": 1,
    "engine": "{}",
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"batch_mib": 0}, "--batch-mib is 0"),
        ({"engine": "[]"}, "give a JSON object"),
        ({"engine": "{"}, "no JSON"),
        ({"points": []}, "no points are named"),
        ({"encoder": "zip"}, "no encoder is named"),
        ({"encoder": '{"name": "rp8", "k": 0}'}, "--encoder"),
        ({"positions": "some"}, "--positions must be one of all, prompt"),
    ],
)
def test_the_error_names_a_wrong_option(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_job("model", **{**JOB, **wrong})


def test_options_may_be_names_or_json() -> None:
    made = parse_job(
        "m", **{**JOB, "encoder": '{"name": "rp8", "k": 9}', "positions": '{"from": -2}'}
    )
    assert (made.encoder["k"], made.positions) == (9, (PositionSpan(-2),))


def _naming(positions: object) -> CapturingEngine:
    where = parse_positions(positions, what="positions")
    wish = BatchCapture((), where, {"name": "raw"}, 1, 1)
    return CapturingEngine(None, Letters("all"), wish, max_len=99, nbytes_per_token=1)


def test_the_positions_of_a_message_differ_from_chat_to_chat(tmp_path: Path) -> None:
    chats = [["ab", "c"], ["a", "bcd"]]
    lines = [[{"role": "user", "content": text} for text in chat] for chat in chats]
    file = _file(tmp_path / "p.jsonl", *(json.dumps({"messages": line}) for line in lines))
    engine = _naming(["last_prompt", {"message": 1}])
    assert engine.capture.settings(tmp_path)["positions"] == "all"
    placed = [engine._positions(prompt)["positions"] for prompt in read_prompts(file)]
    assert placed == [
        ["last_prompt", {"from": 4, "to": 7}],
        ["last_prompt", {"from": 3, "to": 8}],
    ]


def test_a_prompt_without_the_message_is_refused_before_anything_is_forwarded(
    tmp_path: Path,
) -> None:
    (text,) = read_prompts(_file(tmp_path / "p.txt", "a"))
    with pytest.raises(ConfigError, match="line 1: message 1: this is no chat"):
        _naming({"message": 1}).num_tokens(text)
    assert _naming("all")._positions(text) == {}
