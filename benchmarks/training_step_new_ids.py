"""Training steps on a GPU with new ids in each batch, in full tables.

    python -m benchmarks.training_step_new_ids --out benchmarks/results/training_step_new_ids.csv

A step is forward, backward and optimizer. The tables are full, so each new id replaces the least
recently used id. These are ids that are no longer looked up, unless ``--load`` leaves none of them.
``ms`` are milliseconds per back-to-back step, ``missing`` is the share of ids that were not in
their table, and ``ratio`` is the time divided by that without new ids in the same run.
``--deterministic`` measures the deterministic mode.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import report
from benchmarks.training_step import OPTIMIZERS, WORKLOADS, HashTables, Workload, milliseconds

STEPS = 20
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("workload", "optimizer", "deterministic", "load", "new")


def full_tables(
    work: Workload, optimizer: str, load: float, device: torch.device, deterministic: bool
) -> HashTables:
    """Creates tables with all rows of a workload, and older ids in the other slots."""
    tables = HashTables(work, optimizer, load, device, deterministic=deterministic)
    known = torch.arange(work.rows, device=device)
    others = torch.arange(int(work.rows / load) - work.rows * 7 // 8, device=device) - (1 << 40)
    # Other ids may replace some known ids, which are inserted again.
    for ids in (others, known, known):
        for part in ids.split(1 << 16):
            ends = torch.arange(work.tables + 1, device=device) * len(part)
            tables.group.find_or_insert(part.repeat(work.tables), ends, 1)
    return tables


def with_new(ids: Tensor, share: float, first: int) -> Tensor:
    """Replaces a share of ids, at random positions, by numbers from ``first`` on."""
    new = torch.rand(len(ids), device=ids.device) < share
    return torch.where(new, torch.arange(len(ids), device=ids.device) + first, ids)


def counted(tables: HashTables) -> tuple[int, int]:
    """Returns the numbers of looked-up ids and of hits so far."""
    counters = tables.group.counters()
    return sum(t["lookups"] for t in counters), sum(t["hits"] for t in counters)


def measure_share(
    tables: HashTables, work: Workload, share: float, first: int
) -> tuple[float, float, int]:
    """Returns milliseconds per step, the share of missing ids, and the next new id."""
    device = torch.device("cuda")
    offsets = torch.arange(work.tables * work.batch + 1, device=device) * work.bag
    grad = torch.randn(work.batch, work.tables * work.dim, device=device)
    batches = []
    for _ in range(7 * STEPS + 3):  # more than milliseconds() runs, so that no batch repeats
        batches.append(with_new(work.draw(device), share, first))
        first += len(batches[-1])
    order = iter(batches)
    lookups_before, there = counted(tables)
    ms, _ = milliseconds(lambda at: tables.forward(next(order), offsets).backward(grad), STEPS)
    lookups_before, there = (
        after - was for after, was in zip(counted(tables), (lookups_before, there), strict=True)
    )
    return ms, 1 - there / lookups_before, first


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per workload, optimizer and share of new ids."""
    device = torch.device("cuda")
    for name in args.workloads:
        work = WORKLOADS[name]
        for optimizer in args.optimizers:
            tables = full_tables(work, optimizer, args.load, device, args.deterministic)
            first, without = 1 << 41, None
            for share in args.shares:
                ms, missing, first = measure_share(tables, work, share, first)
                without = ms if share == 0 else without
                yield {
                    "workload": name,
                    "optimizer": optimizer,
                    "deterministic": args.deterministic,
                    "load": args.load,
                    "new": share,
                    "missing": round(missing, 4),
                    "ms": round(ms, 3),
                    "ratio": round(ms / without, 3) if without else None,
                }
            del tables
            torch.cuda.empty_cache()


def main() -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=["S1", "S2"], default=["S1", "S2"])
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=["rowwise_adagrad"]
    )
    parser.add_argument(
        "--load",
        type=float,
        default=0.5,
        help="share of the slots that the workload's own ids take; others fill the rest. Where it "
        "is near 1, new ids take the places of ids that will be asked for",
    )
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.01, 0.1])
    parser.add_argument("--deterministic", action="store_true", help="in deterministic mode")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
