"""A training step of Tensor-Train tables of 10^6 to 10^9 rows on a CPU.

    python -m benchmarks.tensor_train_rows --out benchmarks/results/tensor_train_rows.csv

All tables have the same ranks and columns; ids are uniform, or follow a power law. A step is
forward, backward and SGD. ``rows_per_prefix`` is the number of distinct ids that share the first
two of three slices, whose product is computed once. The tables take turns. Reported are minima of
the processor time of all threads, which other load affects least, and of wall time;
``over_first`` is the processor time divided by that of the first table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import power_law
from benchmarks.tensor_train_cpu import Batch, TensorTrain
from torchrec_hkv.tensor_train import TTShape, initial_cores, make_shape

STREAMS = ("uniform", "power law 1.05")


def _batch(rows: int, n: int, bag: int, stream: str) -> Batch:
    if stream == "uniform":
        ids = torch.randint(0, rows, (n,))
    else:
        # Spreads ranks over the table; ids in order of arrival would be clustered.
        ids = power_law(n, rows, 1.05, torch.device("cpu")) * 7_368_787 % rows
    offsets = torch.arange(0, n + 1, bag)
    return Batch(ids, offsets, torch.arange(n) // bag, n // bag)


def _row(shape: TTShape, batch: Batch, stream: str, minimum: tuple[float, float]) -> dict:
    distinct = batch.ids.unique()
    prefixes = (distinct // shape.p[2]).unique().numel()
    return {
        "operation": "forward, backward and SGD",
        "rows": shape.num_embeddings,
        "dim": shape.embedding_dim,
        "p": " ".join(map(str, shape.p)),
        "rank": shape.ranks[0],
        "cores_mb": round(4e-6 * shape.num_elements, 2),
        "ids": batch.ids.numel(),
        "distinct": distinct.numel(),
        "rows_per_prefix": round(distinct.numel() / prefixes, 2),
        "stream": stream,
        "threads": torch.get_num_threads(),
        "cpu_ns_per_id": round(minimum[1], 1),
        "ns_per_id": round(minimum[0], 1),
    }


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    for stream in STREAMS:
        tables = []
        for rows in args.rows:
            shape = make_shape(rows, args.dim, ranks=args.rank)
            table = TensorTrain(shape, initial_cores(shape, std=0.1))
            batch = _batch(rows, args.ids // args.bag * args.bag, args.bag, stream)
            table.step(batch)
            tables.append((shape, table, batch))
        minimum = [(float("inf"), float("inf"))] * len(tables)
        for _ in range(args.rounds):
            for at, (_, table, batch) in enumerate(tables):
                begin, begin_cpu = time.perf_counter(), time.process_time()
                table.step(batch)
                spent = time.process_time() - begin_cpu
                passed = time.perf_counter() - begin
                scale = 1e9 / batch.ids.numel()
                minimum[at] = (
                    min(minimum[at][0], scale * passed),
                    min(minimum[at][1], scale * spent),
                )
        first = minimum[0][1]
        for (shape, _, batch), minimum_ms in zip(tables, minimum, strict=True):
            yield {
                **_row(shape, batch, stream, minimum_ms),
                "over_first": round(minimum_ms[1] / first, 3),
            }


def main(arguments: list[str] | None = None) -> None:
    """Measures all sizes and streams."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=AtLeast(1), nargs="+", default=[10**k for k in (6, 7, 8, 9)])
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--rank", type=AtLeast(1), default=32)
    parser.add_argument("--ids", type=AtLeast(1), default=65_536)
    parser.add_argument("--bag", type=AtLeast(1), default=16, help="ids a bag")
    parser.add_argument("--rounds", type=AtLeast(1), default=5)
    parser.add_argument("--threads", type=AtLeast(1), default=2)
    parser.add_argument("--out", type=Path, default=None, help="CSV file to append to")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    report(_rows(args), args.out)


if __name__ == "__main__":
    main()
