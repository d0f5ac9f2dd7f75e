"""Times steps of lookups on the device that is there, so that constants can be fitted to them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrec_hkv.backends.constants import Constants, Sample, fit_constants
from torchrec_hkv.backends.specs import BackendOptions, OptimizerSpec, TableShard
from torchrec_hkv.backends.workload import IdFrequencies, StepTime, Work, Workload

if TYPE_CHECKING:
    from torchrec_hkv.backends.protocol import Backend

_WARM = 3
_STEPS = 9
#: Cycles that keep a GPU busy while the host issues what is timed.
_HIDING_CYCLES = 4_000_000
_FILL = 1 << 18


@dataclasses.dataclass(frozen=True)
class Batch:
    """A shape of batches.

    Attributes:
        bags: of one feature.
        ids_per_bag: of each.
        skew: ids are ``rows * u ** skew`` for uniform ``u``: 1 for ids that come alike.
    """

    bags: int
    ids_per_bag: int
    skew: float = 1.0

    def draw(self, rows: int, device: torch.device) -> Tensor:
        """Ids below ``rows``."""
        count = self.bags * self.ids_per_bag
        unit = torch.rand(count, dtype=torch.float64, device=device)
        return (rows * unit**self.skew).long().clamp_(0, rows - 1)


@dataclasses.dataclass(frozen=True)
class CalibrationCase:
    """A table that is timed.

    Attributes:
        options: of the backend.
        rows: ids it is asked for, 0 to ``rows - 1``. All are there, or where they are more than
            ``capacity``, come and go.
        capacity: ``num_embeddings``.
        dim: columns.
        optimizer: that trains it.
        batches: that are timed.
        size: bytes of tables of this size, by which constants are told apart; about the table's.
        tables: so many of them in a group, each asked for such batches.
    """

    options: BackendOptions
    rows: int
    capacity: int
    dim: int
    optimizer: OptimizerSpec
    batches: tuple[Batch, ...]
    size: float
    tables: int = 1


Step = Callable[[Tensor, Tensor, int], Tensor]

#: Bytes of tables of rows that are timed: one that is in a cache, and some that are not.
ROW_TABLES = {"cpu": (4 << 20, 64 << 20, 512 << 20), "cuda": (16 << 20, 512 << 20, 8 << 30)}
_DIMS = (16, 64, 128)


def row_tables(device_type: str) -> list[tuple[int, int, str]]:
    """Tables of rows that are timed, as bytes, columns and the optimizer's name."""
    sizes = ROW_TABLES[device_type]
    tables = [(size, dim, "rowwise_adagrad") for size in sizes for dim in _DIMS]
    return tables + [(size, 64, "adagrad") for size in sizes]


def rows_in(size: int, dim: int, optimizer: str) -> int:
    """Rows of so many bytes with their optimizer's state."""
    return round(size / (4 * (dim + (1 if optimizer == "rowwise_adagrad" else dim))))


def row_batches(device_type: str) -> tuple[Batch, ...]:
    """Shapes of batches that are timed: few and many ids, short and long bags, hot ids."""
    most = 8192 if device_type == "cpu" else 65536
    return (
        Batch(1024, 1),
        Batch(most, 1),
        Batch(most // 8, 16),
        Batch(most, 8),
        Batch(most, 8, skew=4.0),
        Batch(most // 8, 16, skew=8.0),
    )


def timed(
    step: Step, batch: Batch, rows: int, device: torch.device, tables: int = 1
) -> tuple[StepTime, Workload]:
    """Times of steps on batches that are drawn anew, and what they ask of a table on average.

    On a GPU the medians of the device's time: what the host does in between is hidden behind other
    work. On a CPU the least times, with one thread of processor time, which a machine with other
    work disturbs less.

    Args:
        step: a lookup, of ids, offsets and bags; its output's backward is the step's.
        batch: what is drawn.
        rows: ids there are.
        device: of the tables.
        tables: that each get such a batch.
    """
    forward, backward, distinct = [], [], []
    for turn in range(_WARM + _STEPS):
        drawn = [batch.draw(rows, device) for _ in range(tables)]
        ids = torch.cat(drawn)
        offsets = torch.arange(tables * batch.bags + 1, device=device) * batch.ids_per_bag
        clock = _clock(device)
        next(clock)
        output = step(ids, offsets, batch.bags)
        next(clock)
        output.backward(torch.ones_like(output))
        took = next(clock)
        if turn >= _WARM:
            forward.append(took.forward)
            backward.append(took.backward)
            distinct.append(statistics.mean(own.unique().numel() for own in drawn))
    load = Workload(
        ids=batch.bags * batch.ids_per_bag, distinct=statistics.mean(distinct), bags=batch.bags
    )
    typical = statistics.median if device.type == "cuda" else min
    return StepTime(typical(forward), typical(backward)), load


def _clock(device: torch.device) -> Iterator[StepTime]:
    """Asked three times: before the forward, after it, after the backward; then it tells."""
    unknown = StepTime(0.0, 0.0)
    if device.type != "cuda":
        now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        marks = []
        for _ in range(2):
            marks.append(now())
            yield unknown
        marks.append(now())
        yield StepTime(1e3 * (marks[1] - marks[0]), 1e3 * (marks[2] - marks[1]))
        return
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_HIDING_CYCLES)
    for event in events[:2]:
        event.record()
        yield unknown
    events[2].record()
    events[2].synchronize()
    yield StepTime(events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2]))


def calibrated(
    backend: Backend,
    cases: Sequence[CalibrationCase],
    device: torch.device,
    progress: Callable[[str], None],
) -> Constants | None:
    """The constants of a backend on a device; None where it names no cases.

    Args:
        backend: what is timed.
        cases: its tables.
        device: where they live.
        progress: is told of each table before it is timed.
    """
    samples: list[Sample] = []
    for case in cases:
        progress(f"{backend.name}: {case.rows:,} rows of {case.dim}, {case.optimizer.name}")
        samples += _samples(backend, case, device)
    return fit_constants(samples) if samples else None


def _samples(backend: Backend, case: CalibrationCase, device: torch.device) -> list[Sample]:
    shards = [
        TableShard(
            name=f"calibration_{number}",
            capacity=case.capacity,
            dim=case.dim,
            num_embeddings=case.capacity,
            embedding_dim=case.dim,
            row_offset=0,
            column_offset=0,
            dtype=torch.float32,
            pooling="sum",
            init_range=(-0.01, 0.01),
            options=case.options,
        )
        for number in range(case.tables)
    ]
    features = list(range(case.tables))
    lookup = backend.create_lookup(shards, features, case.optimizer, device).train()
    learning_rate = torch.tensor(1e-6, device=device)

    def step(ids: Tensor, offsets: Tensor, bags: int) -> Tensor:
        return lookup(ids, offsets, None, bags, learning_rate)

    if backend.routing == "hashed":
        _fill(step, case, device)
    samples = []
    for batch in case.batches:
        time_taken, load = timed(step, batch, case.rows, device, case.tables)
        if case.rows > case.capacity:
            load = dataclasses.replace(load, frequencies=IdFrequencies(((case.rows, 1.0),)))
        work: Work = backend.work(shards[0], case.optimizer, load, device.type)
        samples.append(Sample(work.times(case.tables), time_taken, case.size))
    return samples


def _fill(step: Step, case: CalibrationCase, device: torch.device) -> None:
    """Asks for every id once, so that none is new later."""
    for first in range(0, case.rows, _FILL):
        ids = torch.arange(first, min(first + _FILL, case.rows), device=device)
        # Bags of one: a long bag would be summed by few threads of a GPU.
        count = case.tables * ids.numel()
        offsets = torch.arange(count + 1, device=device)
        output = step(ids.repeat(case.tables), offsets, ids.numel())
        output.backward(torch.zeros_like(output))
