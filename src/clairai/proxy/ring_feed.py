"""Takes the ring of the engine behind the proxy; gives its rows to the event loop, and counts.

One thread waits on the ring. It converts the rows of our own requests to plain lists; rows of
others are counted and shown to the observers only.

R = rows of a record, P = probes of its bank
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, RingError
from clairai.local.private_socket import live_engine_sockets, runtime_dir, socket_path
from clairai.match.choice_scores import Values
from clairai.match.row_collector import RowSpan, split_rows
from clairai.proxy.completions.request_scores import RowBatch
from clairai.proxy.observe.observer import Observer, RingCounts
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.upstream import Upstream, UpstreamGone
from clairai.ring.attach import RingReader
from clairai.ring.reader import ReaderStatistics, Record, StartAt
from clairai.wire import ring_messages

POLL_PAUSE_S: Final = 0.1
BUSY_PAUSE_S: Final = 2e-3
ATTACH_TIMEOUT_S: Final = 1.0
_NO_STATISTICS: Final = ReaderStatistics(0, 0, 0, 0, 0)
_FIELDS: Final = ("position", "token_id", "span")
_log: Final = logging.getLogger(__name__)

Deliver = Callable[[list[RowBatch]], None]


class RingFeed:
    """`deliver` and `on_change` are called on the feed's thread.

    `aim` says which engine's socket to read; the feed attaches to it, again and again if need be.
    """

    def __init__(
        self, *, deliver: Deliver, on_change: Callable[[], None], observers: Sequence[Observer]
    ) -> None:
        # Streams of ours, and whether their prompts are wanted; there before a row can come.
        self.watched: dict[int, bool] = {}
        self.is_attached = False
        self.epoch: int | None = None
        self.model: str | None = None
        self.reason = "no engine was found yet"
        self.lost_at_s: float | None = None  # when a record was last found to be lost
        self.bank: ring_messages.Bank | None = None  # of the newest record
        self._deliver = deliver
        self._on_change = on_change
        self._observers = list(observers)
        self._aim: Path | None = None
        self._aimed = threading.Event()
        self._stopping = threading.Event()
        self._resume: dict[Path, StartAt] = {}
        self._before = _NO_STATISTICS  # engines that are gone
        self._now = _NO_STATISTICS
        self._rows = self._orphaned = self._unnamed = 0
        self._thread = threading.Thread(target=self._run, name="clairai-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; blocks for a moment."""
        self._stopping.set()
        self._aimed.set()
        self._thread.join()

    def aim(self, path: Path | None, *, start: StartAt = "oldest") -> None:
        """Read the engine at this socket; `start` counts the first time it is read."""
        if path == self._aim:
            return
        if path is not None:
            self._resume.setdefault(path, start)
        self._aim = path
        self._aimed.set()

    def numbers(self, mismatched: int) -> RingCounts:
        now, before = self._now, self._before
        return RingCounts(
            attached=self.is_attached,
            epoch=self.epoch,
            records_delivered=before.delivered + now.delivered - self._unnamed,
            records_lost=before.lost + now.lost + self._unnamed,
            lag=now.lag,
            rows=self._rows,
            orphaned=self._orphaned,
            mismatched=mismatched,
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._aimed.clear()
            try:
                is_read = self._aim is not None and self._read_engine(self._aim)
            except Exception:  # a mistake of ours must not end all scores without a word
                _log.exception("the ring's feed failed; it begins again")
                is_read = False
            if not is_read:
                self._aimed.wait(POLL_PAUSE_S)

    def _read_engine(self, path: Path) -> bool:
        """Whether the engine was there; returns when it is gone, or another is aimed at."""
        try:
            reader = RingReader.attach(
                path, start=self._resume.get(path, "oldest"), timeout_s=ATTACH_TIMEOUT_S
            )
        except RingError as error:
            self._note_unattached(error.reason)
            return False
        with reader:
            self._note_attached(reader.welcome)
            try:
                self._read(reader, path)
            except RingError as error:
                _log.warning("the ring cannot be read on: %s", error.reason)
                return False
            finally:
                self._note_detached(path)
        return True

    def _read(self, reader: RingReader, path: Path) -> None:
        while not self._stopping.is_set() and self._aim == path:
            # Asked before the poll: whatever a dead engine had published is there for that poll.
            is_dead = not reader.is_alive()
            records = reader.poll()
            if records:
                self._hand_over(records, reader)
            self._note(reader.statistics())
            if not records and is_dead and self._now.lag == 0:
                return
            if self._now.lag:
                continue
            if records:
                # A score is told with the next token: nobody waits, and the next look finds more.
                self._stopping.wait(BUSY_PAUSE_S)
            else:
                reader.wait(POLL_PAUSE_S)

    def _note(self, now: ReaderStatistics) -> None:
        if now.lost > self._now.lost:
            self.lost_at_s = time.monotonic()
        self._now = now

    def _hand_over(self, records: list[Record], reader: RingReader) -> None:
        named = [(record, bank) for record in records if (bank := self._bank_of(record, reader))]
        parcels: list[RowBatch] = []
        for _, group in itertools.groupby(named, key=lambda pair: pair[1].version):
            pairs = list(group)
            parcels += self._parcels([record for record, _ in pairs], pairs[0][1])
        if parcels:
            self._deliver(parcels)
        for record, bank in named:
            self.bank = bank
            self._tell_observers(bank, record)

    def _bank_of(self, record: Record, reader: RingReader) -> ring_messages.Bank | None:
        """None if nobody can say what the record's columns are: it is lost."""
        try:
            bank = reader.bank(record.bank_version)
            if record.scores_RC.shape[1] == len(bank.probes):
                return bank
            reason = f"it has {record.scores_RC.shape[1]} columns, its bank {len(bank.probes)}"
        except RingError as error:
            reason = error.reason
        self._unnamed += 1
        self.lost_at_s = time.monotonic()
        _log.warning("a record is lost: %s", reason)
        return None

    def _parcels(self, records: list[Record], bank: ring_messages.Bank) -> list[RowBatch]:
        """The rows of our own requests, in order; converted all at once."""
        rows = np.concatenate([record.rows for record in records])
        phases = rows["phase"].tolist()
        kept = [run for run in split_rows(rows) if self._is_kept(run, phases)]
        if not kept:
            return []
        columns = [rows[name].tolist() for name in _FIELDS]
        scores = _scores_of(records, [run for run in kept if not run.is_marks])
        made, begin = [], 0
        for run in kept:
            part, end = slice(run.begin, run.end), begin
            end += 0 if run.is_marks else run.end - run.begin
            position, token_id, span = (column[part] for column in columns)
            about = (run.stream, run.choice, bank, position, token_id, phases[part], span)
            made.append(RowBatch(*about, scores[begin:end]))
            begin = end
        return made

    def _is_kept(self, run: RowSpan, phases: list[int]) -> bool:
        wants_prompt = self.watched.get(run.stream)
        if wants_prompt is None:
            self._orphaned += run.end - run.begin
            return False
        self._rows += run.end - run.begin
        # A prompt of a hundred thousand tokens that nobody asked about is not converted.
        return wants_prompt or ring_messages.DECODE in phases[run.begin : run.end]

    def _tell_observers(self, bank: ring_messages.Bank, record: Record) -> None:
        for observer in list(self._observers):
            try:
                observer.on_scores(bank, record.rows, record.scores_RC, record.stamp_ns)
            except Exception:
                _log.exception("%r is told no more", observer)
                self._observers.remove(observer)

    def _note_unattached(self, reason: str) -> None:
        if reason != self.reason:  # else: said already
            _log.warning("the ring cannot be attached: %s", reason)
        self.reason = reason

    def _note_attached(self, welcome: ring_messages.Welcome) -> None:
        self.epoch, self.model, self.is_attached = welcome.epoch, welcome.model, True
        self._on_change()

    def _note_detached(self, path: Path) -> None:
        now, before = self._now, self._before
        self._resume[path] = now.first + now.delivered + now.lost
        self._before = ReaderStatistics(
            0,
            before.delivered + now.delivered,
            before.lost + now.lost,
            before.torn + now.torn,
            0,
        )
        self._now = _NO_STATISTICS
        self.is_attached, self.reason = False, "the engine has closed its ring"
        self._on_change()


def _scores_of(records: list[Record], tokens: list[RowSpan]) -> list[Values]:
    """Of the rows of these runs, one after the other."""
    taken = [at for run in tokens for at in range(run.begin, run.end)]
    if not taken:
        return []
    scores_RP = np.concatenate([record.scores_RC for record in records])
    return to_json_numbers(scores_RP if len(taken) == len(scores_RP) else scores_RP[taken])


def to_json_numbers(scores_RP: NDArray[np.float32]) -> list[Values]:
    """Numbers that JSON writes in at most nine digits and that are the same float32 when read.

    None for what JSON has no number for.
    """
    wide = scores_RP.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent = 8 - np.floor(np.log10(np.abs(wide)))
        scale = 10.0**exponent
        rounded = np.round(wide * scale) / scale
    is_exact = rounded.astype(np.float32) == scores_RP  # not for 0 and the very small
    made: list[Values] = np.where(is_exact, rounded, wide).tolist()
    if not np.isfinite(wide).all():
        made = [[v if v is not None and np.isfinite(v) else None for v in row] for row in made]
    return made


# MERGED
# Takes upstream's description; aims the feed at the ring of the very engine that upstream is.
#
# Several engines may share a runtime folder. Upstream's own epoch says which one answers our
# requests; only where upstream has no clairai routes is it the newest.


FIND_PAUSE_S: Final = 0.5
MAX_FIND_PAUSE_S: Final = 2.0
FIND_TIMEOUT_S: Final = 5.0
_finder_log: Final = logging.getLogger(__name__)


class _EngineDescription(msgspec.Struct):
    epoch: str


class _RefusalError(msgspec.Struct):
    code: str | int | None = None


class _RefusalBody(msgspec.Struct):
    error: _RefusalError | None = None


class RingFinder:
    """One task; asks only while the feed is not attached, as asking costs the engine a step."""

    def __init__(self, settings: ProxySettings, upstream: Upstream, feed: RingFeed) -> None:
        self._settings = settings
        self._upstream = upstream
        self._feed = feed
        self._folder: Path | None = None
        self._known: frozenset[Path] = frozenset()
        self._is_by_age = False
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def find_folder(self) -> None:
        """RingError if the runtime folder cannot be used."""
        if self._settings.ring_socket is None:
            explicit = self._settings.runtime_dir
            self._folder = runtime_dir(None if explicit is None else str(explicit))
            self._known = frozenset(live_engine_sockets(self._folder))

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """Something changed: look now."""
        self._news.set()

    async def _watch(self) -> None:
        pause_s = FIND_PAUSE_S
        while True:
            if not self._feed.is_attached or self._is_by_age:
                await self._aim()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            # An engine whose ring cannot be attached is asked again, but not for ever so often.
            pause_s = FIND_PAUSE_S if self._news.is_set() else min(2 * pause_s, MAX_FIND_PAUSE_S)
            self._news.clear()

    async def _aim(self) -> None:
        if self._folder is None:
            self._feed.aim(self._settings.ring_socket)
            return
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                path = await self._find(self._folder)
        except (UpstreamGone, HttpRefusal, TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return  # it is starting, or busy, or gone: look again
        # What an engine published before we were here is nobody's that we serve.
        self._feed.aim(path, start="newest" if path in self._known else "oldest")

    async def _find(self, folder: Path) -> Path | None:
        async with self._upstream.ask("GET", "/v1/clairai") as response:
            body = await self._upstream.whole(response)
            status = response.status
        self._is_by_age = status != HTTPStatus.OK and not _is_without_taps(body)
        if self._is_by_age:
            found = await asyncio.to_thread(live_engine_sockets, folder)
            return found[0] if found else None
        if status != HTTPStatus.OK:
            return None
        description = msgspec.json.decode(body, type=_EngineDescription)
        return socket_path(folder, int(description.epoch, 16))


def _is_without_taps(body: bytes) -> bool:
    """Whether it is our own route that refused: an engine with clairai's routes and no ring."""
    try:
        error = msgspec.json.decode(body, type=_RefusalBody).error
    except msgspec.MsgspecError:
        return False
    return error is not None and error.code == ConfigError.code
