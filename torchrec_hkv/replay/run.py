"""Replays a log through tables of several policies and sizes at once."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv.hash_table import table_memory
from torchrec_hkv.replay.counting import FrequentIds, IdCounter, frequencies
from torchrec_hkv.replay.log import Log, LogError, Part
from torchrec_hkv.replay.policy import Policy
from torchrec_hkv.replay.result import Curve, Point, Replayed
from torchrec_hkv.replay.sample import Sample
from torchrec_hkv.replay.step_splitter import StepSplitter
from torchrec_hkv.replay.steps import Steps
from torchrec_hkv.replay.tables import (
    CountedIds,
    ReplayCounts,
    ReplayedTables,
    ReplaySetting,
    slots_share,
    work_of,
)
from torchrec_hkv.replay.windows import corrected, uncrowded

#: Smallest number of rows of a sampled table. With fewer rows, the error of some samples exceeds
#: 0.005 (docs/guide/replay.md).
MIN_SAMPLED_ROWS = 2000
#: Groups of tables for each thread.
_PARTS = 2


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
            if not sampled.is_all and sample * rows < MIN_SAMPLED_ROWS:
                minimum = MIN_SAMPLED_ROWS / rows
                raise ValueError(
                    f"Table {name!r}: a sample of {sample:g} leaves {sample * rows:.0f} of "
                    f"{rows:,} rows, but must leave {MIN_SAMPLED_ROWS}: replay a larger sample"
                    + (f", at least {minimum:.2g}." if minimum < 1 else ", or all ids.")
                )
    before = torch.get_num_threads()
    workers = threads or before
    try:
        running = [
            _Running(name, table, sampled, batch_size, workers, 1 / len(tables))
            for name, table in tables.items()
        ]
        # Separate tables use threads of their own, because torch's threads wait for each other in
        # each call.
        torch.set_num_threads(1)
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            samples = 0
            columns = list(dict.fromkeys(c for table in tables.values() for c in table.columns))
            steps: list[Steps] = []
            for part in _read_ahead(log.parts(columns)):
                steps = _next_steps(pool, running, part, steps)
                samples += part.num_samples
                if progress is not None:
                    progress(samples)
            last = [one.splitter.last() for one in running]
            for each in (steps, last):
                _next_steps(pool, running, None, each)
    finally:
        torch.set_num_threads(before)
    return {one.name: one.result() for one in running}


def _next_steps(
    pool: ThreadPoolExecutor, running: Sequence[_Running], part: Part | None, steps: list[Steps]
) -> list[Steps]:
    """Replays steps, and meanwhile divides the next part of the log into steps; returns those."""
    tasks: list[tuple[float, Callable[..., Any], Part | Steps]] = [
        (seeing.work, seeing.update, of_table)
        for one, of_table in zip(running, steps, strict=False)
        for seeing in one.seeing
    ]
    if part is not None:
        tasks += [(one.splitter.work, one.splitter.steps, part) for one in running]
    # The longest come first, so that the threads end at about the same time.
    tasks.sort(key=lambda task: -task[0])
    results = [pool.submit(run, argument) for _, run, argument in tasks]
    steps_by_run = {
        run: future.result() for (_, run, _), future in zip(tasks, results, strict=True)
    }
    return [] if part is None else [steps_by_run[one.splitter.steps] for one in running]


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
        self.splitter = StepSplitter(table.columns, sample, batch_size, keeps_all_ids=ages)
        self.counted = CountedIds(IdCounter(name, share / 2), sample)
        self._tried = sorted(set(table.rows))
        if not sample.is_all and len(self._tried) == 1:
            self._tried.append(2 * self._tried[0])  # for the slope of the curve (`uncrowded`)
        settings = [
            ReplaySetting(policy, rows) for policy in table.policies for rows in self._tried
        ]
        groups = _divided(settings, sample, min(_PARTS * workers, len(settings)))
        self.tables = [
            ReplayedTables(name, group, sample, batch_size, share / 2 / len(groups))
            for group in groups
        ]
        self.frequent = None if sample.is_all else FrequentIds()
        #: The objects that process the steps, independently of each other.
        self.seeing: list[ReplayedTables | CountedIds | FrequentIds] = [self.counted, *self.tables]
        if self.frequent is not None:
            self.seeing.append(self.frequent)

    def result(self) -> Replayed:
        counter, lookups = self.counted.counter, self.splitter.lookups
        counter.check()
        if self.splitter.bounds is None:
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
        id_frequencies = frequencies(
            counter, self._sample, self.frequent, lookups, self.splitter.bounds
        )
        return Replayed(
            name=self.name,
            lookups=lookups,
            distinct=id_frequencies.num_ids,
            unlimited_hit_rate=self._hit_rate(self.counted.misses)[0],
            frequencies=id_frequencies,
            curves=tuple(
                Curve(policy, self._points(policy, counts)) for policy in self._table.policies
            ),
        )

    def _points(
        self, policy: Policy, counts: Mapping[ReplaySetting, ReplayCounts]
    ) -> tuple[Point, ...]:
        """The curve of one policy."""
        settings = [ReplaySetting(policy, rows) for rows in self._tried]
        points = [self._point(setting, counts[setting]) for setting in settings]
        if self.splitter.windows is not None:
            rows = [point.rows for point in points]
            slots = [slots_share(setting, self._sample) for setting in settings]
            rates = uncrowded(
                [point.hit_rate for point in points], rows, slots, self.splitter.windows
            )
            points = [
                dataclasses.replace(point, hit_rate=rate)
                for point, rate in zip(points, rates, strict=True)
            ]
        return tuple(point for point in points if point.rows in self._table.rows)

    def _hit_rate(self, misses: Tensor) -> tuple[float, float]:
        """The hit rate and its standard error."""
        lookups, error = self.splitter.lookups, 0.0
        if self.splitter.windows is None:
            missed = int(misses.sum()) / lookups
        else:
            missed, error = corrected(misses, self.splitter.windows, lookups)
        return min(max(1.0 - missed, 0.0), 1.0), error

    def _point(self, setting: ReplaySetting, counts: ReplayCounts) -> Point:
        counters, rate = counts.counters, self._sample.rate
        placed = counts.distinct_placed
        if placed is None:
            placed = self.counted.counter.distinct
        scaled = {key: round(value / rate) for key, value in counters.items()}
        if self._sample.is_all:
            misses = torch.tensor([counters["lookups"] - counters["hits"]])
        else:
            misses = counts.misses_by_group
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


def _divided(
    settings: Sequence[ReplaySetting], sample: Sample, parts: int
) -> list[list[ReplaySetting]]:
    """Divides settings into groups of about equal work."""
    groups: list[list[ReplaySetting]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for setting in sorted(settings, key=lambda one: -work_of(one, sample)):
        minimum = loads.index(min(loads))
        groups[minimum].append(setting)
        loads[minimum] += work_of(setting, sample)
    return groups


def _read_ahead(parts: Iterator[Part], depth: int = 2) -> Iterator[Part]:
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
