"""Labelled texts: each file gives its documents or an error that names the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clairai.errors import ConfigError
from clairai.train.documents import Document, TextSpan, Turn, read_json_lines, read_texts


def _write(folder: Path, *lines: object) -> Path:
    file = folder / "set.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("\n".join(texts))
    return file


def test_a_file_of_lines_is_one_document_a_line(tmp_path: Path) -> None:
    file = tmp_path / "yes.txt"
    file.write_text("One line.\n\n  \nAnother: é.\n")
    assert read_texts(file, label=True) == [
        Document((Turn(None, (TextSpan("One line.", True),)),)),
        Document((Turn(None, (TextSpan("Another: é.", True),)),)),
    ]


def test_documents_of_several_lines_are_separated_by_percent_signs(tmp_path: Path) -> None:
    file = tmp_path / "no.txt"
    file.write_text("def f():\n    return 1\n%%\n\n%%\nx = 2\n")
    texts = [document.turns[0].text for document in read_texts(file, label=False)]
    assert texts == ["def f():\n    return 1", "x = 2"]


def test_a_json_line_is_a_text_or_a_chat_whose_last_message_is_labelled(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": " Hello. "}]
    file = _write(tmp_path, {"text": "a", "label": True}, "", {"messages": said, "label": False})
    assert read_json_lines(file) == [
        Document((Turn(None, (TextSpan("a", True),)),)),
        Document(
            (
                Turn("user", (TextSpan("Hi.", None),)),
                Turn("assistant", (TextSpan("Hello.", False),)),
            )
        ),
    ]


SPOILED: list[object] = [
    "not JSON",
    {"text": "a"},
    {"text": "a", "label": 1},
    {"text": "a", "label": None},
    {"text": 3, "label": True},
    {"label": True},
    {"text": " ", "label": True},
    {"text": "a", "label": True, "lable": True},
    {"messages": [], "label": True},
    {"messages": [{"role": "user", "content": " "}], "label": True},
    {"messages": [{"role": "user"}], "label": True},
    {"messages": [{"role": "user", "content": "a"}], "text": "a", "label": True},
    ["a", True],
    '{"text": ' * 20_000,
]


@pytest.mark.parametrize("line", SPOILED, ids=lambda line: str(line)[:40])
def test_a_line_that_is_no_labelled_text_is_named(tmp_path: Path, line: object) -> None:
    file = _write(tmp_path, {"text": "a", "label": True}, line)
    with pytest.raises(ConfigError, match=r"set\.jsonl', line 2"):
        read_json_lines(file)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9t\xe9")
    (tmp_path / "empty").write_bytes(b"\n\n")
    for name, reason in (("latin", "UTF-8"), ("empty", "0 documents"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=reason):
            read_texts(tmp_path / name, label=True)


def test_documents_of_equal_content_have_equal_keys() -> None:
    whole = Document((Turn(None, (TextSpan("a b", True),)),))
    parts = Document((Turn(None, (TextSpan("a ", None), TextSpan("b", False))),))
    assert whole.key == parts.key
    assert whole.key != Document((Turn("user", (TextSpan("a b", True),)),)).key
