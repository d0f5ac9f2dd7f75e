"""Training steps over many shapes: ratios of a ``TableGroup`` to FBGEMM's static tables.

    python -m benchmarks matrix --out benchmarks/results/matrix.csv \\
        --plot docs/performance/matrix.svg
    python -m benchmarks matrix --sections dim dtype
    python -m benchmarks matrix --device cpu --out benchmarks/results/matrix_cpu.csv
    python -m benchmarks matrix --device cpu --sections lfu --dims 4x8 4x32 --skews 1.2
    python -m benchmarks matrix --random 500 --seed 1 --out benchmarks/results/matrix_random.csv

``--random`` measures random shapes instead of the sections.

Each cell is one shape: columns of the tables, distribution of ids, dtype of rows, eviction policy,
and optimizer. Both sides run in one process on the same batches, eager, 20 steps back to back. A
step finds or inserts ids, pools their rows, and updates them in the backward. The group gets 64-bit
hashes as ids, FBGEMM's tables row numbers. The tables already hold all ids, at a load factor of .8,
except in section ``evicting``, whose tables have room for 70 % of the ids. ``ratio`` is the group's
time divided by FBGEMM's, ``find_ms`` the time of the lookup of ids alone, and ``find_ratio`` this
time divided by that of an LRU table for the same batches.

On a CPU the cells are smaller, and the two sides take turns step by step, on the same threads.
Times are minima over 15 steps, which other load affects least: wall time, and in
columns with ``cpu`` the processor time of all threads. The operating system updates the processor
time of running threads only occasionally, so it is not accurate for short steps. On a CPU, FBGEMM
has no Adam, and no bf16 rows, so bf16 rows are compared with its fp16 rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed
from benchmarks.matrix_cells import CPU_OPTIMIZERS, DTYPES, OPTIMIZERS, Cell, draw, sections
from benchmarks.matrix_plot import plot
from benchmarks.matrix_random import random_cells
from benchmarks.timing import steps_ms
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform

LEARNING_RATE = 0.01
LOAD = 0.8
STEPS = 20
EVICTING_BATCHES = 24
ROUNDS = 3
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = (
    "section", "dims", "skew", "batch", "bag", "rows", "dtype", "policy", "optimizer", "reduction",
)  # fmt: skip


class HashTables:
    """The group's side.

    Args:
        cell: the shape.
        device: device of the tables.
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        capacity = int(cell.rows * cell.room / (LOAD if cell.room == 1 else 1))
        specs = [
            TableSpec(
                f"t{t}",
                capacity,
                dim,
                eviction=cell.policy,
                initializer=Uniform(-0.05, 0.05),
                dtype=DTYPES[cell.dtype],
            )
            for t, dim in enumerate(cell.dims)
        ]
        tables = len(cell.dims)
        self.cell = cell
        self.group = TableGroup(
            specs, list(range(tables)), OPTIMIZERS[cell.optimizer][0], device=device
        )
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self.learning_rate = torch.full((), LEARNING_RATE, device=device)
        for part in hashed(torch.arange(cell.rows, device=device)).split(1 << 17):
            ends = torch.arange(tables + 1, device=device) * len(part)
            self.group.find_or_insert(part.repeat(tables), ends, 1)
        counted = self.group.counters()
        if cell.room == 1 and any(table["size"] != cell.rows for table in counted):
            raise RuntimeError("a table has no room for an id; LOAD must be lower.")

    def find(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns slots."""
        return self.group.find_or_insert(ids, offsets, self.cell.batch)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Returns pooled rows."""
        pin = self.group.pin()
        slots = self.group.find_or_insert(ids, offsets, self.cell.batch, pin)
        mean = self.cell.reduction == "mean"
        return self.group.pooled_lookup(
            self.anchor,
            ids,
            offsets,
            weights,
            slots,
            self.cell.batch,
            mean,
            pin,
            self.learning_rate,
        )


def make_fbgemm(cell: Cell, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Creates FBGEMM's side with fp32 outputs: fp16 rows for 16 bits, fp32 rows for int8."""
    narrow = cell.dtype in ("fp16", "bf16")
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    if device.type == "cpu":
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(cell.rows, dim, *place) for dim in cell.dims],
        optimizer=OPTIMIZERS[cell.optimizer][1],
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        weights_precision=SparseType.FP16 if narrow else SparseType.FP32,
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.MEAN if cell.reduction == "mean" else PoolingMode.SUM,
        device=device,
    )
    tables.init_embedding_weights_uniform(-0.05, 0.05)
    return tables


def milliseconds(step: Callable[[int], object]) -> float:
    """Returns milliseconds per step of back-to-back steps."""

    def timed(steps: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for at in range(steps):
            step(at)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / steps

    timed(4)  # warms up the hints, which depend on the repetitions of ids in the last steps
    return statistics.median(timed(STEPS) for _ in range(ROUNDS))


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of both sides, which the steps use in turn."""

    numbers: list[Tensor]
    ids: list[Tensor]
    offsets: Tensor
    weights: Tensor | None
    grad: Tensor

    @property
    def number(self) -> int:
        """Returns the number of batches."""
        return len(self.numbers)

    @staticmethod
    def of(cell: Cell, device: torch.device) -> Batches:
        """Draws the batches of a cell."""
        # With fewer batches, tables that evict would soon hold all ids.
        number = 4 if cell.room == 1 else EVICTING_BATCHES
        numbers = [draw(cell, cell.rows, device) for _ in range(number)]
        weights = torch.rand(len(numbers[0]), device=device)
        return Batches(
            numbers,
            [hashed(batch) for batch in numbers],
            torch.arange(len(cell.dims) * cell.batch + 1, device=device) * cell.bag,
            weights if cell.reduction == "weighted" else None,
            torch.randn(cell.batch, sum(cell.dims), device=device),
        )


def _evicted(tables: HashTables) -> int:
    return sum(table["evicted"] for table in tables.group.counters())


def measure_cell(
    cell: Cell, device: torch.device, with_stock: bool = True
) -> dict[str, float | None]:
    """Returns milliseconds of both sides."""
    batches = Batches.of(cell, device)
    if OPTIMIZERS[cell.optimizer][1] is None:
        with_stock = False
    if device.type == "cpu":
        return _measure_on_cpu(cell, batches, with_stock and cell.optimizer in CPU_OPTIMIZERS)
    offsets, weights, grad = batches.offsets, batches.weights, batches.grad
    times: dict[str, float | None] = {"fbgemm_ms": None}
    if with_stock:
        stock = make_fbgemm(cell, device)
        times["fbgemm_ms"] = milliseconds(
            lambda at: stock(batches.numbers[at % batches.number], offsets, weights).backward(grad)
        )
        del stock
    tables = HashTables(cell, device)
    before = _evicted(tables)
    times["hkv_ms"] = milliseconds(
        lambda at: tables.forward(batches.ids[at % batches.number], offsets, weights).backward(grad)
    )
    times["find_ms"] = milliseconds(
        lambda at: tables.find(batches.ids[at % batches.number], offsets)
    )
    if cell.room < 1 and _evicted(tables) == before:
        raise RuntimeError("tables that should evict have evicted nothing.")
    times["ratio"] = times["hkv_ms"] / times["fbgemm_ms"] if times["fbgemm_ms"] else None
    times["find_ratio"] = None
    if cell.policy != "lru":
        times["find_ratio"] = times["find_ms"] / _lru_find(cell, batches.ids, offsets, device)
    return times


CPU_STEPS = 15


def _measure_on_cpu(cell: Cell, batches: Batches, with_stock: bool) -> dict[str, float | None]:
    device = torch.device("cpu")
    tables = HashTables(cell, device)
    offsets, weights = batches.offsets, batches.weights
    sides = {"hkv": lambda at: tables.forward(batches.ids[at], offsets, weights)}
    if with_stock:
        stock = make_fbgemm(cell, device)
        sides["fbgemm"] = lambda at: stock(batches.numbers[at], offsets, weights)
    samples: dict[str, list[float]] = {}
    for turn in range(CPU_STEPS + 3):
        for side in sides if turn % 2 else reversed(sides):
            # Alternates with the other side's forward and backward, as in a model, so that each
            # step begins with another step's data in the caches.
            clocks = [(time.perf_counter(), time.process_time())]
            output = sides[side](turn % batches.number)
            clocks.append((time.perf_counter(), time.process_time()))
            output.backward(batches.grad)
            clocks.append((time.perf_counter(), time.process_time()))
            if turn < 3:
                continue
            for name, first, last in (("", 0, 2), ("forward_", 0, 1), ("backward_", 1, 2)):
                for unit, clock in (("ms", 0), ("cpu_ms", 1)):
                    passed = 1000 * (clocks[last][clock] - clocks[first][clock])
                    samples.setdefault(f"{side}_{name}{unit}", []).append(passed)
    times: dict[str, float | None] = {
        f"{side}_{name}{unit}": None
        for name in ("", "forward_", "backward_")
        for unit in ("ms", "cpu_ms")
        for side in ("fbgemm", "hkv")
    }
    times |= {name: min(values) for name, values in samples.items()}
    times["find_ms"] = steps_ms(
        lambda at: tables.find(batches.ids[at % batches.number], offsets), 4, device
    )
    for name, unit in (("ratio", "ms"), ("cpu_ratio", "cpu_ms")):
        fbgemm = times[f"fbgemm_{unit}"]
        times[name] = times[f"hkv_{unit}"] / fbgemm if fbgemm else None
    return times


def _lru_find(cell: Cell, ids: Sequence[Tensor], offsets: Tensor, device: torch.device) -> float:
    tables = HashTables(dataclasses.replace(cell, policy="lru"), device)
    return milliseconds(lambda at: tables.find(ids[at % len(ids)], offsets))


def _shown(dims: Sequence[int]) -> str:
    if len(set(dims)) == 1:
        return f"{len(dims)}x{dims[0]}"
    return "+".join(map(str, dims))


def measure(
    device: torch.device, cells: Sequence[Cell], skip_stock: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """Yields one row per cell."""
    for cell in cells:
        times = measure_cell(cell, device, cell.optimizer not in skip_stock)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row: dict[str, object] = dataclasses.asdict(cell) | {"dims": _shown(cell.dims)}
        row |= {key: value and round(value, 4) for key, value in times.items()}
        yield row | {"fbgemm_gpu": fbgemm_gpu.__version__}


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Returns the geometric mean and the maximum of the ratios, by section."""
    lines = []
    for name in (*dict.fromkeys(row["section"] for row in rows), "all"):
        section_rows = [row for row in rows if name in (row["section"], "all") and row["ratio"]]
        ratios = [float(row["ratio"]) for row in section_rows]
        if not ratios:
            continue
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        worst = max(section_rows, key=lambda row: float(row["ratio"]))
        line = (
            f"{name:10} cells {len(section_rows):3}  mean {mean:.3f}  highest {worst['ratio']:.3f}"
        )
        lines.append(f"{line} ({worst['dims']}, {worst['skew']}, {worst['optimizer']})")
    return "\n".join(lines)


def _bind_threads() -> None:
    """Restarts this command with each thread bound to a core, unless the user has set a binding.

    Under other load, two threads are often scheduled on one core and wait there for each other for
    whole time slices, so a step of a millisecond may take 60 or 300.
    """
    if "OMP_PROC_BIND" not in os.environ:  # read when torch is loaded
        os.environ["OMP_PROC_BIND"] = "true"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=AtLeast(1), default=2, help="of a CPU")
    parser.add_argument("--sections", nargs="+", help="some of them; default: all of the device")
    parser.add_argument("--dims", nargs="+", help="of their cells, those of these, such as 4x64")
    parser.add_argument("--skews", nargs="+", help="of their cells, those of these, such as 1.2")
    parser.add_argument(
        "--random", type=AtLeast(1), metavar="N", help="measure N random shapes instead"
    )
    parser.add_argument("--seed", type=int, default=1, help="of --random")
    parser.add_argument(
        "--skip-stock",
        nargs="*",
        choices=list(OPTIMIZERS),
        default=[],
        help="optimizers that FBGEMM is not measured with, where its build lacks them",
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--plot", type=Path, help="SVG file of heat maps; needs matplotlib")
    args = parser.parse_args(arguments)
    if args.random is not None and args.sections:
        parser.error("--random measures no sections: leave out --sections")
    known = list(sections(args.device))
    chosen = args.sections or known
    if unknown := [name for name in chosen if name not in known]:
        parser.error(
            f"--device {args.device} has no section {unknown[0]!r}; it has {', '.join(known)}"
        )
    if args.device == "cpu":
        _bind_threads()
        torch.set_num_threads(args.threads)
    if args.random is None:
        candidates = [cell for name in chosen for cell in sections(args.device)[name]]
    else:
        candidates = random_cells(args.device, args.random, args.seed)
    cells = [
        cell
        for cell in candidates
        if (args.dims is None or _shown(cell.dims) in args.dims)
        and (args.skews is None or cell.skew in args.skews)
    ]
    if not cells:
        parser.error("no cell has these --dims and --skews")
    rows: list[dict[str, object]] = []

    def kept() -> Iterator[dict[str, object]]:
        for row in measure(torch.device(args.device), cells, args.skip_stock):
            rows.append(row)
            yield row

    report(kept(), args.out, KEYS)
    print(summary(rows))
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
