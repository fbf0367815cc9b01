"""An API key from a file or the environment, and keys that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from clairai.errors import ConfigError
from clairai.launch.api_key import UPSTREAM, api_key


def test_a_key_comes_from_the_file_else_from_the_first_variable_that_is_set(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    environ = {"CLAIRAI_API_KEY": "", "VLLM_API_KEY": "from-variable"}
    assert api_key(file, environ=environ) == "from-file"
    assert api_key(None, environ=environ) == "from-variable"
    assert api_key(None, environ={"CLAIRAI_API_KEY": "a", "VLLM_API_KEY": "b"}) == "a"
    assert api_key(None, environ={"CLAIRAI_API_KEY": ""}) is None
    assert api_key(None, UPSTREAM, {"CLAIRAI_UPSTREAM_API_KEY": "u", "CLAIRAI_API_KEY": "a"}) == "u"


@pytest.mark.parametrize(
    "text", ["", "\n", "two words", "tab\there", "schlüssel", "a\nb", "k" * 4097]
)
def test_a_key_that_cannot_be_in_a_header_is_refused_without_being_repeated(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        api_key(file, environ={})
    assert not text.strip() or text not in str(caught.value)


def test_a_missing_key_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        api_key(tmp_path / "none", environ={"CLAIRAI_API_KEY": "not instead"})
