"""Simulates a training step on 8 to 1,024 ranks: imbalance, bytes and time. Needs no ranks.

    python -m benchmarks scale --out benchmarks/results/scale.csv --plot docs/performance/scale.svg

One table of ``--rows`` ids is looked up by ``--batch`` bags of ``--bag`` ids on each rank, ids by a
power law; ``--tables`` such tables make a step. Counted, not modelled, is what each rank is asked
for: ids are drawn for all ranks and sent to their owners by the hash that training uses.
``ids_imbalance`` is the most loaded rank's ids over the mean, ``distinct_imbalance`` the same of
different ids; ``dedup_imbalance`` is that of ids where each rank sends an id once a batch.

Bytes are the planner's (:mod:`torchrec_hkv.planner.traffic`). Times follow from them and from
bandwidths in GB/s of a rank, to its host, to others, and of rows at random in HBM: nominal ones of
hosts with NVLink and a 400 Gb/s card a rank, or what ``--bandwidths`` names, a JSON file
``{"intra": …, "inter": …, "hbm": …}``. An id has its row and state read twice and written once.
Parts of a step add up, and the most loaded rank decides. A plan is one of

- ``row_wise``: tables over all ranks;
- ``table_row_wise``: each table over the ranks of one host; hosts have as many, or one more;
- ``groups``: ``DMPCollection`` with a replica a host, row-wise within it, a sync every
  ``--sync-every`` steps; syncs cross hosts.

``efficiency`` is samples a second and rank over those of the same plan on the fewest ranks.
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
from torchrec_hkv.planner.traffic import Asked, Hosts, Traffic, step_traffic

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
PLANS = ("row_wise", "table_row_wise", "groups")
KEYS = ("plan", "power", "ranks", "rows", "dim", "tables", "batch", "bag")
#: GB/s of a rank: NVLink of an H100 host as reached, one 400 Gb/s card a rank, random rows of HBM.
BANDWIDTHS = {"intra": 300.0, "inter": 40.0, "hbm": 1500.0}
#: Ids that are drawn at most; more ranks draw fewer each, and counts are scaled up.
_MOST_DRAWN = 1 << 23


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
    """The most over the mean."""
    return float(counts.max() / counts.double().mean())


class Load:
    """Ids that ranks draw together, and what their owners are asked for.

    Args:
        ranks: that draw, and that own.
        each: ids that a rank draws.
        rows: ids that there are.
        power: of the law.
        ranks_of_host: the first ranks of which are a host.
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
        # An id that a rank draws several times, once.
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
            drawn = max(1, min(each, _MOST_DRAWN // ranks))
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
    """A row: one plan at one number of ranks."""
    local = args.ranks_of_host
    hosts = ranks // local
    ids, dims = float(args.batch * args.bag), [args.dim]
    sync_ms = sync_bytes = 0.0
    # Who owns an id: all ranks, those of a table's host, or those of the replica's.
    owners = load.ids.view(ranks // local, local).sum(dim=0) if plan != "row_wise" else load.ids
    uneven = imbalance(owners)
    if plan == "row_wise":
        kind, where = "row_wise", Hosts(ranks, local)
    elif plan == "table_row_wise":
        kind, where, dims = "table_row_wise", Hosts(ranks, local), [args.dim] * local
    else:
        kind, where = "row_wise", Hosts(local, local)
    traffic = step_traffic(Asked(kind, dims, ids, float(args.batch), True), where) * args.tables
    ids_part = step_traffic(Asked(kind, [0] * len(dims), ids, float(args.batch), True), where)
    ids_part = ids_part * args.tables
    # Ids come in where they are owned; rows and gradients are even.
    exchange = _ms(traffic, bandwidths) + (uneven - 1) * _ms(ids_part, bandwidths)
    # A row is read; it is read again and written with its state by the update.
    row_bytes = 3 * 4 * (args.dim + 1)
    rows_ms = 1e-6 * args.tables * ids * uneven * row_bytes / bandwidths["hbm"]
    if plan == "groups" and hosts > 1:
        # Different ids of all steps since the last sync, at most, of the part that a rank owns.
        steps = scale * args.sync_every
        most = args.rows / local
        here = min(load.distinct_of_host / local * steps, most) * args.tables
        anywhere = min(float(load.distinct.sum()) / local * steps, most) * args.tables
        sync_bytes = id_sync_bytes(here, anywhere, args.dim, 1, "lru", hosts)
        sync_ms = 1e-6 * sync_bytes / bandwidths["inter"] / args.sync_every
    if plan == "table_row_wise":
        # Of the host with the most tables, over the mean.
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
    """Within the host and to others at the same time."""
    return 1e-6 * max(
        traffic.intra_host / bandwidths["intra"], traffic.inter_host / bandwidths["inter"]
    )


def plot(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draws step times and imbalances over ranks.

    Args:
        rows: of a run.
        path: its ending tells the format.

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
                own = [row for row in rows if (row["plan"], row["power"]) == (plan, power)]
                axis.plot([r["ranks"] for r in own], [r["step_ms"] for r in own], "o-", label=plan)
            axis.set(xscale="log", yscale="log", xlabel="ranks", title=f"power law {power}")
        axes[0].set_ylabel("ms a step")
        axes[0].legend()
        for power in powers:
            own = [row for row in rows if (row["plan"], row["power"]) == ("row_wise", power)]
            axes[-1].plot(
                [r["ranks"] for r in own], [r["ids_imbalance"] for r in own], "o-", label=f"{power}"
            )
            axes[-1].plot(
                [r["ranks"] for r in own], [r["dedup_imbalance"] for r in own], "x:", color="gray"
            )
        axes[-1].set(xscale="log", yscale="log", xlabel="ranks", title="most over mean of ids")
        axes[-1].legend(title="power; dotted: each once")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
