"""The bytes that a Range header asks for, as RFC 9110 defines it."""

from __future__ import annotations

import pytest

from clairai.server.capture_routes import NOT_SATISFIABLE, requested_range

TAG = '"t"'
SIZE = 100


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-99", (0, 100)),
        ("bytes=0-5000", (0, 100)),
        ("bytes=99-", (99, 100)),
        ("bytes=-1", (99, 100)),
        ("bytes=-500", (0, 100)),
        (" bytes = 3 - 4 ", (3, 5)),
        ("bytes=100-", NOT_SATISFIABLE),
        ("bytes=-0", NOT_SATISFIABLE),
        ("bytes=9999999999999999999-", NOT_SATISFIABLE),
        ("bytes=5-4", None),
        ("bytes=0-1,4-5", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("bytes=\u0661-", None),
        ("lines=0-1", None),
        ("", None),
    ],
)
def test_a_header_asks_for_a_range_or_for_the_whole_file(asked: str, expected: object) -> None:
    assert requested_range({"range": asked}, TAG, SIZE) == expected


def test_a_range_of_another_version_is_not_given() -> None:
    assert requested_range({"range": "bytes=0-1", "if-range": TAG}, TAG, SIZE) == (0, 2)
    assert requested_range({"range": "bytes=0-1", "if-range": '"u"'}, TAG, SIZE) is None


def test_an_empty_file_has_no_range() -> None:
    assert requested_range({"range": "bytes=-5"}, TAG, 0) == NOT_SATISFIABLE
    assert requested_range({}, TAG, 0) is None
