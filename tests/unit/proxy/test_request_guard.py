"""Headers found by name are those that Starlette finds."""

from __future__ import annotations

from starlette.datastructures import Headers

from clairai.proxy.request_guard import IndexedHeaders


def test_headers_by_name_are_those_of_starlette() -> None:
    raw = [(b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2"), (b"c", b"")]
    scope = {"type": "http", "headers": raw}
    ours, theirs = IndexedHeaders(scope), Headers(scope=scope)
    for name in ("a", "A", "b", "c", "d", ""):
        assert ours.get(name) == theirs.get(name)
        assert ours.getlist(name) == theirs.getlist(name)
        assert (name in ours) == (name in theirs)
    assert ours.items() == theirs.items()
    assert ours == theirs
