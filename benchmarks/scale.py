"""Simulates training steps on 8 to 1,024 ranks: imbalance, bytes and time. Runs on one process.

    python -m benchmarks scale --out benchmarks/results/scale.csv --plot docs/performance/scale.svg

On each rank, ``--batch`` bags look up ``--bag`` ids each, by a power law, in a table of ``--rows``
ids; a step has ``--tables`` such tables. The load of each rank is counted, not modelled: ids are
drawn for all ranks and sent to their owners by the hash of training. ``ids_imbalance`` is the
number of ids of the most loaded rank divided by the mean, ``distinct_imbalance`` the same for
distinct ids, and ``dedup_imbalance`` the same for ids if each rank sends an id once per batch.

Bytes are those of the planner (:mod:`torchrec_hkv.planner.traffic`). Times are computed from bytes
and a rank's bandwidths in GB/s within its host, to other hosts, and for random rows in HBM. By
default, these are nominal values for hosts with NVLink and a 400 Gb/s card per rank;
``--bandwidths`` sets a JSON file ``{"intra": …, "inter": …, "hbm": …}``. For an id, row and state
are read twice and written once. The time of a step is the sum of its parts on the most loaded rank.
A plan is one of

- ``row_wise``: tables over all ranks;
- ``table_row_wise``: each table over the ranks of one host; the numbers of tables of two hosts
differ
  by at most one;
- ``groups``: ``DMPCollection`` with one replica per host, row-wise within the host, and a sync
every
  ``--sync-every`` steps across hosts.

``efficiency`` is the number of samples per second and rank, divided by that of the same plan on the
fewest ranks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed, power_law
from torchrec_hkv.hash_table import owner_rank
from torchrec_hkv.hash_table.replicas import id_sync_bytes
from torchrec_hkv.planner.traffic import HostTopology, TableLookups, Traffic, step_traffic

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
PLANS = ("row_wise", "table_row_wise", "groups")
KEYS = ("plan", "power", "ranks", "rows", "dim", "tables", "batch", "bag")
#: GB/s per rank: achieved NVLink of an H100 host, one 400 Gb/s card per rank, random rows in HBM.
BANDWIDTHS = {"intra": 300.0, "inter": 40.0, "hbm": 1500.0}
#: Largest number of drawn ids. With more ranks, each draws fewer, and counts are scaled up.
_MAX_DRAWN = 1 << 23


def main(arguments: list[str] | None = None) -> None:
    """Simulates all plans at all numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=AtLeast(1), nargs="+", default=list(RANKS))
    parser.add_argument("--ranks-of-host", type=AtLeast(1), default=8)
    parser.add_argument("--power", type=float, nargs="+", default=[0.8, 1.05, 1.2])
    parser.add_argument("--rows", type=AtLeast(1), default=10**9)
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--tables", type=AtLeast(1), default=32)
    parser.add_argument("--batch", type=AtLeast(1), default=4096)
    parser.add_argument("--bag", type=AtLeast(1), default=4)
    parser.add_argument("--sync-every", type=AtLeast(1), default=10)
    parser.add_argument("--bandwidths", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    for ranks in args.ranks:
        if ranks % args.ranks_of_host:
            parser.error(f"--ranks {ranks} is no multiple of --ranks-of-host {args.ranks_of_host}")
    bandwidths = dict(BANDWIDTHS)
    if args.bandwidths is not None:
        bandwidths |= json.loads(args.bandwidths.read_text())
    rows = list(_rows(args, bandwidths))
    report(rows, args.out, KEYS)
    if args.plot is not None:
        plot(rows, args.plot)


def imbalance(counts: Tensor) -> float:
    """Returns the maximum divided by the mean."""
    return float(counts.max() / counts.double().mean())


class Load:
    """The ids that all ranks draw, and the resulting load of their owners.

    Args:
        ranks: number of ranks, which draw and own ids.
        each: number of ids that a rank draws.
        rows: number of existing ids.
        power: exponent of the power law.
        ranks_of_host: number of ranks of the first host.
    """

    def __init__(self, ranks: int, each: int, rows: int, power: float, ranks_of_host: int) -> None:
        torch.manual_seed(ranks)
        device = torch.device("cpu")
        drawn = power_law(ranks * each, rows, power, device)
        senders = torch.arange(ranks).repeat_interleave(each)
        distinct = drawn.unique()
        self.distinct_of_host = drawn[: ranks_of_host * each].unique().numel()
        self.ids = torch.bincount(owner_rank(hashed(drawn), ranks), minlength=ranks)
        self.distinct = torch.bincount(owner_rank(hashed(distinct), ranks), minlength=ranks)
        # Keeps one occurrence of each id that a rank draws.
        once = drawn[_first_places((senders * 1_000_003) ^ hashed(drawn))]
        self.once = torch.bincount(owner_rank(hashed(once), ranks), minlength=ranks)


def _first_places(keys: Tensor) -> Tensor:
    order = keys.argsort()
    sorted_keys = keys[order]
    is_first = torch.ones(len(keys), dtype=torch.bool)
    is_first[1:] = sorted_keys[1:] != sorted_keys[:-1]
    return order[is_first]


def _rows(args: argparse.Namespace, bandwidths: Mapping[str, float]) -> Iterator[dict]:
    for power in args.power:
        first: dict[str, float] = {}
        for ranks in args.ranks:
            each = args.batch * args.bag
            drawn = max(1, min(each, _MAX_DRAWN // ranks))
            load = Load(ranks, drawn, args.rows, power, args.ranks_of_host)
            for plan in PLANS:
                row = _step(args, bandwidths, plan, power, ranks, load, each / drawn)
                first.setdefault(plan, row["step_ms"])
                row["efficiency"] = round(first[plan] / row["step_ms"], 4)
                yield row


def _step(
    args: argparse.Namespace,
    bandwidths: Mapping[str, float],
    plan: str,
    power: float,
    ranks: int,
    load: Load,
    scale: float,
) -> dict:
    """Returns a row: one plan with one number of ranks."""
    local = args.ranks_of_host
    hosts = ranks // local
    ids, dims = float(args.batch * args.bag), [args.dim]
    sync_ms = sync_bytes = 0.0
    # The owners of ids are all ranks, the ranks of a table's host, or those of the replica's host.
    owners = load.ids.view(ranks // local, local).sum(dim=0) if plan != "row_wise" else load.ids
    uneven = imbalance(owners)
    if plan == "row_wise":
        kind, where = "row_wise", HostTopology(ranks, local)
    elif plan == "table_row_wise":
        kind, where, dims = "table_row_wise", HostTopology(ranks, local), [args.dim] * local
    else:
        kind, where = "row_wise", HostTopology(local, local)
    traffic = (
        step_traffic(TableLookups(kind, dims, ids, float(args.batch), True), where) * args.tables
    )
    ids_part = step_traffic(
        TableLookups(kind, [0] * len(dims), ids, float(args.batch), True), where
    )
    ids_part = ids_part * args.tables
    # Ids arrive at their owners; the exchange of rows and gradients is even.
    exchange = _ms(traffic, bandwidths) + (uneven - 1) * _ms(ids_part, bandwidths)
    # The lookup reads a row; the update reads it again, and writes it with its state.
    row_bytes = 3 * 4 * (args.dim + 1)
    rows_ms = 1e-6 * args.tables * ids * uneven * row_bytes / bandwidths["hbm"]
    if plan == "groups" and hosts > 1:
        # Upper bound on the distinct ids since the last sync in the part that a rank owns.
        steps = scale * args.sync_every
        maximum = args.rows / local
        here = min(load.distinct_of_host / local * steps, maximum) * args.tables
        anywhere = min(float(load.distinct.sum()) / local * steps, maximum) * args.tables
        sync_bytes = id_sync_bytes(here, anywhere, args.dim, 1, "lru", hosts)
        sync_ms = 1e-6 * sync_bytes / bandwidths["inter"] / args.sync_every
    if plan == "table_row_wise":
        # Number of tables of the host with the most tables, divided by the mean.
        crowded = -(-args.tables // hosts) * hosts / args.tables
        exchange, rows_ms = exchange * crowded, rows_ms * crowded
    step = exchange + rows_ms + sync_ms
    return {
        "plan": plan,
        "power": power,
        "ranks": ranks,
        "rows": args.rows,
        "dim": args.dim,
        "tables": args.tables,
        "batch": args.batch,
        "bag": args.bag,
        "ids_imbalance": round(uneven, 3),
        "distinct_imbalance": round(imbalance(load.distinct), 3),
        "dedup_imbalance": round(imbalance(load.once), 3),
        "intra_mb": round(traffic.intra_host / 1e6, 2),
        "inter_mb": round(traffic.inter_host / 1e6, 2),
        "sync_mb": round(sync_bytes / 1e6, 2),
        "exchange_ms": round(exchange, 3),
        "rows_ms": round(rows_ms, 3),
        "sync_ms": round(sync_ms, 3),
        "step_ms": round(step, 3),
        **{f"{name}_gbps": value for name, value in bandwidths.items()},
    }


def _ms(traffic: Traffic, bandwidths: Mapping[str, float]) -> float:
    """Returns the time of transfers within the host and to other hosts, which are concurrent."""
    return 1e-6 * max(
        traffic.intra_host / bandwidths["intra"], traffic.inter_host / bandwidths["inter"]
    )


def plot(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draws step times and imbalances over ranks.

    Args:
        rows: rows of a run.
        path: output file; its suffix is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    powers = sorted({row["power"] for row in rows})
    with rc_context({"svg.hashsalt": "scale"}):  # equal rows give equal files
        figure = Figure(figsize=(4 * (len(powers) + 1), 3.4), layout="constrained")
        axes = figure.subplots(1, len(powers) + 1)
        for axis, power in zip(axes, powers, strict=False):
            for plan in PLANS:
                of_plan = [row for row in rows if (row["plan"], row["power"]) == (plan, power)]
                axis.plot(
                    [r["ranks"] for r in of_plan], [r["step_ms"] for r in of_plan], "o-", label=plan
                )
            axis.set(xscale="log", yscale="log", xlabel="ranks", title=f"power law {power}")
        axes[0].set_ylabel("ms a step")
        axes[0].legend()
        for power in powers:
            of_plan = [row for row in rows if (row["plan"], row["power"]) == ("row_wise", power)]
            axes[-1].plot(
                [r["ranks"] for r in of_plan],
                [r["ids_imbalance"] for r in of_plan],
                "o-",
                label=f"{power}",
            )
            axes[-1].plot(
                [r["ranks"] for r in of_plan],
                [r["dedup_imbalance"] for r in of_plan],
                "x:",
                color="gray",
            )
        axes[-1].set(xscale="log", yscale="log", xlabel="ranks", title="most over mean of ids")
        axes[-1].legend(title="power; dotted: each once")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
