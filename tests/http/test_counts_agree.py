"""Whatever happens to completions, and in whatever order, every scrape adds up."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.proxy_settings import Limits
from tests.http.answers import CHAT
from tests.http.fake import PROMPT, Exchange, answering
from tests.http.world import World, world

NUM_PLACES: Final = 3
DEADLINE_S: Final = 20.0
SCORED: Final = {"clairai": {"probes": "all"}}
# What a client may ask; the engine holds each of these until the test says how it goes on.
HELD: Final[dict[str, dict[str, Any]]] = {
    "plain whole": {},
    "plain stream": {"stream": True},
    "scored whole": SCORED,
    "scored stream": {"stream": True, **SCORED},
    "named run": {"clairai": {"events": "named"}},
    "scored response": {"path": "/v1/responses", "input": "Hi", **SCORED},
    "of another route": {"path": "/v1/messages"},
}
# And what is refused at once: by the proxy, for the engine, by the engine.
REFUSED: Final[dict[str, dict[str, Any]]] = {
    "unknown field": {"clairai": {"bogus": 1}},
    "unknown probe": {"clairai": {"probes": ["nobody"]}},
    "refused upstream": {"user": "refused"},
    "refused upstream with scores": {"user": "refused", **SCORED},
}
ENDS: Final = ("finish", "die", "leave")
EVENTS: Final = st.one_of(
    st.sampled_from([*HELD, *REFUSED]),
    st.tuples(st.sampled_from(ENDS), st.integers(0, NUM_PLACES)),
    st.just("engine lost"),
)


@dataclass
class Held:
    """A completion that the engine holds."""

    kind: str
    task: asyncio.Task[None]
    run: asyncio.Future[str]


@dataclass
class Engine:
    """The script of the fake engine: it holds completions until it is told how they end."""

    labels: Iterator[int] = field(default_factory=itertools.count)
    arrived: set[str] = field(default_factory=set)
    _ends: dict[str, asyncio.Future[str]] = field(default_factory=dict)

    async def answer(self, exchange: Exchange) -> web.StreamResponse | None:
        label, is_stream = exchange.body["user"], exchange.body.get("stream")
        if label == "refused":
            return exchange.refuse(422, "no")
        if is_stream:
            exchange.prefill()
            await exchange.begin()
            await exchange.tokens([72], first=True)
        end = self._ends[label] = asyncio.get_running_loop().create_future()
        self.arrived.add(label)
        if await end == "die":
            exchange.die()
            return None
        if not is_stream:
            return await answering([72, 105])(exchange)
        exchange.rows(len(PROMPT), [72])
        await exchange.tokens([105], finish="length")
        await exchange.end(num_generated=2)
        return None

    def end(self, label: str, how: str) -> None:
        """Called on the engine's loop."""
        if not self._ends[label].done():
            self._ends[label].set_result(how)


@dataclass
class Clients:
    """Sends completions, and knows what the proxy should have counted."""

    w: World
    engine: Engine
    session: aiohttp.ClientSession
    before: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    num_begun: int = 0

    async def act(self, event: Any) -> None:
        if event in HELD:
            await self._begin(event)
        elif event in REFUSED:
            self.num_begun += 1
            self.ended["error"] += 1
            await self._post({"user": "x", **REFUSED[event]})
        elif event == "engine lost":
            self.w.proxy.end_answers()
            self.ended["error"] += len(self.held)
            await self._forget(*self.held)
        elif event[1] < len(self.held):
            await self._end(list(self.held)[event[1]], event[0])

    async def _begin(self, kind: str) -> None:
        self.num_begun += 1
        label = str(next(self.engine.labels))
        run = asyncio.get_running_loop().create_future()
        sent = self._post({"user": label, **HELD[kind]}, run)
        if len(self.held) == NUM_PLACES:
            self.ended["error"] += 1
            await sent
            return
        self.held[label] = Held(kind, asyncio.create_task(sent), run)
        await self.until(lambda: label in self.engine.arrived)

    async def _end(self, label: str, how: str) -> None:
        held = self.held[label]
        if how == "leave" and held.kind == "named run":
            async with self.session.delete(f"{self.w.url}/v1/runs/{await held.run}") as answer:
                assert answer.status == 204
        elif how == "leave":
            held.task.cancel()
        else:
            self.w.loop.call_soon_threadsafe(self.engine.end, label, how)
        self.ended[{"finish": "done", "die": "error", "leave": "cancelled"}[how]] += 1
        await self._forget(label)

    async def _forget(self, *labels: str) -> None:
        tasks = [self.held.pop(label).task for label in labels]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _post(self, body: dict[str, Any], run: asyncio.Future[str] | None = None) -> None:
        body = {"messages": [], **body}
        path = body.pop("path", CHAT)
        async with self.session.post(f"{self.w.url}{path}", json=body) as answer:
            if run is not None:
                run.set_result(answer.headers.get("X-Clairai-Run", ""))
            await answer.read()

    # What is checked

    async def scrape(self) -> dict[str, float]:
        """One scrape; it adds up, and nothing that only grows has become less."""
        async with self.session.get(f"{self.w.url}/metrics") as answer:
            text = await answer.text()
        found = read_samples(text)
        ended = {key: value for key, value in found.items() if "completions_ended" in key}
        assert found["clairai_completions_total"] == found["clairai_streams"] + sum(ended.values())
        assert found["clairai_completion_seconds_count"] == sum(ended.values())
        errors = sum(value for key, value in found.items() if "completion_errors" in key)
        assert errors == ended['clairai_completions_ended_total{"outcome": "error"}']
        less = [key for key, value in self.last.items() if "_total" in key and found[key] < value]
        assert less == []
        self.last = found
        return found

    async def check(self) -> None:
        """Scrape until everything is as it must be; each scrape adds up meanwhile."""
        expected = {
            "clairai_streams": len(self.held),
            "clairai_completions_total": self.before["clairai_completions_total"] + self.num_begun,
        }
        for outcome in ("done", "cancelled", "error"):
            key = f'clairai_completions_ended_total{{"outcome": "{outcome}"}}'
            expected[key] = self.before[key] + self.ended[outcome]

        async def is_so() -> bool:
            found = await self.scrape()
            return {key: found[key] for key in expected} == expected

        await self.until(is_so)

    async def until(self, condition: Callable[[], bool | Awaitable[bool]]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            assert time.monotonic() < deadline_s, (self.last, self.held, self.ended)
            await asyncio.sleep(0)


def read_samples(text: str) -> dict[str, float]:
    """By name and labels."""
    return {
        sample.name + (str(sample.labels).replace("'", '"') if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[World]:
    limits = Limits(streams=NUM_PLACES)
    folder = tmp_path_factory.mktemp("c")
    with world(folder, script=engine.answer, metrics=Metrics(), limits=limits) as made:
        yield made


async def _run(w: World, engine: Engine, events: list[Any]) -> None:
    async with aiohttp.ClientSession() as session:
        clients = Clients(w, engine, session)
        clients.before = await clients.scrape()
        for event in events:
            await clients.act(event)
            await clients.check()
        while clients.held:
            await clients.act(("finish", 0))
        await clients.check()


@settings(deadline=None, max_examples=15)
@given(events=st.lists(EVENTS, min_size=1, max_size=12))
def test_completions_begun_are_those_that_run_and_those_that_ended_at_every_scrape(
    counted: World, engine: Engine, events: list[Any]
) -> None:
    asyncio.run(_run(counted, engine, events))


def test_every_kind_of_completion_and_of_end_adds_up(counted: World, engine: Engine) -> None:
    ends: list[Any] = [event for how in ENDS for kind in HELD for event in (kind, (how, 0))]
    full: list[Any] = [*HELD, "engine lost"]  # more than there are places
    asyncio.run(_run(counted, engine, [*ends, *REFUSED, *full, "named run", "engine lost"]))
