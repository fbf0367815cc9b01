"""Paths of the engine's machine are not shown."""

from __future__ import annotations

import json

import pytest

from clairai.proxy.host_paths import hide_paths, hide_roots


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"no file /srv/models/a-b_c.bin here", b"no file (a path) here"),
        (b'"/opt/me/x"', b'"(a path)"'),
        (b"at ~/x/y.py:12", b"at (a path):12"),
        (b"POST /v1/chat/completions", b"POST /v1/chat/completions"),
        (b"org/name and 1/2 and http://host/a/b", b"org/name and 1/2 and http://host/a/b"),
    ],
)
def test_absolute_paths_are_left_out(text: bytes, expected: bytes) -> None:
    assert hide_paths(text) == expected


def test_a_model_has_its_name_where_vllm_has_its_folder() -> None:
    cards = [{"id": "a", "root": "/srv/a", "n": 1.50}, {"id": "b"}]
    shown = json.loads(hide_roots(json.dumps({"object": "list", "data": cards}).encode()))
    assert shown == {"object": "list", "data": [{"id": "a", "root": "a", "n": 1.5}, {"id": "b"}]}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": 1}', b"\xff"])
def test_what_is_no_list_of_models_is_not_touched(body: bytes) -> None:
    assert hide_roots(body) == body
