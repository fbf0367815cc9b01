"""Error messages quote what they refuse, and stay short whatever it is."""

from __future__ import annotations

import pytest

from clairai.errors import quote

HUGE = ["x" * 10**6, b"\0" * 10**6, [1] * 10**6, 10**5000, 1.5, None]


@pytest.mark.parametrize("value", HUGE, ids=quote)
def test_a_quoted_value_is_short_whatever_it_is(value: object) -> None:
    assert len(quote(value)) <= 60
