"""Forward, backward and optimizer on a GPU with new ids in each batch, into full tables.

    python -m benchmarks.training_step_new_ids --out benchmarks/results/training_step_new_ids.csv

The tables are full, so that each new id takes the place of the one that was longest not looked up:
of ids that nobody asks for any more, unless ``--load`` leaves none of these.
``ms`` are milliseconds a step back to back, ``missing`` the share of ids that were not in their
table, and ``ratio`` what the step takes of the one without new ids, in the same run.
``--deterministic`` measures the tables' deterministic mode.
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
#: Of the rows of a file: what a run measures anew is replaced.
KEYS = ("workload", "optimizer", "deterministic", "load", "new")


def full_tables(
    work: Workload, optimizer: str, load: float, device: torch.device, deterministic: bool
) -> HashTables:
    """Tables with all rows of a workload, and other ids, asked for before, in the rest."""
    tables = HashTables(work, optimizer, load, device, deterministic=deterministic)
    known = torch.arange(work.rows, device=device)
    others = torch.arange(int(work.rows / load) - work.rows * 7 // 8, device=device) - (1 << 40)
    # Others take the places of ids that were asked for longest ago, which come back.
    for ids in (others, known, known):
        for part in ids.split(1 << 16):
            ends = torch.arange(work.tables + 1, device=device) * len(part)
            tables.group.find_or_insert(part.repeat(work.tables), ends, 1)
    return tables


def with_new(ids: Tensor, share: float, first: int) -> Tensor:
    """Ids a share of which, at random positions, are numbers from ``first`` on."""
    new = torch.rand(len(ids), device=ids.device) < share
    return torch.where(new, torch.arange(len(ids), device=ids.device) + first, ids)


def counted(tables: HashTables) -> tuple[int, int]:
    """Ids asked for so far, and those that were there."""
    counters = tables.group.counters()
    return sum(t["lookups"] for t in counters), sum(t["hits"] for t in counters)


def measure_share(
    tables: HashTables, work: Workload, share: float, first: int
) -> tuple[float, float, int]:
    """Milliseconds a step, the share of ids that were missing, and the next new id."""
    device = torch.device("cuda")
    offsets = torch.arange(work.tables * work.batch + 1, device=device) * work.bag
    grad = torch.randn(work.batch, work.tables * work.dim, device=device)
    batches = []
    for _ in range(7 * STEPS + 3):  # more than milliseconds() runs: none comes twice
        batches.append(with_new(work.draw(device), share, first))
        first += len(batches[-1])
    order = iter(batches)
    asked, there = counted(tables)
    ms, _ = milliseconds(lambda at: tables.forward(next(order), offsets).backward(grad), STEPS)
    asked, there = (after - was for after, was in zip(counted(tables), (asked, there), strict=True))
    return ms, 1 - there / asked, first


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row a workload, optimizer and share of new ids."""
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
