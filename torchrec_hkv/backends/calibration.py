"""Times steps of lookups on this machine's device, as input for fitting cost constants."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrec_hkv.backends.constants import Constants, TimedStep, fit_constants
from torchrec_hkv.backends.specs import BackendOptions, OptimizerSpec, TableShard
from torchrec_hkv.backends.workload import IdFrequencies, StepTime, Work, Workload

if TYPE_CHECKING:
    from torchrec_hkv.backends.protocol import Backend

_WARM = 3
_STEPS = 9
#: Cycles for which a GPU is kept busy while the host launches the timed work.
_HIDING_CYCLES = 4_000_000
_FILL = 1 << 18


@dataclasses.dataclass(frozen=True)
class CalibrationBatch:
    """The shape of a batch.

    Attributes:
        bags: number of bags of one feature.
        ids_per_bag: ids in each bag.
        skew: ids are ``rows * u ** skew`` for uniform ``u``; 1 makes all ids equally frequent.
    """

    bags: int
    ids_per_bag: int
    skew: float = 1.0

    def draw_ids(self, rows: int, device: torch.device) -> Tensor:
        """Draws ids from ``[0, rows)``, int64 ``[bags * ids_per_bag]``."""
        count = self.bags * self.ids_per_bag
        unit = torch.rand(count, dtype=torch.float64, device=device)
        return (rows * unit**self.skew).long().clamp_(0, rows - 1)


@dataclasses.dataclass(frozen=True)
class CalibrationCase:
    """A table to time.

    Attributes:
        options: options of the table.
        rows: ids are drawn from ``[0, rows)``. If ``rows`` exceeds ``capacity``, ids are evicted
            and inserted again; otherwise all of them are in the table.
        capacity: ``num_embeddings`` of the table.
        dim: number of columns.
        optimizer: the optimizer that trains the table.
        batches: shapes of the batches to time.
        size: nominal bytes of the table. Cases of equal size are fitted together.
        tables: number of such tables in the group; each gets its own batch.
    """

    options: BackendOptions
    rows: int
    capacity: int
    dim: int
    optimizer: OptimizerSpec
    batches: tuple[CalibrationBatch, ...]
    size: float
    tables: int = 1


Step = Callable[[Tensor, Tensor, int], Tensor]

#: Bytes of the timed tables of rows: one that fits in a cache, and larger ones.
ROW_TABLES = {"cpu": (4 << 20, 64 << 20, 512 << 20), "cuda": (16 << 20, 512 << 20, 8 << 30)}
_DIMS = (16, 64, 128)


def row_tables(device_type: str) -> list[tuple[int, int, str]]:
    """The timed tables of rows, as (bytes, columns, name of the optimizer)."""
    sizes = ROW_TABLES[device_type]
    tables = [(size, dim, "rowwise_adagrad") for size in sizes for dim in _DIMS]
    return tables + [(size, 64, "adagrad") for size in sizes]


def rows_in(size: int, dim: int, optimizer: str) -> int:
    """Number of rows that take ``size`` bytes with their optimizer state."""
    return round(size / (4 * (dim + (1 if optimizer == "rowwise_adagrad" else dim))))


def row_batches(device_type: str) -> tuple[CalibrationBatch, ...]:
    """Shapes of the timed batches: few and many ids, short and long bags, skewed ids."""
    maximum = 8192 if device_type == "cpu" else 65536
    return (
        CalibrationBatch(1024, 1),
        CalibrationBatch(maximum, 1),
        CalibrationBatch(maximum // 8, 16),
        CalibrationBatch(maximum, 8),
        CalibrationBatch(maximum, 8, skew=4.0),
        CalibrationBatch(maximum // 8, 16, skew=8.0),
    )


def time_steps(
    step: Step, batch: CalibrationBatch, rows: int, device: torch.device, tables: int = 1
) -> tuple[StepTime, Workload]:
    """Times steps on new random batches.

    On a GPU the result is the median device time; a long kernel hides the launches of the host. On
    a CPU it is the minimum, which other processes disturb least: of processor time with one thread,
    otherwise of wall time.

    Args:
        step: the lookup, called with ids, offsets and number of bags. The backward of its output
            is timed too.
        batch: shape of the batches.
        rows: ids are drawn from ``[0, rows)``.
        device: device of the tables.
        tables: number of tables; each gets a batch of its own.

    Returns:
        The time of a step, and the mean work of a step on one table.
    """
    forward, backward, distinct = [], [], []
    for turn in range(_WARM + _STEPS):
        drawn = [batch.draw_ids(rows, device) for _ in range(tables)]
        ids = torch.cat(drawn)
        offsets = torch.arange(tables * batch.bags + 1, device=device) * batch.ids_per_bag
        clock = _clock(device)
        next(clock)
        output = step(ids, offsets, batch.bags)
        next(clock)
        output.backward(torch.ones_like(output))
        seconds = next(clock)
        if turn >= _WARM:
            forward.append(seconds.forward)
            backward.append(seconds.backward)
            distinct.append(statistics.mean(own.unique().numel() for own in drawn))
    load = Workload(
        ids=batch.bags * batch.ids_per_bag, distinct=statistics.mean(distinct), bags=batch.bags
    )
    typical = statistics.median if device.type == "cuda" else min
    return StepTime(typical(forward), typical(backward)), load


def _clock(device: torch.device) -> Iterator[StepTime]:
    """A stopwatch. Advance it before the forward, after the forward and after the backward. The
    third value is the time of the step."""
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


def calibrate(
    backend: Backend,
    cases: Sequence[CalibrationCase],
    device: torch.device,
    progress: Callable[[str], None],
) -> Constants | None:
    """The fitted constants of a backend on a device; None if there are no cases.

    Args:
        backend: the backend to time.
        cases: the tables to time.
        device: device of the tables.
        progress: called with a line of text before each table is timed.
    """
    samples: list[TimedStep] = []
    for case in cases:
        progress(f"{backend.name}: {case.rows:,} rows of {case.dim}, {case.optimizer.name}")
        samples += _samples(backend, case, device)
    return fit_constants(samples) if samples else None


def _samples(backend: Backend, case: CalibrationCase, device: torch.device) -> list[TimedStep]:
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
        time_taken, load = time_steps(step, batch, case.rows, device, case.tables)
        if case.rows > case.capacity:
            load = dataclasses.replace(load, frequencies=IdFrequencies(((case.rows, 1.0),)))
        work: Work = backend.work(shards[0], case.optimizer, load, device.type)
        samples.append(TimedStep(work.times(case.tables), time_taken, case.size))
    return samples


def _fill(step: Step, case: CalibrationCase, device: torch.device) -> None:
    """Looks up every id once, so that later steps insert none."""
    for first in range(0, case.rows, _FILL):
        ids = torch.arange(first, min(first + _FILL, case.rows), device=device)
        # Bags of one id: on a GPU, few threads would sum a long bag.
        count = case.tables * ids.numel()
        offsets = torch.arange(count + 1, device=device)
        output = step(ids.repeat(case.tables), offsets, ids.numel())
        output.backward(torch.zeros_like(output))
