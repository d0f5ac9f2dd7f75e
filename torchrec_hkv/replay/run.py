"""Replays a log through tables of several policies and sizes at once."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from torchrec_hkv.hash_table import table_memory
from torchrec_hkv.replay.counting import IdCounter, frequencies
from torchrec_hkv.replay.feed import Feed, Steps
from torchrec_hkv.replay.log import Log, LogError, Part
from torchrec_hkv.replay.policy import Policy
from torchrec_hkv.replay.result import Curve, Point, Replayed
from torchrec_hkv.replay.sample import Sample
from torchrec_hkv.replay.tables import CountedIds, Counts, ReplayedTables, Setting
from torchrec_hkv.replay.windows import corrected, uncrowded

#: Smallest number of rows of a sampled table. With fewer rows, hit rates are off by more than .005
#: (docs/guide/replay.md).
LEAST_SAMPLED_ROWS = 500
#: Work of counting an id, relative to replaying it in one table.
_COUNTING = 1.5


@dataclasses.dataclass(frozen=True)
class TableSettings:
    """A table to replay.

    Attributes:
        columns: columns of the log whose ids the table looks up.
        rows: numbers of rows to try.
        policies: policies to try.
        dim: columns of a row.
        state_width: float32 values of optimizer state of a row.
        element_bytes: bytes of a value of a row.
    """

    columns: tuple[str, ...]
    rows: tuple[int, ...]
    policies: tuple[Policy, ...]
    dim: int = 64
    state_width: int = 0
    element_bytes: int = 4


def replay(
    log: Log,
    tables: Mapping[str, TableSettings],
    *,
    sample: float = 1.0,
    batch_size: int = 8192,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Replayed]:
    """Replays a log.

    Each step of the log is one training lookup of each table, by the same kernels as in training.

    Args:
        log: samples in order of time.
        tables: tables to replay, by name.
        sample: share of the ids to replay, with all their lookups, in tables with this share of the
            rows.
        batch_size: samples in a step, over all ranks.
        threads: number of threads. None: torch's.
        progress: called with the number of samples so far.

    Raises:
        ValueError: the log is damaged or empty, a table would be too small, or there is too little
            memory.
    """
    log.check([column for table in tables.values() for column in table.columns])
    sampled = Sample(sample)
    for name, table in tables.items():
        for rows in table.rows:
            if not sampled.is_all and sample * rows < LEAST_SAMPLED_ROWS:
                least = LEAST_SAMPLED_ROWS / rows
                raise ValueError(
                    f"Table {name!r}: a sample of {sample:g} leaves {sample * rows:.0f} of "
                    f"{rows:,} rows, but must leave {LEAST_SAMPLED_ROWS}: replay a larger sample"
                    + (f", at least {least:.2g}." if least < 1 else ", or all ids.")
                )
    before = torch.get_num_threads()
    workers = threads or before
    try:
        running = [
            _Running(name, table, sampled, batch_size, workers, 1 / len(tables))
            for name, table in tables.items()
        ]
        lanes = _lanes(running, workers)
        # Separate tables use threads of their own, because torch's threads wait for each other in
        # each call.
        torch.set_num_threads(1)
        with ThreadPoolExecutor(len(lanes)) as pool:
            samples = 0
            columns = list(dict.fromkeys(c for table in tables.values() for c in table.columns))
            for part in _ahead(log.parts(columns)):
                _replay_part(pool, lanes, [one.feed.steps(part) for one in running])
                samples += part.num_samples
                if progress is not None:
                    progress(samples)
            _replay_part(pool, lanes, [one.feed.last() for one in running])
    finally:
        torch.set_num_threads(before)
    return {one.name: one.result() for one in running}


def _replay_part(
    pool: ThreadPoolExecutor, lanes: list[list[tuple[int, _Seeing]]], steps: list[Steps]
) -> None:
    futures = [pool.submit(_run, lane, steps) for lane in lanes]
    for future in futures:
        future.result()


_Seeing = ReplayedTables | CountedIds


def _run(lane: list[tuple[int, _Seeing]], steps: list[Steps]) -> None:
    torch.set_num_threads(1)
    for table, seeing in lane:
        seeing.see(steps[table])


class _Running:
    """A table that is being replayed."""

    def __init__(
        self,
        name: str,
        table: TableSettings,
        sample: Sample,
        batch_size: int,
        workers: int,
        share: float,
    ) -> None:
        self.name, self._table, self._sample = name, table, sample
        ages = any(policy.ages for policy in table.policies)
        self.feed = Feed(table.columns, sample, batch_size, keeps_whole=ages)
        self.counted = CountedIds(IdCounter(name, share / 2), sample)
        settings = [Setting(policy, rows) for policy in table.policies for rows in table.rows]
        parts = min(workers, len(settings))
        self.tables = [
            ReplayedTables(name, settings[at::parts], sample, batch_size, share / 2 / parts)
            for at in range(parts)
        ]

    def result(self) -> Replayed:
        counter, lookups = self.counted.counter, self.feed.lookups
        counter.check()
        if self.feed.bounds is None:
            raise LogError(f"Table {self.name!r}: the log has no ids in its columns.")
        if counter.distinct == 0:
            raise LogError(
                f"Table {self.name!r}: none of its ids is in a sample of {self._sample.rate:g}."
            )
        counts = {
            setting: counted
            for tables in self.tables
            for setting, counted in zip(tables.settings, tables.counts(), strict=True)
        }
        seen = frequencies(counter, self._sample, self.feed.frequent, lookups, self.feed.bounds)
        return Replayed(
            name=self.name,
            lookups=lookups,
            distinct=seen.num_ids,
            unlimited_hit_rate=self._hit_rate(self.counted.misses)[0],
            frequencies=seen,
            curves=tuple(
                Curve(
                    policy,
                    self._points(
                        [
                            (setting, counts[setting])
                            for setting in (
                                Setting(policy, rows) for rows in sorted(set(self._table.rows))
                            )
                        ]
                    ),
                )
                for policy in self._table.policies
            ),
        )

    def _points(self, counted: Sequence[tuple[Setting, Counts]]) -> tuple[Point, ...]:
        """The curve of one policy."""
        points = [self._point(setting, counts) for setting, counts in counted]
        if self.feed.windows is not None:
            rows = [point.rows for point in points]
            rates = uncrowded([point.hit_rate for point in points], rows, self.feed.windows)
            points = [
                dataclasses.replace(point, hit_rate=rate)
                for point, rate in zip(points, rates, strict=True)
            ]
        return tuple(points)

    def _hit_rate(self, misses: Tensor) -> tuple[float, float]:
        """The hit rate and its standard error."""
        lookups, error = self.feed.lookups, 0.0
        if self.feed.windows is None:
            missed = int(misses.sum()) / lookups
        else:
            missed, error = corrected(misses, self.feed.windows, lookups)
        return min(max(1.0 - missed, 0.0), 1.0), error

    def _point(self, setting: Setting, counts: Counts) -> Point:
        counters, rate = counts.counters, self._sample.rate
        placed = counts.distinct_placed
        if placed is None:
            placed = self.counted.counter.distinct
        scaled = {key: round(value / rate) for key, value in counters.items()}
        if self._sample.is_all:
            misses = torch.tensor([counters["lookups"] - counters["hits"]])
        else:
            misses = counts.misses_of_groups
        hit_rate, error = self._hit_rate(misses)
        memory = table_memory(
            setting.rows,
            self._table.dim,
            self._table.state_width,
            setting.policy.eviction,
            self._table.element_bytes,
            setting.policy.rule.admission(setting.rows),
        )
        return Point(
            rows=setting.rows,
            hit_rate=hit_rate,
            error=2 * error,
            evicted=scaled["evicted"],
            returned=round(max(counters["inserted"] - placed, 0) / rate),
            refused=scaled["refused"],
            unadmitted=scaled["unadmitted"],
            expired=scaled["expired"],
            size=scaled["size"],
            bytes=memory.bytes,
        )


def _lanes(running: Sequence[_Running], workers: int) -> list[list[tuple[int, _Seeing]]]:
    """Divides tables among threads by their work."""
    work: list[tuple[float, int, _Seeing]] = []
    for at, one in enumerate(running):
        work.append((_COUNTING, at, one.counted))
        work += [(float(len(tables.settings)), at, tables) for tables in one.tables]
    loads = [0.0] * min(workers, len(work))
    lanes: list[list[tuple[int, _Seeing]]] = [[] for _ in loads]
    for load, at, seeing in sorted(work, key=lambda item: -item[0]):
        lane = loads.index(min(loads))
        loads[lane] += load
        lanes[lane].append((at, seeing))
    return lanes


def _ahead(parts: Iterator[Part], depth: int = 2) -> Iterator[Part]:
    """Reads parts in a thread while earlier parts are replayed."""
    ready: queue.Queue[Part | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Part | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        try:
            for part in parts:
                if not put(part):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
