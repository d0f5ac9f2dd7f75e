"""Load balance of row-wise sharded hash tables over ranks. Needs neither ranks nor GPUs.

    python -m benchmarks.load_imbalance --data criteo.npz ratings.dat \\
        --out benchmarks/results/load_imbalance.csv

An imbalance is ``(most - mean) / mean`` over ranks, of

- ``rows``: the distinct ids of each table, which a rank stores;
- ``rows_a_batch``: the distinct ids of each table in a batch, which a rank reads and updates,
summed
  over batches;
- ``ids``: the ids that are sent, with repetitions.

Each id has one owner, so if few ids are most of the traffic, ``ids`` can't be even under any rule.
``hottest`` is the share of a table's most frequent id in all ids.

Streams are ids 0, 1, …; multiples of powers of two; hashed ids; hashed ids with a power law; and
the columns of real logs, one table per column: a Criteo file (``.npz`` with ``cat``, int64
``[rows, columns]``) or ``user::movie::rating::seconds`` lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed, power_law
from torchrec_hkv.hash_table import owner_rank

RANKS = (1, 2, 4, 8)
STRIDES = (1, 8, 16, 32, 43)
POWER = 1.05


def imbalance(counts: Tensor) -> float:
    """Returns ``(most - mean) / mean`` of counts by rank."""
    mean = float(counts.double().mean())
    return (int(counts.max()) - mean) / mean


def by_rank(ids: Tensor, ranks: int) -> Tensor:
    """Returns the number of ids that each rank owns, int64 ``[ranks]``."""
    return torch.bincount(owner_rank(ids, ranks), minlength=ranks)


def synthetic_counts(count: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields synthetic streams of one table, with ``count`` ids."""
    numbers = torch.arange(count)
    yield "sequential", [numbers]
    for exponent in STRIDES:
        yield f"strided 2^{exponent}", [numbers << exponent]
    yield "hashed", [hashed(numbers)]
    torch.manual_seed(0)
    yield f"power law {POWER}", [hashed(power_law(count, count, POWER, torch.device("cpu")))]


def read(path: Path) -> list[Tensor]:
    """Reads the ids of a real log in their order, by column.

    Raises:
        ValueError: the file has another format.
    """
    if path.suffix == ".npz":
        with np.load(path) as file:
            if "cat" not in file:
                raise ValueError(f"{path.name} has {sorted(file)}: it must have cat.")
            return list(torch.from_numpy(file["cat"]).T)
    if path.suffix != ".dat":
        raise ValueError(f"{path.name} must be a .npz with cat, or a .dat of ratings.")
    rows = [[int(word) for word in line.split("::")] for line in path.read_text().splitlines()]
    table = torch.tensor(rows, dtype=torch.int64)
    return list(table[torch.argsort(table[:, 3], stable=True), :2].T)


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per stream and number of ranks."""
    streams = [*synthetic_counts(args.ids), *((path.stem, read(path)) for path in args.data)]
    for name, tables in streams:
        total = sum(ids.numel() for ids in tables)
        counts = [ids.unique(return_counts=True) for ids in tables]
        batches = [part.unique() for ids in tables for part in ids.split(args.batch)]
        for ranks in RANKS:
            yield {
                "stream": name,
                "tables": len(tables),
                "ids": total,
                "rows": sum(distinct.numel() for distinct, _ in counts),
                "batch": args.batch,
                "ranks": ranks,
                "rows_imbalance": round(
                    imbalance(sum(by_rank(distinct, ranks) for distinct, _ in counts)), 4
                ),
                "rows_a_batch_imbalance": round(
                    imbalance(sum(by_rank(part, ranks) for part in batches)), 4
                ),
                "ids_imbalance": round(imbalance(sum(by_rank(ids, ranks) for ids in tables)), 4),
                "hottest": round(max(int(often.max()) for _, often in counts) / total, 4),
            }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, counts, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ids", type=AtLeast(1), default=1_000_000, help="of a stream that is made up"
    )
    parser.add_argument("--batch", type=AtLeast(1), default=8192, help="rows of a batch")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="real logs")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out)


if __name__ == "__main__":
    main()
