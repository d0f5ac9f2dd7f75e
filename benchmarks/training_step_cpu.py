"""Training steps on a CPU: a ``TableGroup`` compared with FBGEMM's table-batched kernel.

    python -m benchmarks.training_step_cpu --out benchmarks/results/training_step_cpu.csv

A step is forward, backward and optimizer. Eight tables have the same row numbers as ids, and start
from equal rows, which are compared after the run. The group finds or inserts its ids in every step,
and already has all of them. The sides take turns. Reported are medians of wall time, and of the
processor time of all threads, which other load affects less. ``hkv_find`` is the
part of ``hkv_forward`` that finds slots, which FBGEMM does not need.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import power_law
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform

WARM_UP = 3
LEARNING_RATE, EPS = 0.01, 1e-8
OPTIMIZERS = {
    "sgd": (SGD(), EmbOptimType.EXACT_SGD),
    "rowwise_adagrad": (RowWiseAdagrad(eps=EPS), EmbOptimType.EXACT_ROWWISE_ADAGRAD),
}
#: Name, pooling factor, exponent of the power law (0: uniform).
STREAMS = [("uniform", 10, 0.0), ("power law", 10, 1.05), ("one id a bag", 1, 0.0)]
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("optimizer", "stream", "tables", "rows", "dim", "batch", "ids_per_bag", "threads")


def make_fbgemm(args: argparse.Namespace, optimizer: str) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Creates FBGEMM's tables."""
    shape = (args.rows, args.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [shape] * args.tables,
        optimizer=OPTIMIZERS[optimizer][1],
        learning_rate=LEARNING_RATE,
        eps=EPS,
        pooling_mode=PoolingMode.SUM,
        device=torch.device("cpu"),
    )


def make_group(args: argparse.Namespace, optimizer: str) -> TableGroup:
    """Creates hash tables that hold ids 0 to rows - 1, with some free slots."""
    spec = {"capacity": int(args.rows / args.load), "dim": args.dim}
    tables = [
        TableSpec(name=f"t{t}", initializer=Uniform(-0.05, 0.05), **spec)
        for t in range(args.tables)
    ]
    group = TableGroup(tables, list(range(args.tables)), OPTIMIZERS[optimizer][0])
    ids = torch.arange(args.rows).repeat(args.tables)
    offsets = torch.arange(args.tables + 1) * args.rows
    if (group.find_or_insert(ids, offsets, 1) < 0).any():
        raise RuntimeError("a table has no room for an id; --load must be lower.")
    return group


def rows_of(group: TableGroup, args: argparse.Namespace) -> Tensor:
    """Returns the rows by id, ``[tables, rows, dim]``."""
    rows = torch.empty(args.tables, args.rows, args.dim)
    for t in range(args.tables):
        state = group.export_table(t)
        rows[t, state.ids[state.occupied]] = state.rows[state.occupied]
    return rows


Clock = tuple[float, float]


def now() -> Clock:
    """Returns the current (wall time, processor time) in milliseconds."""
    return 1e3 * time.perf_counter(), 1e3 * time.process_time()


def between(begin: Clock, end: Clock) -> Clock:
    """Returns the differences of two readings of the clocks."""
    return end[0] - begin[0], end[1] - begin[1]


class HashTables:
    """The group's side of a step.

    Attributes:
        found: reading of the clocks after the ids were found.
    """

    def __init__(self, group: TableGroup, batch: int) -> None:
        self.group = group
        self.batch = batch
        self.anchor = torch.empty(0, requires_grad=True)
        self.learning_rate = torch.tensor(LEARNING_RATE)
        self.found = now()

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        pin = self.group.pin()
        slots = self.group.find_or_insert(ids, offsets, self.batch, pin)
        self.found = now()
        return self.group.pooled_lookup(
            self.anchor, ids, offsets, None, slots, self.batch, False, pin, self.learning_rate
        )


def draw(args: argparse.Namespace, bag: int, power: float) -> tuple[Tensor, Tensor]:
    """Draws ids and offsets of one batch."""
    n = args.tables * args.batch * bag
    if power:
        ids = power_law(n, args.rows, power, torch.device("cpu"))
    else:
        ids = torch.randint(args.rows, (n,))
    return ids, torch.arange(args.tables * args.batch + 1) * bag


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per optimizer and stream."""
    for optimizer in args.optimizers:
        for name, bag, power in STREAMS:
            fbgemm, group = make_fbgemm(args, optimizer), make_group(args, optimizer)
            weights = fbgemm.split_embedding_weights()
            for weight, rows in zip(weights, rows_of(group, args), strict=True):
                weight.data.copy_(rows)
            hash_tables = HashTables(group, args.batch)
            sides = {"hkv": hash_tables, "fbgemm": fbgemm}
            times: dict[str, list[Clock]] = {}
            grad = torch.randn(args.batch, args.tables * args.dim)
            load_before = os.getloadavg()[0]
            for turn in range(args.steps + WARM_UP):
                ids, offsets = draw(args, bag, power)
                for side in sides if turn % 2 else reversed(sides):
                    begin = now()
                    output = sides[side](ids, offsets)
                    middle = now()
                    output.backward(grad)
                    end = now()
                    elapsed = {"forward": between(begin, middle), "backward": between(middle, end)}
                    elapsed["step"] = between(begin, end)
                    if side == "hkv":
                        elapsed["find"] = between(begin, hash_tables.found)
                    if turn >= WARM_UP:
                        for what, samples in elapsed.items():
                            times.setdefault(f"{side}_{what}", []).append(samples)
            # FBGEMM sums the thousands of gradients of the most frequent rows in float32.
            torch.testing.assert_close(
                rows_of(group, args),
                torch.stack([w.detach() for w in weights]),
                rtol=1e-4,
                atol=1e-4,
            )
            row: dict[str, Any] = {
                "optimizer": optimizer,
                "stream": name,
                "tables": args.tables,
                "rows": args.rows,
                "dim": args.dim,
                "batch": args.batch,
                "ids_per_bag": bag,
                "threads": args.threads,
            }
            for clock, unit in enumerate(("ms", "cpu_ms")):
                for what, samples in sorted(times.items()):
                    row[f"{what}_{unit}"] = round(statistics.median(t[clock] for t in samples), 3)
            row["factor"] = round(row["fbgemm_step_ms"] / row["hkv_step_ms"], 2)
            row["cpu_factor"] = round(row["fbgemm_step_cpu_ms"] / row["hkv_step_cpu_ms"], 2)
            row["system_load"] = round(load_before, 2)
            row["fbgemm_gpu"] = fbgemm_gpu.__version__
            yield row


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=AtLeast(1), default=8)
    parser.add_argument("--rows", type=AtLeast(1), default=1_000_000, help="rows a table")
    parser.add_argument("--load", type=float, default=0.8, help="load factor of the hash tables")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--batch", type=AtLeast(1), default=2048)
    parser.add_argument("--steps", type=AtLeast(1), default=21, help="timed steps a row")
    parser.add_argument("--threads", type=AtLeast(1), default=2)
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
