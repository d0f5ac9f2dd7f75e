"""Forward, backward and optimizer with most rows in host memory, beside FBGEMM's cached tables.

    python -m benchmarks.training_step_tiers --out benchmarks/results/training_step_tiers.csv

Both sides keep ``--hbm`` of the rows in HBM, and the row-wise states of all. ``fetched`` and
``written_home`` are the group's rows a step that came from host memory and went back; ``link_gb_s``
is what the first moved a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import fbgemm_gpu
import torch

from benchmarks.environment import report
from benchmarks.training_step import HashTables, Workload, make_fbgemm, milliseconds

STEPS = 20
WARM_STEPS = 60
#: Of the rows of a file: what a run measures anew is replaced.
KEYS = ("side", "rows", "hbm_share", "power")


def moved(tables: HashTables) -> dict[str, int]:
    """Rows that moved so far, both ways."""
    counters = tables.group.counters()
    return {name: sum(t[name] for t in counters) for name in ("fetched", "written_home")}


def measure_side(side: str, work: Workload, hbm: float) -> dict[str, object]:
    """Milliseconds of one side, and what its rows moved."""
    device = torch.device("cuda")
    offsets = torch.arange(work.tables * work.batch + 1, device=device) * work.bag
    grad = torch.randn(work.batch, work.tables * work.dim, device=device)
    tables = None
    if side == "hkv":
        tables = HashTables(work, "rowwise_adagrad", 0.9, device, hbm)
        forward = tables.forward
    else:
        forward = make_fbgemm(work, "rowwise_adagrad", device, hbm)

    def step(at: int) -> None:
        forward(work.draw(device), offsets).backward(grad)

    for at in range(WARM_STEPS):
        step(at)
    before = None if tables is None else moved(tables)
    ms, single_ms = milliseconds(step, STEPS)
    row: dict[str, object] = {"ms": round(ms, 3), "single_ms": round(single_ms, 3)}
    row |= {"fetched": None, "written_home": None, "link_gb_s": None}
    if tables is not None and before is not None:
        steps = 6 * STEPS + 3  # that milliseconds() runs
        row |= {name: (n - before[name]) // steps for name, n in moved(tables).items()}
        row["link_gb_s"] = round(row["fetched"] * work.dim * 4 / ms / 1e6, 1)
    return row


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row for each of the two sides."""
    work = Workload(26, args.rows // 26, 128, 8192, 10, power=args.power)
    for side in args.sides:
        common = {"side": side, "rows": args.rows, "hbm_share": args.hbm, "power": args.power}
        yield {**common, **measure_side(side, work, args.hbm), "fbgemm": fbgemm_gpu.__version__}
        torch.cuda.empty_cache()


def main() -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000_000, help="of all tables")
    parser.add_argument("--hbm", type=float, default=0.1, help="share of the rows in HBM")
    parser.add_argument("--power", type=float, default=1.05, help="of the ids' power law")
    parser.add_argument("--sides", nargs="+", choices=["hkv", "fbgemm"], default=["hkv", "fbgemm"])
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
