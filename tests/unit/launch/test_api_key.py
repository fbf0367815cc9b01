"""An API key from a file or the environment, and keys that are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from clairai.errors import ConfigError
from clairai.launch.api_key import UPSTREAM, access_keys, api_key
from clairai.proxy.access_keys import MAX_KEYS, RIGHTS, AccessKey, find_key

LISTED = "listed-0123456789"
ENTRY = {"name": "ci", "rights": ["read", "steer"], "key": LISTED}


def _file(folder: Path, text: str) -> Path:
    file = folder / "key"
    file.write_text(text)
    file.chmod(0o600)
    return file


def _listed(folder: Path, *entries: dict[str, Any]) -> Path:
    return _file(folder, json.dumps(entries))


def test_a_key_comes_from_the_file_else_from_the_first_variable_that_is_set(tmp_path: Path) -> None:
    file = _file(tmp_path, "from-file\n")
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
    file = _file(tmp_path, text)
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        api_key(file, environ={})
    assert not text.strip() or text not in str(caught.value)


def test_a_missing_key_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        api_key(tmp_path / "none", environ={"CLAIRAI_API_KEY": "not instead"})


def test_a_bare_key_has_every_right(tmp_path: Path) -> None:
    made = (AccessKey.of("short", name="default", rights=RIGHTS),)
    assert access_keys(_file(tmp_path, "short\n")) == made
    assert access_keys(None, {"VLLM_API_KEY": "short"}) == made
    assert access_keys(None, {}) == ()


def test_a_list_of_keys_names_them_and_their_rights(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"known only to its holder").hexdigest()
    other = {"name": "boss", "rights": ["admin"], "sha256": digest}
    ci, boss = access_keys(_listed(tmp_path, ENTRY, other))
    assert (ci.name, sorted(ci.rights)) == ("ci", ["read", "steer"])
    assert find_key("known only to its holder", (ci, boss)) is boss
    assert find_key(LISTED, (ci, boss)) is ci
    assert find_key(digest, (ci, boss)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "Not A Name"}, "a-z"),
        ({"name": "a" * 65}, "a-z"),
        ({"name": ""}, "a-z"),
        ({"rights": []}, "must be some of"),
        ({"rights": ["everything"]}, "JSON list"),
        ({"key": None}, "a `key` or its `sha256`"),
        ({"sha256": "0" * 64}, "a `key` or its `sha256`"),
        ({"key": "tooshort"}, "16 to 512"),
        ({"key": "x" * 513}, "16 to 512"),
        ({"key": f"{LISTED} spaced"}, "16 to 512"),
        ({"key": None, "sha256": "A" * 64}, "small letters"),
        ({"more": 1}, "JSON list"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_without_the_key(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        access_keys(_listed(tmp_path, ENTRY | change))
    assert LISTED not in str(caught.value)


def test_a_list_has_a_bounded_number_of_keys(tmp_path: Path) -> None:
    many = [ENTRY | {"name": f"k{i}", "key": f"{LISTED}{i}"} for i in range(MAX_KEYS + 1)]
    assert len(access_keys(_listed(tmp_path, *many[:-1]))) == MAX_KEYS
    for wrong in (many, []):
        with pytest.raises(ConfigError, match=f"1 to {MAX_KEYS}"):
            access_keys(_listed(tmp_path, *wrong))
