"""How evenly row-wise sharding of hash tables spreads ids over ranks. Needs neither ranks nor GPUs.

    python -m benchmarks.load_imbalance --data criteo.npz ratings.dat \\
        --out benchmarks/results/load_imbalance.csv

An imbalance is ``(most - mean) / mean`` over ranks, of

- ``rows``: the different ids of each table, which is what a rank keeps;
- ``rows_a_batch``: the different ids of each table in a batch, which is what a rank reads and
  updates, summed over batches;
- ``ids``: ids as they are sent, repetitions and all.

Whatever the rule is, an id has one owner: where few ids are most of what is sent, ``ids`` can't be
even. ``hottest`` is the share of the most frequent id of a table in all ids.

Streams: ids 0, 1, …; multiples of powers of two; hashed ids; ids that follow a power law, by hashed
names; and the columns of real logs, one table a column: a Criteo file (``.npz`` with ``cat``,
int64 ``[rows, columns]``) or ``user::movie::rating::seconds`` lines.
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
    """``(most - mean) / mean`` of counts by rank."""
    mean = float(counts.double().mean())
    return (int(counts.max()) - mean) / mean


def by_rank(ids: Tensor, ranks: int) -> Tensor:
    """How many ids each rank owns, int64 ``[ranks]``."""
    return torch.bincount(owner_rank(ids, ranks), minlength=ranks)


def made_up(count: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Streams of one table, of so many ids."""
    numbers = torch.arange(count)
    yield "sequential", [numbers]
    for exponent in STRIDES:
        yield f"strided 2^{exponent}", [numbers << exponent]
    yield "hashed", [hashed(numbers)]
    torch.manual_seed(0)
    yield f"power law {POWER}", [hashed(power_law(count, count, POWER, torch.device("cpu")))]


def read(path: Path) -> list[Tensor]:
    """Ids of a real log in its order, by column.

    Raises:
        ValueError: a file of another kind.
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
    """One row a stream and number of ranks."""
    streams = [*made_up(args.ids), *((path.stem, read(path)) for path in args.data)]
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
