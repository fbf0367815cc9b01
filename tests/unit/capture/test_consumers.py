"""A consumer learns who made a request if it takes the parameter, and only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clairai.capture.consumers import GuardedConsumer, begin_request
from tests.support.capture_parts import ToyConsumer


class OwnerConsumer(ToyConsumer):
    """One that was written for owners."""

    def begin(
        self,
        stream: int,
        *,
        tags: Mapping[str, Any] | None,
        steering: Mapping[str, Any] | None,
        owner: str | None = None,
    ) -> None:
        self.told.append(("begin", stream, tags, steering, owner))


def test_an_owner_is_told_where_it_is_taken() -> None:
    for inner, more in ((ToyConsumer(), ()), (OwnerConsumer(), ("alice",))):
        guarded = GuardedConsumer(inner)
        begin_request(guarded, 5, tags={}, steering={}, owner="alice")
        assert inner.told == [("begin", 5, {}, {}, *more)]
        assert guarded.state.name == "writing"


def test_a_request_without_an_owner_is_begun_as_ever() -> None:
    inner = ToyConsumer()
    begin_request(GuardedConsumer(inner), 5, tags={"a": 1}, steering={}, owner=None)
    assert inner.told == [("begin", 5, {"a": 1}, {})]
