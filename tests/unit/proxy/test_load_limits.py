"""Bodies in flight and bytes a second have bounds, of each client and of all."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from clairai.fields.json_outline import STEP_BYTES
from clairai.fields.request_body import LARGE_BYTES
from clairai.proxy.completions.completion_request import read_request
from clairai.proxy.load_limits import BodyBudget, ByteRates, LargeBodies
from clairai.proxy.proxy_settings import Limits
from clairai.proxy.responses import HttpRefusal

LIMITS = Limits(
    bodies_bytes=100,
    client_bodies_bytes=60,
    client_json_rate=10,
    client_json_burst=50,
    json_rate=20,
    json_burst=80,
)


def test_the_bodies_of_one_client_and_of_all_are_bounded() -> None:
    budget = BodyBudget(LIMITS)
    with budget.hold("a") as a, budget.hold("b") as b, budget.hold("a") as again:
        a(60)
        with pytest.raises(HttpRefusal, match="your requests") as refused:
            again(1)
        assert refused.value.headers == {"Retry-After": "1"}
        b(40)
        with pytest.raises(HttpRefusal, match="requests in the proxy"):
            b(1)
    with budget.hold("b") as b:  # everything was given back
        b(60)


def test_a_client_waits_for_its_own_bytes_and_then_may_go_on() -> None:
    now_s = [0.0]
    rates = ByteRates(LIMITS, clock=lambda: now_s[0])
    rates.take("a", 50)
    with pytest.raises(HttpRefusal) as refused:
        rates.take("a", 25)
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "3"})
    rates.take("b", 30)  # another client is served
    with pytest.raises(HttpRefusal) as refused:
        rates.check("c", 10)  # until all of them are too many
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
    now_s[0] = 2.5
    rates.take("a", 25)


def test_clients_without_number_are_not_remembered_without_end() -> None:
    rates = ByteRates(Limits(), clock=lambda: 0.0)
    rates.take("first", Limits().client_json_burst)
    for number in range(4096):
        rates.take(str(number), 1)
    rates.take("first", 1)  # forgotten, so that it begins anew


def test_large_bodies_are_read_beside_the_event_loop_one_at_a_time() -> None:
    running, seen = [], []

    def work() -> None:
        running.append(threading.current_thread() is threading.main_thread())
        seen.append(len(running))
        running.pop()

    async def main() -> None:
        bodies = LargeBodies()
        large = bytes(LARGE_BYTES + 1)
        await asyncio.gather(*(bodies.run(large, work) for _ in range(8)))
        assert await bodies.run(b"{}", threading.current_thread) is threading.main_thread()
        assert await bodies.run(large, threading.current_thread) is not threading.main_thread()

    asyncio.run(main())
    assert seen == [1] * 8


def test_a_large_body_leaves_the_event_loop_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests: list[float] = []
    monkeypatch.setattr("time.sleep", rests.append)
    monkeypatch.setattr("time.thread_time", itertools.count().__next__)
    large = b'{"messages": [' + b"1," * LARGE_BYTES + b"1]}"
    asyncio.run(LargeBodies().run(large, lambda: read_request(large, Limits())))
    assert len(rests) >= len(large) // STEP_BYTES  # one after each part that was read
