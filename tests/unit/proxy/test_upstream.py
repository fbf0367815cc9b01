"""Which headers pass between client and engine."""

from __future__ import annotations

from clairai.proxy.upstream import request_headers, response_headers


def test_headers_between_two_hops_stay_there() -> None:
    given = [("Connection", "close, X-Hop"), ("X-Hop", "1"), ("X-Kept", "1"), ("Cookie", "c")]
    given += [("Host", "h"), ("Sec-Fetch-Site", "x"), ("Authorization", "k"), ("TE", "trailers")]
    assert request_headers(given, has_own_key=True, is_edited=False) == [("X-Kept", "1")]
    assert ("Authorization", "k") in request_headers(given, has_own_key=False, is_edited=False)
    answered = {"Server": "v", "Access-Control-Allow-Origin": "*", "X-Kept": "1", "Set-Cookie": "c"}
    assert response_headers(answered) == [("X-Kept", "1")]
