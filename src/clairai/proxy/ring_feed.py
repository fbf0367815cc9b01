"""Reads the ring of the engine behind the proxy, and hands its rows to the event loop.

`RingFeed` is a thread that reads. It converts rows of the proxy's own requests to plain lists; rows
of other requests are counted and shown to the observers only. `RingFinder` is a task on the event
loop that tells the feed which engine to read.

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
from typing import Annotated, Final

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
from clairai.proxy.upstream import Upstream, UpstreamGone, decode_answer
from clairai.ring.attach import RingReader
from clairai.ring.reader import ReaderStatistics, Record, StartAt
from clairai.wire import ring_messages

POLL_PAUSE_S: Final = 0.1
# Between two polls if nobody waits for rows: they are delivered with the next token, and many at
# once are cheaper than one. Polling is cheaper for the engine than waking this thread every step.
BUSY_PAUSE_S: Final = 1e-2
IDLE_PAUSE_S: Final = 2e-2
ATTACH_TIMEOUT_S: Final = 1.0
STALLED_S: Final = 20.0  # longer than an engine may take to name its probes
FIND_PAUSE_S: Final = 0.5
MAX_FIND_PAUSE_S: Final = 2.0
FIND_TIMEOUT_S: Final = 5.0
_NO_STATISTICS: Final = ReaderStatistics(0, 0, 0, 0, 0)
_FIELDS: Final = ("position", "token_id", "span")
_log: Final = logging.getLogger(__name__)

Deliver = Callable[[list[RowBatch]], None]


class RingFeed:
    """The thread that reads the ring; it calls `deliver` and `on_change`.

    `set_target` says which engine's socket to read. The feed attaches to it, and again whenever
    the connection is lost.
    """

    def __init__(
        self, *, deliver: Deliver, on_change: Callable[[], None], observers: Sequence[Observer]
    ) -> None:
        # Our streams, and whether rows of their prompts are wanted; set before a row can arrive.
        self.watched: dict[int, bool] = {}
        self.is_attached = False
        self.epoch: int | None = None
        self.model: str | None = None
        self.reason = "no engine was found yet"
        self.on_target: Callable[[Path | None, StartAt], None] | None = None
        self.num_polls = 0
        self._round_s = time.monotonic()  # when the thread last went round
        self.is_engine_ending = False  # set by a launcher: its ring goes, as it should
        self.lost_at_s: float | None = None  # when a lost record was last noticed
        self.bank: ring_messages.Bank | None = None  # of the newest record
        self._deliver = deliver
        self._on_change = on_change
        self._observers = list(observers)
        self._target: Path | None = None
        self._has_target = threading.Event()
        self._is_stopping = threading.Event()
        self._is_wanted = threading.Event()  # somebody waits for rows
        self._next_seq: dict[Path, StartAt] = {}
        self._before = _NO_STATISTICS  # of earlier engines
        self._now = _NO_STATISTICS
        self._rows = self._orphaned = self._unnamed = self._num_engines = 0
        # Records delivered, lost and waiting. Replaced as a whole, because another thread reads
        # it: a count that goes back for a moment is a restart to Prometheus.
        self._records = (0, 0, 0)
        self._thread = threading.Thread(target=self._run, name="clairai-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; blocks for a moment."""
        self._is_stopping.set()
        self._is_wanted.set()
        self._has_target.set()
        self._thread.join()

    @property
    def is_stalled(self) -> bool:
        """True if the thread hangs: it goes round several times a second."""
        return self._thread.is_alive() and time.monotonic() - self._round_s > STALLED_S

    def hurry(self) -> None:
        """Read now, and not after the pause: an answer waits for its last rows."""
        self._is_wanted.set()

    def set_target(self, path: Path | None, *, start: StartAt = "oldest") -> None:
        """Read the engine at this socket; `start` applies the first time it is read."""
        if path == self._target:
            return
        if path is not None:
            self._next_seq.setdefault(path, start)
        self._target = path
        self._has_target.set()
        if self.on_target is not None:
            self.on_target(path, start)

    def counts(self, mismatched: int) -> RingCounts:
        delivered, lost, lag = self._records
        return RingCounts(
            attached=self.is_attached,
            epoch=self.epoch,
            restarts=max(0, self._num_engines - 1),
            records_delivered=delivered,
            records_lost=lost,
            lag=lag,
            rows=self._rows,
            orphaned=self._orphaned,
            mismatched=mismatched,
        )

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self._round_s = time.monotonic()
            self._has_target.clear()
            try:
                is_read = self._target is not None and self._read_engine(self._target)
            except Exception:  # a bug must not silently end all scores
                _log.exception("reading the ring failed; the feed starts again")
                is_read = False
            if not is_read:
                self._has_target.wait(POLL_PAUSE_S)

    def _read_engine(self, path: Path) -> bool:
        """Read until the engine is gone or the target changes; False if it was not there."""
        try:
            reader = RingReader.attach(
                path, start=self._next_seq.get(path, "oldest"), timeout_s=ATTACH_TIMEOUT_S
            )
        except RingError as error:
            self._note_unattached(error.reason)
            return False
        with reader:
            self._note_attached(reader.welcome)
            try:
                self._read(reader, path)
            except RingError as error:
                _log.warning("the ring cannot be read any further: %s", error.reason)
                return False
            finally:
                self._note_detached(path)
        return True

    def _read(self, reader: RingReader, path: Path) -> None:
        while not self._is_stopping.is_set() and self._target == path:
            # Before the poll: all that a dead engine has published is there for that poll.
            is_dead = not reader.is_alive()
            records = reader.poll()
            if records:
                self._read_records(records, reader)
            self._note_statistics(reader.statistics())
            self._round_s = time.monotonic()
            self.num_polls += 1
            if not records and is_dead and self._now.lag == 0:
                return
            if self._now.lag:
                continue
            pause_s = BUSY_PAUSE_S if records else IDLE_PAUSE_S
            # The first row says which probes there are: it is not left lying.
            if self.bank is None or self._is_wanted.wait(pause_s):
                self._is_wanted.clear()
                reader.wait(POLL_PAUSE_S)  # at shorter intervals

    def _note_statistics(self, now: ReaderStatistics) -> None:
        if now.lost > self._now.lost:
            self.lost_at_s = time.monotonic()
        self._now = now
        self._count_records()

    def _count_records(self) -> None:
        before, now = self._before, self._now
        delivered = before.delivered + now.delivered - self._unnamed
        self._records = (delivered, before.lost + now.lost + self._unnamed, now.lag)

    def _read_records(self, records: list[Record], reader: RingReader) -> None:
        named = [(record, bank) for record in records if (bank := self._find_bank(record, reader))]
        batches: list[RowBatch] = []
        for _, group in itertools.groupby(named, key=lambda pair: pair[1].version):
            pairs = list(group)
            batches += self._make_batches([record for record, _ in pairs], pairs[0][1])
        if batches:
            self._deliver(batches)
        is_first = self.bank is None
        for record, bank in named:
            self.bank = bank
            self._notify_observers(bank, record)
        if is_first and named:  # answers may wait for the names of the probes
            self._on_change()

    def _find_bank(self, record: Record, reader: RingReader) -> ring_messages.Bank | None:
        """The columns of a record; None, and the record counts as lost, if they are not known."""
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

    def _make_batches(self, records: list[Record], bank: ring_messages.Bank) -> list[RowBatch]:
        """The rows of our own requests, in order; all are converted at once."""
        rows = _join_rows(records)
        phases = rows["phase"].tolist()
        kept = [part for part in split_rows(rows) if self._is_kept(part, phases)]
        if not kept:
            return []
        positions, token_ids, spans = (rows[name].tolist() for name in _FIELDS)
        scores = _scores_of(records, [part for part in kept if not part.is_marks])
        flags = rows["flags"]
        has_media = bool((flags & ring_messages.MEDIA_MASK).any())
        media = ring_messages.media_of(flags).tolist() if has_media else []
        batches, done = [], 0
        for begin, end, stream, choice, is_marks in kept:
            first, done = done, done + (0 if is_marks else end - begin)
            batch = RowBatch(
                stream,
                choice,
                bank,
                positions[begin:end],
                token_ids[begin:end],
                phases[begin:end],
                spans[begin:end],
                scores[first:done],
                media[begin:end],
            )
            batches.append(batch)
        return batches

    def _is_kept(self, part: RowSpan, phases: list[int]) -> bool:
        wants_prompt = self.watched.get(part.stream)
        if wants_prompt is None:
            self._orphaned += part.end - part.begin
            return False
        self._rows += part.end - part.begin
        # Converting a long prompt that nobody asked about would take too long.
        needed = ring_messages.FINISHED if part.is_marks else ring_messages.DECODE
        return wants_prompt or needed in phases[part.begin : part.end]

    def _notify_observers(self, bank: ring_messages.Bank, record: Record) -> None:
        for observer in list(self._observers):
            try:
                observer.on_scores(bank, record.rows, record.scores_RC, record.stamp_ns)
            except Exception:
                _log.exception("%r failed and is removed", observer)
                self._observers.remove(observer)

    def _note_unattached(self, reason: str) -> None:
        is_news = reason != self.reason  # else it is in the log already
        if is_news and not self.is_engine_ending:
            _log.warning("the ring cannot be attached: %s", reason)
        self.reason = reason

    def _note_attached(self, welcome: ring_messages.Welcome) -> None:
        if welcome.epoch != self.epoch:
            self._num_engines += 1
            self.bank = None  # of an engine before
        self.epoch, self.model, self.is_attached = welcome.epoch, welcome.model, True
        self._on_change()

    def _note_detached(self, path: Path) -> None:
        now, before = self._now, self._before
        self._next_seq[path] = now.first + now.delivered + now.lost
        self._before = ReaderStatistics(
            0,
            before.delivered + now.delivered,
            before.lost + now.lost,
            before.torn + now.torn,
            0,
        )
        self._now = _NO_STATISTICS
        self._count_records()
        self.is_attached, self.reason = False, "the engine has closed its ring"
        self._on_change()


def _join_rows(records: list[Record]) -> NDArray[np.void]:
    """All rows; as bytes, because numpy compares the fields of every array that it joins."""
    if len(records) == 1:
        return records[0].rows
    raw = np.concatenate([record.rows.view(np.uint8) for record in records])
    return raw.view(ring_messages.ROW)


def _scores_of(records: list[Record], tokens: list[RowSpan]) -> list[Values]:
    """The scores of these spans of rows, one after the other."""
    indices = [at for part in tokens for at in range(part.begin, part.end)]
    if not indices:
        return []
    scores_RP = np.concatenate([record.scores_RC for record in records])
    return to_json_numbers(scores_RP if len(indices) == len(scores_RP) else scores_RP[indices])


def to_json_numbers(scores_RP: NDArray[np.float32]) -> list[Values]:
    """Numbers that JSON writes in at most nine digits and that read back as the same float32.

    None for NaN and infinity, which JSON does not have.
    """
    wide = scores_RP.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent = 8 - np.floor(np.log10(np.abs(wide)))
        scale = 10.0**exponent
        rounded = np.round(wide * scale) / scale
    is_exact = rounded.astype(np.float32) == scores_RP  # not for 0 and the very small
    numbers: list[Values] = np.where(is_exact, rounded, wide).tolist()
    if not np.isfinite(wide).all():
        numbers = [
            [v if v is not None and np.isfinite(v) else None for v in row] for row in numbers
        ]
    return numbers


class _EngineDescription(msgspec.Struct):
    epoch: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{1,16}\Z")]


class _RefusalError(msgspec.Struct):
    code: str | int | None = None


class _RefusalBody(msgspec.Struct):
    error: _RefusalError | None = None


class RingFinder:
    """Finds the ring of the very engine that upstream is.

    Several engines may share a runtime folder. Upstream's epoch says which one answers our
    requests; if upstream has no clairai routes, it is taken to be the newest. Upstream is only
    asked while the feed is not attached, because asking costs the engine a step.
    """

    def __init__(self, settings: ProxySettings, upstream: Upstream, feed: RingFeed) -> None:
        self._settings = settings
        self._upstream = upstream
        self._feed = feed
        self._folder: Path | None = None
        self._older: frozenset[Path] = frozenset()  # engines from before this proxy started
        self._takes_newest = False
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def find_folder(self) -> None:
        """RingError if the runtime folder cannot be used."""
        if self._settings.ring_socket is None:
            explicit = self._settings.runtime_dir
            self._folder = runtime_dir(None if explicit is None else str(explicit))
            self._older = frozenset(live_engine_sockets(self._folder))

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """Look now: the feed was attached or lost its ring."""
        self._has_news.set()

    async def _watch(self) -> None:
        pause_s = FIND_PAUSE_S
        while True:
            if not self._feed.is_attached or self._takes_newest:
                await self._find_target()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._has_news.wait()
            # An engine whose ring cannot be attached is asked again, less and less often.
            pause_s = (
                FIND_PAUSE_S if self._has_news.is_set() else min(2 * pause_s, MAX_FIND_PAUSE_S)
            )
            self._has_news.clear()

    async def _find_target(self) -> None:
        if self._folder is None:
            self._feed.set_target(self._settings.ring_socket)
            return
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                path = await self._find(self._folder)
        except (UpstreamGone, HttpRefusal, TimeoutError, aiohttp.ClientError):
            return  # it is starting, busy or gone: look again
        # No request of ours has rows from before this proxy started.
        self._feed.set_target(path, start="newest" if path in self._older else "oldest")

    async def _find(self, folder: Path) -> Path | None:
        async with self._upstream.ask("GET", "/v1/clairai") as response:
            body = await self._upstream.read_body(response)
            status = response.status
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UpstreamGone(f"/v1/clairai was answered with {status}")
        self._takes_newest = status != HTTPStatus.OK and not _is_without_taps(body)
        if self._takes_newest:
            found = await asyncio.to_thread(live_engine_sockets, folder)
            return found[0] if found else None
        if status != HTTPStatus.OK:
            return None
        description = decode_answer(body, _EngineDescription, what="/v1/clairai")
        return socket_path(folder, int(description.epoch, 16))


def _is_without_taps(body: bytes) -> bool:
    """True if our own route refused: an engine with clairai's routes and no ring."""
    try:
        error = msgspec.json.decode(body, type=_RefusalBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return error is not None and error.code == ConfigError.code
