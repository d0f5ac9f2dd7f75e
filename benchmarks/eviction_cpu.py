"""Training steps with evictions on a CPU, under several policies, in one run on the same ids.

    python -m benchmarks.eviction_cpu --out benchmarks/results/eviction_cpu.csv

Full tables get more distinct ids than they have rows, so each missing id replaces another id. A
step has forward, backward and row-wise Adagrad. The policies take turns. Times are medians of wall
time, and of the processor time of all threads, which other load affects less. The
time of lookups also depends on the addresses of a table's memory, so with ``--repeats`` new tables
are created several times, and a row has the medians of their medians and of their ratios.
``missing`` is the share of ids that were not in their table, ``evicted`` the share that replaced
another id, and ratios are relative to the first policy.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import power_law
from benchmarks.training_step_cpu import Clock, HashTables, between, now
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform

WARM_UP = 3
#: Name, distinct ids per row of a table, exponent of the power law (0: uniform).
STREAMS = [("uniform", 1.09, 0.0), ("uniform", 1.35, 0.0), ("power law", 4.0, 1.05)]
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("policy", "stream", "universe", "tables", "rows", "dim", "batch", "ids_per_bag", "threads")

#: Columns with medians over the repeats.
MEASURED = ("step_ms", "step_cpu_ms", "ratio", "cpu_ratio", "system_load")


def draw(args: argparse.Namespace, universe: float, power: float) -> Tensor:
    """Draws the ids of one batch. In each call, equal numbers give different ids."""
    n, maximum = args.tables * args.batch * args.bag, int(universe * args.rows)
    if power:
        return power_law(n, maximum, power, torch.device("cpu"))
    return torch.randint(maximum, (n,))


def steady(
    args: argparse.Namespace, policy: str, universe: float, batches: list[Tensor]
) -> HashTables:
    """Creates full tables under a policy, and looks up ``batches``."""
    tables = [
        TableSpec(f"t{t}", args.rows, args.dim, policy, initializer=Uniform(-0.05, 0.05))
        for t in range(args.tables)
    ]
    group = TableGroup(tables, list(range(args.tables)), RowWiseAdagrad())
    for ids in torch.randperm(int(universe * args.rows)).split(1 << 16):
        ends = torch.arange(args.tables + 1) * len(ids)
        group.find_or_insert(ids.repeat(args.tables), ends, 1)
    tables = HashTables(group, args.batch)
    for ids in batches:
        group.find_or_insert(ids, offsets_of(args), args.batch)
    return tables


def offsets_of(args: argparse.Namespace) -> Tensor:
    """Returns the offsets of a batch's bags."""
    return torch.arange(args.tables * args.batch + 1) * args.bag


def counted(tables: HashTables, *names: str) -> list[int]:
    """Returns sums of counters over the tables."""
    counters = tables.group.counters()
    return [sum(table[name] for table in counters) for name in names]


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per stream and policy."""
    for stream in args.streams:
        repeats = [measure_once(args, *stream) for _ in range(args.repeats)]
        for rows in zip(*repeats, strict=True):
            median = {
                key: round(statistics.median(row[key] for row in rows), 3) for key in MEASURED
            }
            yield rows[0] | median


def measure_once(
    args: argparse.Namespace, name: str, universe: float, power: float
) -> list[dict[str, Any]]:
    """Returns one row per policy, with new tables."""
    offsets = offsets_of(args)
    grad = torch.randn(args.batch, args.tables * args.dim)
    earlier = [draw(args, universe, power) for _ in range(args.earlier)]
    sides = {policy: steady(args, policy, universe, earlier) for policy in args.policies}
    times: dict[str, list[Clock]] = {policy: [] for policy in sides}
    names = ("lookups", "hits", "evicted")
    before = {policy: counted(side, *names) for policy, side in sides.items()}
    load_before = os.getloadavg()[0]
    for turn in range(args.steps + WARM_UP):
        ids = draw(args, universe, power)
        for policy in sides if turn % 2 else reversed(sides):
            begin = now()
            sides[policy](ids, offsets).backward(grad)
            if turn >= WARM_UP:
                times[policy].append(between(begin, now()))
    ms = {
        policy: [statistics.median(t[clock] for t in samples) for clock in range(2)]
        for policy, samples in times.items()
    }
    rows: list[dict[str, Any]] = []
    for policy, side in sides.items():
        after = counted(side, *names)
        lookups, hits, evicted = (a - b for a, b in zip(after, before[policy], strict=True))
        rows.append(
            {
                "policy": policy,
                "stream": name,
                "universe": universe,
                "tables": args.tables,
                "rows": args.rows,
                "dim": args.dim,
                "batch": args.batch,
                "ids_per_bag": args.bag,
                "threads": args.threads,
                "missing": round(1 - hits / lookups, 4),
                "evicted": round(evicted / lookups, 4),
                "step_ms": ms[policy][0],
                "step_cpu_ms": ms[policy][1],
                "ratio": ms[policy][0] / ms[args.policies[0]][0],
                "cpu_ratio": ms[policy][1] / ms[args.policies[0]][1],
                "system_load": load_before,
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=AtLeast(1), default=4)
    parser.add_argument("--rows", type=AtLeast(1), default=1_000_000, help="rows a table")
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--batch", type=AtLeast(1), default=2048)
    parser.add_argument("--bag", type=AtLeast(1), default=10, help="ids a bag")
    parser.add_argument("--steps", type=AtLeast(1), default=41, help="timed steps a row")
    parser.add_argument("--repeats", type=AtLeast(1), default=1, help="times that tables are made")
    parser.add_argument(
        "--earlier", type=AtLeast(0), default=200, help="lookups before, in batches"
    )
    parser.add_argument("--threads", type=AtLeast(1), default=2)
    parser.add_argument("--policies", nargs="+", default=["lru", "adaptive"])
    parser.add_argument(
        "--streams",
        type=lambda at: STREAMS[int(at)],
        nargs="+",
        default=STREAMS,
        help=f"numbers of streams, from 0: {', '.join(f'{s[0]} of {s[1]}' for s in STREAMS)}",
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
