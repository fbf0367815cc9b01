"""The examples that the proxy answers with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clairai.errors import ConfigError
from clairai.proxy.handlers import load_examples


def test_examples_come_from_a_file_that_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "examples.json"
    example = {"title": "t", "probe": None, "messages": [{"role": "user", "content": "Hi"}]}
    path.write_text(json.dumps({"data": [example]}))
    assert json.loads(load_examples(path)) == {"data": [example]}
    assert json.loads(load_examples(None)) == {"data": []}
    for bad in ("[]", "{", '{"data": [{"title": 1}]}', '{"data": [], "more": 1}'):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="examples"):
            load_examples(path)
