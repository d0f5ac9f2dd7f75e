"""Times of planning for many tables, and comparisons of the plans with bounds.

    python -m benchmarks planning --out benchmarks/results/planning.csv

Tables have 10^3 to 3 * 10^8 rows by a power law and 16 to 256 columns. Each may use ``fused``,
``hkv`` or ``tt``, and any sharding type; hosts have 8 ranks. ``budget`` is the HBM of all ranks
divided by the bytes of the dense rows, ``host`` the same for host memory, and ``frequencies`` the
share of tables with frequencies from the JSON of a replay of ids by a power law.

``cpu_seconds`` is processor time, which other processes affect less than ``seconds``. ``peak_mib``
is the memory that planning adds to the process, and ``tried`` the number of plans whose fit or time
was computed. ``missing`` is the error if nothing fits.

``lossy`` is the number of tables that lose quality, and ``fewest`` a lower bound on it for all
plans. ``loss`` is the estimated loss, and ``least_loss`` the bound of a relaxation for as many
tables, which allows parts of levels and pools the memory of all ranks. ``step_ms`` is the time of
the slowest rank, and ``balanced_ms`` the time if all ranks shared the load evenly. ``bytes_ratio``
is the used HBM of the fullest rank divided by the mean over ranks.

``stock_ms`` is the time of the plan of TorchRec's own planner with kernel ``fused``, with the same
estimates of shards. It gets ``--stock-seconds``, for budgets of at least ``--stock-budget``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner as StockPlanner
from torchrec.distributed.planner import ParameterConstraints as StockConstraints
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.planning_model import dense_bytes, make_constraints, make_model, make_tables
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.planner.loss_bounds import ScarceResource, tightest_bound
from torchrec_hkv.planner.memory import RankMemory
from torchrec_hkv.planner.report import TableReport
from torchrec_hkv.planner.thinning import Thinning
from torchrec_hkv.progress import reported

KEYS = ("tables", "ranks", "budget", "host", "frequencies", "batch", "seed")
#: Columns of a plan; empty without a plan.
FIGURES = ("lossy", "fewest", "loss", "least_loss", "step_ms", "balanced_ms", "bytes_ratio", "free")
T = TypeVar("T")


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields a row per number of tables and ranks, budget, and share of tables with frequencies."""
    for count, frequencies in itertools.product(args.tables, args.frequencies):
        tables = make_tables(count, args.seed)
        constraints = make_constraints(tables, frequencies, args.seed)
        for ranks, budget, host in itertools.product(args.ranks, args.budgets, args.host_budgets):
            yield {
                "tables": count,
                "ranks": ranks,
                "budget": budget,
                "host": host,
                "frequencies": frequencies,
                "batch": args.batch,
                "seed": args.seed,
                **planned(args, tables, constraints, ranks, budget, host),
            }


def planned(
    args: argparse.Namespace,
    tables: list[EmbeddingBagConfig],
    constraints: dict[str, ParameterConstraints],
    ranks: int,
    budget: float,
    host: float,
) -> dict[str, object]:
    """Times a plan, and compares it with bounds and with TorchRec's plan."""
    dense = dense_bytes(tables)
    topology = Topology(
        world_size=ranks,
        local_world_size=min(ranks, 8),
        compute_device="cuda",
        hbm_cap=round(budget * dense / ranks),
        ddr_cap=max(round(host * dense / ranks), 1),
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=args.batch,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    model = make_model(tables)
    with reported("Plans", show=False) as progress:
        plan, costs = timed(lambda: planner.plan(model, get_default_sharders()))
    figures: dict[str, object] = dict.fromkeys(FIGURES, "")
    missing = plan if isinstance(plan, str) else ""
    if not isinstance(plan, str):
        figures = compared(planner, list(plan.plan[""].reports.values()), plan.memory)
    stock: dict[str, object] = {"stock_seconds": "", "stock_ms": ""}
    if budget >= args.stock_budget:
        stock = by_stock(args, topology, tables, constraints, planner._space)
    return {**costs, "tried": progress.done, "missing": missing, **figures, **stock}


def timed(work: Callable[[], T]) -> tuple[T | str, dict[str, object]]:
    """Returns the result of ``work``, or the message of a planner's error, and the costs."""
    before = _memory("VmRSS")
    _forget_peak()
    begin, cpu = time.perf_counter(), time.process_time()
    result: T | str
    try:
        result = work()
    except PlannerError as error:
        found = re.search(r"lack (.*? bytes\))", str(error))
        result = found[1] if found else str(error)
    return result, {
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "peak_mib": max(_memory("VmHWM") - before, 0) >> 10,
    }


def _memory(name: str) -> int:
    """Returns a memory figure of this process in KiB; 0 if the system does not report it."""
    try:
        found = re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _forget_peak() -> None:
    """Resets the peak memory of this process if the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def compared(
    planner: EmbeddingShardingPlanner, reports: list[TableReport], memory: list[RankMemory]
) -> dict[str, object]:
    """Compares loss and time of a plan with bounds."""
    options = planner._best_plan or []
    losses = [report.loss.value for report in reports if report.loss is not None]
    space = planner._least_loss
    # The variants of all tables would not fit into memory. Only large tables can save enough.
    size = {option.name: option.tensor.shape.numel() for option in options}
    largest = sorted(size, key=lambda name: -size[name])[: 3 * len(losses) + 64]
    tables = {(option.path, option.name) for option in options if option.name in set(largest)}
    levels = space._levels(
        planner._space, planner._available_topology(), thinning=Thinning(tables, stride=1)
    )
    budgets = [m.hbm.budget for m in memory]
    used = [m.hbm.budget - m.hbm.free for m in memory]
    scarce = [ScarceResource(levels, lambda level: level.hbm, sum(budgets))]
    forced = sum(each.lossless is None for each in levels.values())
    fewest = (scarce[0].min_lossy_tables() or 0) + forced
    bound = tightest_bound(scarce, len(losses) - forced)
    costs = sorted(bound.costs.values())[: len(losses) - forced]
    times = times_of(options, [[shard.rank for shard in o.shards] for o in options], len(memory))
    return {
        "lossy": len(losses),
        "fewest": fewest,
        "loss": round(sum(losses), 5),
        "least_loss": round(max(bound.base + sum(costs), 0.0), 5),
        "step_ms": round(max(times), 4),
        "balanced_ms": round(sum(times) / len(times), 4),
        "bytes_ratio": round(max(used) * len(used) / sum(used), 3),
        "free": round(1 - sum(used) / sum(budgets), 4),
    }


def times_of(
    options: Sequence[ShardingOption], places: Sequence[Sequence[int | None]], ranks: int
) -> list[float]:
    """Returns the time of a step on each rank."""
    times = [0.0] * ranks
    for option, ranks_of_option in zip(options, places, strict=True):
        for shard, rank in zip(option.shards, ranks_of_option, strict=True):
            assert shard.perf is not None
            assert rank is not None
            times[rank] += shard.perf.total
    return times


def by_stock(
    args: argparse.Namespace,
    topology: Topology,
    tables: list[EmbeddingBagConfig],
    constraints: dict[str, ParameterConstraints],
    space: Sequence[ShardingOption],
) -> dict[str, object]:
    """Returns the costs of TorchRec's planner, and the time of its plan by our estimates."""
    planner = StockPlanner(
        topology=topology,
        batch_size=args.batch,
        constraints={
            name: StockConstraints(
                compute_kernels=["fused"], pooling_factors=constraint.pooling_factors
            )
            for name, constraint in constraints.items()
        },
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=[],
        timeout_seconds=args.stock_seconds,
    )
    model = make_model(tables)
    plan, costs = timed(lambda: planner.plan(model, get_default_sharders()))
    if isinstance(plan, str):
        return {"stock_seconds": costs["seconds"], "stock_ms": ""}
    backend_space = {(o.name, o.sharding_type): o for o in space if o.compute_kernel == "fused"}
    chosen = planner._best_plan or []
    times = times_of(
        [backend_space[option.name, option.sharding_type] for option in chosen],
        [[shard.rank for shard in option.shards] for option in chosen],
        topology.world_size,
    )
    return {"stock_seconds": costs["seconds"], "stock_ms": round(max(times), 4)}


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=AtLeast(1), nargs="+", default=[20, 100, 300])
    parser.add_argument("--ranks", type=AtLeast(1), nargs="+", default=[8, 64, 256])
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.0, 1.0, 0.5, 0.2])
    parser.add_argument("--host-budgets", type=float, nargs="+", default=[0.0])
    parser.add_argument("--frequencies", type=float, nargs="+", default=[0.5])
    parser.add_argument("--batch", type=AtLeast(1), default=1024, help="of a rank")
    parser.add_argument("--stock-budget", type=float, default=2.0)
    parser.add_argument("--stock-seconds", type=AtLeast(1), default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
