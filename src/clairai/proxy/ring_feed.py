"""Reads the rings of the engine behind the proxy, and hands their rows to the event loop.

`RingFeed` is a thread that reads one ring. It converts rows of the proxy's own requests to plain
lists; rows of other requests are counted and shown to the observers only. `EngineFeed` has one of
them for each engine core: an engine with `--data-parallel-size` has several, and all rows of an
answer come from one of them. `RingFinder` is a task on the event loop that finds the rings.

R = rows of a record, P = probes of its bank
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from clairai.proxy.observe.observer import CoreRingCounts, Observer, RingCounts
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
MAX_CORES: Final = 1024
_NO_STATISTICS: Final = ReaderStatistics(0, 0, 0, 0, 0)
_FIELDS: Final = ("position", "token_id", "span")
_log: Final = logging.getLogger(__name__)

Deliver = Callable[[list[RowBatch]], None]
RingTargets = Mapping[Path, StartAt]  # sockets in the order of the cores, and where to begin


class RingFeed:
    """The thread that reads one ring; it calls `deliver` and `on_change`.

    `set_target` says which engine core's socket to read. The feed attaches to it, and again
    whenever the connection is lost. Feeds that share observers share `observing` too: an observer
    is called by one thread at a time.
    """

    def __init__(
        self,
        *,
        deliver: Deliver,
        on_change: Callable[[], None],
        observers: Sequence[Observer],
        watched: dict[int, bool] | None = None,
        observing: threading.Lock | None = None,
    ) -> None:
        # Our streams, and whether rows of their prompts are wanted; set before a row can arrive.
        self.watched: dict[int, bool] = {} if watched is None else watched
        self._observing = observing or threading.Lock()
        self.is_attached = False
        self.epoch: int | None = None
        self.reason = "no engine was found yet"
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

    def counts(self) -> RingCounts:
        delivered, lost, lag = self._records
        return RingCounts(
            attached=self.is_attached,
            restarts=max(0, self._num_engines - 1),
            records_delivered=delivered,
            records_lost=lost,
            lag=lag,
            rows=self._rows,
            orphaned=self._orphaned,
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
                with self._observing:
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
        self.epoch, self.is_attached = welcome.epoch, True
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


class EngineFeed:
    """All rings of the engine behind the proxy: one for each engine core, each with its thread."""

    def __init__(
        self, *, deliver: Deliver, on_change: Callable[[], None], observers: Sequence[Observer]
    ) -> None:
        self.watched: dict[int, bool] = {}  # see RingFeed
        # True while the rings of all engine cores are read. Kept, because it is asked for every
        # token.
        self.is_attached = False
        self._noting, self._on_change = threading.Lock(), on_change
        self.on_targets: Callable[[RingTargets], None] | None = None
        self._make_ring = functools.partial(
            RingFeed,
            deliver=deliver,
            on_change=self._note_change,
            observers=observers,
            watched=self.watched,
            observing=threading.Lock(),
        )
        # By the number of the engine core. Those of cores that an engine had, and its successor
        # has not, stay for their counts.
        self._rings = [self._make_ring()]
        self.rings = tuple(self._rings)  # of the cores that there are; one until some are found
        self._targets: RingTargets = {}
        self._is_started = False
        self._lost_elsewhere_s: float | None = None
        self._is_engine_ending = False

    def _note_change(self) -> None:
        """From any of the threads, when its ring was attached or lost."""
        self._find_attached()
        self._on_change()

    def _find_attached(self) -> None:
        with self._noting:  # what is found last is written last
            self.is_attached = all(ring.is_attached for ring in self.rings)

    def start(self) -> None:
        self._is_started = True
        for ring in self._rings:
            ring.start()

    def stop(self) -> None:
        """End the threads; blocks for a moment."""
        for ring in self._rings:
            ring.stop()

    def hurry(self) -> None:
        """Read now: see RingFeed.hurry."""
        for ring in self.rings:
            ring.hurry()

    def set_targets(self, targets: RingTargets) -> None:
        """Read these sockets, in the order of the engine cores."""
        if list(targets) == list(self._targets):
            return
        while len(self._rings) < len(targets):
            ring = self._make_ring()
            ring.is_engine_ending = self._is_engine_ending
            self._rings.append(ring)
            if self._is_started:
                ring.start()
        self._targets = dict(targets)
        self.rings = tuple(self._rings[: max(1, len(targets))])
        self._find_attached()
        paths: list[Path | None] = [*targets, *[None] * (len(self._rings) - len(targets))]
        for ring, path in zip(self._rings, paths, strict=True):
            ring.set_target(path, start="oldest" if path is None else targets[path])
        if self.on_targets is not None:
            self.on_targets(self._targets)

    @property
    def is_stalled(self) -> bool:
        return any(ring.is_stalled for ring in self.rings)

    @property
    def epochs(self) -> tuple[int | None, ...]:
        return tuple(ring.epoch for ring in self.rings)

    @property
    def num_polls(self) -> int:
        """As many as each of the threads has made."""
        return min(ring.num_polls for ring in self.rings)

    @property
    def bank(self) -> ring_messages.Bank | None:
        """Of the newest record; a change reaches the engine cores one after the other."""
        if len(self.rings) == 1:
            return self.rings[0].bank
        banks = [ring.bank for ring in self.rings if ring.bank is not None]
        return max(banks, key=lambda bank: bank.version, default=None)

    @property
    def lost_at_s(self) -> float | None:
        """When a lost record was last noticed, here or in another process of the proxy."""
        times = [self._lost_elsewhere_s, *(ring.lost_at_s for ring in self.rings)]
        return max((one for one in times if one is not None), default=None)

    def note_loss_elsewhere(self) -> None:
        self._lost_elsewhere_s = time.monotonic()

    @property
    def is_engine_ending(self) -> bool:
        return self._is_engine_ending

    @is_engine_ending.setter
    def is_engine_ending(self, is_ending: bool) -> None:
        self._is_engine_ending = is_ending
        for ring in self._rings:
            ring.is_engine_ending = is_ending

    def name_cores(self, is_meant: Callable[[RingFeed], bool]) -> str:
        """`the engine` if it has one core, else the cores that are meant."""
        rings = self.rings
        if len(rings) == 1:
            return "the engine"
        numbers = [str(number) for number, ring in enumerate(rings) if is_meant(ring)]
        return f"engine core {', '.join(numbers)}"

    def counts(self, mismatched: int) -> RingCounts:
        found = [ring.counts() for ring in self._rings]
        served = [ring.counts() for ring in self.rings]
        return RingCounts(
            attached=self.is_attached,
            restarts=max(one.restarts for one in found),
            records_delivered=sum(one.records_delivered for one in found),
            records_lost=sum(one.records_lost for one in found),
            lag=sum(one.lag for one in found),
            rows=sum(one.rows for one in found),
            orphaned=sum(one.orphaned for one in found),
            mismatched=mismatched,
            cores=tuple(
                CoreRingCounts(
                    one.attached, one.records_delivered, one.records_lost, one.lag, one.rows
                )
                for one in served
            )
            if len(served) > 1
            else (),
        )


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


_Epoch = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{1,16}\Z")]


class _CoreDescription(msgspec.Struct):
    epoch: _Epoch


class _EngineDescription(msgspec.Struct):
    epoch: _Epoch
    cores: Annotated[list[_CoreDescription], msgspec.Meta(max_length=MAX_CORES)] = []

    def list_epochs(self) -> list[int]:
        """Of each engine core; an engine that names no cores has one."""
        texts = [core.epoch for core in self.cores] or [self.epoch]
        return [int(text, 16) for text in texts]


class _RefusalError(msgspec.Struct):
    code: str | int | None = None


class _RefusalBody(msgspec.Struct):
    error: _RefusalError | None = None


class RingFinder:
    """Finds the rings of the very engine that upstream is.

    Several engines may share a runtime folder. Upstream's epochs say which one answers our
    requests; if upstream has no clairai routes, it is taken to be the newest. Upstream is only
    asked while the feed is not attached, because asking costs the engine a step.
    """

    def __init__(self, settings: ProxySettings, upstream: Upstream, feed: EngineFeed) -> None:
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
            assert self._settings.ring_socket is not None
            self._feed.set_targets({self._settings.ring_socket: "oldest"})
            return
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                paths = await self._find(self._folder)
        except (UpstreamGone, HttpRefusal, TimeoutError, aiohttp.ClientError):
            return  # it is starting, busy or gone: look again
        # No request of ours has rows from before this proxy started.
        self._feed.set_targets(
            {path: "newest" if path in self._older else "oldest" for path in paths}
        )

    async def _find(self, folder: Path) -> list[Path]:
        async with self._upstream.ask("GET", "/v1/clairai") as response:
            body = await self._upstream.read_body(response)
            status = response.status
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UpstreamGone(f"/v1/clairai was answered with {status}")
        self._takes_newest = status != HTTPStatus.OK and not _is_without_taps(body)
        if self._takes_newest:
            found = await asyncio.to_thread(live_engine_sockets, folder)
            return found[:1]
        if status != HTTPStatus.OK:
            return []
        description = decode_answer(body, _EngineDescription, what="/v1/clairai")
        return [socket_path(folder, epoch) for epoch in description.list_epochs()]


def _is_without_taps(body: bytes) -> bool:
    """True if our own route refused: an engine with clairai's routes and no ring."""
    try:
        error = msgspec.json.decode(body, type=_RefusalBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return error is not None and error.code == ConfigError.code
