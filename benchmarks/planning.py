"""How long planning takes for many tables, and how close its plans are to bounds.

    python -m benchmarks planning --out benchmarks/results/planning.csv

Tables have rows by a power law and 16 to 128 columns, and each may be on ``fused``, ``hkv`` or
``tt``. ``budget`` is the HBM of all ranks over the bytes of the dense rows; there is no host
memory. ``frequencies`` come from the JSON of a replay of ids by a power law. ``cpu_seconds`` is
processor time, which other processes disturb less than ``seconds``.

``lossy`` is the number of tables that lose quality, and ``fewest`` a bound that no plan is below.
``loss`` is the estimated loss, and ``least_loss`` the bound of a relaxation for as many tables:
parts of levels may be taken, and memory is that of all ranks together. ``step_ms`` is the time of
the slowest rank, and ``balanced_ms`` that of all ranks if they shared the load evenly.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.planner import IdFrequencies
from torchrec_hkv.planner.prices import Scarce, tightest
from torchrec_hkv.planner.thinning import Thinning
from torchrec_hkv.replay import Curve, Point, Policy, Replayed, ReplayedLog

KEYS = ("tables", "ranks", "budget", "frequencies", "batch", "seed")
KERNELS = ("fused", "hkv", "tt")
#: Rows of the largest table and the exponent by which the others are smaller.
LARGEST, DECAY, LEAST = 200_000_000, 1.2, 100
#: Exponents of the laws by which ids are looked up, lookups for each id.
POWERS, LOOKUPS = (0.8, 1.2), 20


def make_tables(count: int, seed: int) -> list[EmbeddingBagConfig]:
    """Tables in any order."""
    draw = random.Random(seed)
    rows = [max(int(LARGEST * (at + 1) ** -DECAY), LEAST) for at in range(count)]
    draw.shuffle(rows)
    return [
        EmbeddingBagConfig(
            name=f"t{at}",
            feature_names=[f"f{at}"],
            num_embeddings=number,
            embedding_dim=draw.choice([16, 32, 64, 128]),
        )
        for at, number in enumerate(rows)
    ]


def replayed(table: EmbeddingBagConfig, power: float) -> Replayed:
    """What a replay finds of ids by a power law."""
    ids = table.num_embeddings
    # Ranks of ids: one by one, then together where counts differ by less than 1 %.
    bounds, at = [], 1
    while at <= ids:
        bounds.append(at)
        at = max(at + 1, int(at * (1 + 0.01 / power)))
    ends = [*bounds[1:], ids + 1]
    weights = [(end - begin, begin**-power) for begin, end in zip(bounds, ends, strict=True)]
    scale = LOOKUPS * ids / sum(number * weight for number, weight in weights)
    seen = IdFrequencies(tuple((number, scale * weight) for number, weight in weights), 0, ids - 1)
    points = []
    for part in (64, 16, 4, 1):
        rows = max(ids // part, 1)
        if points and rows == points[-1].rows:
            continue
        rate = 0.95 * seen.share_of(rows)
        points.append(Point(rows, rate, 0.0, 0, 0, 0, 0, 0, rows, rows * 4 * table.embedding_dim))
    curve = Curve(Policy("lfu"), tuple(points))
    return Replayed(table.name, LOOKUPS * ids, ids, 0.95, seen, (curve,))


def constraints_of(
    tables: Sequence[EmbeddingBagConfig], frequencies: bool, seed: int
) -> dict[str, ParameterConstraints]:
    """Constraints that leave the backend open."""
    found = {table.name: ParameterConstraints() for table in tables}
    if frequencies:
        draw = random.Random(seed)
        log = ReplayedLog(
            8192, 1.0, {table.name: replayed(table, draw.uniform(*POWERS)) for table in tables}
        )
        with tempfile.TemporaryDirectory() as folder:
            log.write(Path(folder) / "replay.json")
            found = ReplayedLog.read(Path(folder) / "replay.json").constraints()
    for constraint in found.values():
        constraint.compute_kernels = list(KERNELS)
    return found


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each number of tables, ranks, budget, and with and without frequencies."""
    for count, frequencies in itertools.product(args.tables, args.frequencies):
        tables = make_tables(count, args.seed)
        constraints = constraints_of(tables, frequencies, args.seed)
        for ranks, budget in itertools.product(args.ranks, args.budgets):
            yield {
                "tables": count,
                "ranks": ranks,
                "budget": budget,
                "frequencies": int(frequencies),
                "batch": args.batch,
                "seed": args.seed,
                **planned(args, tables, constraints, ranks, budget),
            }


def planned(
    args: argparse.Namespace,
    tables: list[EmbeddingBagConfig],
    constraints: dict[str, ParameterConstraints],
    ranks: int,
    budget: float,
) -> dict[str, object]:
    """Times a plan, and compares it with bounds."""
    model = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 1e-3})
    dense = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks,
            local_world_size=min(ranks, 8),
            compute_device="cuda",
            hbm_cap=round(budget * dense / ranks),
            ddr_cap=1,
        ),
        batch_size=args.batch,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        plan = planner.plan(model, get_default_sharders())
    except PlannerError:
        plan = None
    times = {
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }
    figures: dict[str, object] = dict.fromkeys(
        ("lossy", "fewest", "loss", "least_loss", "step_ms", "balanced_ms", "free"), ""
    )
    if plan is not None:
        figures = compared(planner, plan.plan[""].reports.values(), plan.memory)
    return {**times, **figures}


def compared(planner, reports, memory) -> dict[str, object]:
    """What a plan loses and takes beside bounds."""
    options = planner._best_plan
    losses = [report.loss.value for report in reports if report.loss is not None]
    space = planner._least_loss
    # The variants of all tables would not fit into memory. Only large tables can save enough.
    size = {option.name: option.tensor.shape.numel() for option in options}
    largest = sorted(size, key=lambda name: -size[name])[: 3 * len(losses) + 64]
    tables = {(option.path, option.name) for option in options if option.name in set(largest)}
    levels = space._levels(planner._space, planner._room(), thinning=Thinning(tables, every=1))
    scarce = [Scarce(levels, lambda level: level.hbm, sum(m.hbm.budget for m in memory))]
    forced = sum(each.whole is None for each in levels.values())
    fewest = scarce[0].fewest() + forced
    bound = tightest(scarce, len(losses) - forced)
    costs = sorted(bound.costs.values())[: len(losses) - forced]
    times = [0.0] * len(memory)
    for option in options:
        for shard in option.shards:
            times[shard.rank] += shard.perf.total
    return {
        "lossy": len(losses),
        "fewest": fewest,
        "loss": round(sum(losses), 5),
        "least_loss": round(max(bound.base + sum(costs), 0.0), 5),
        "step_ms": round(max(times), 4),
        "balanced_ms": round(sum(times) / len(times), 4),
        "free": round(sum(m.hbm.free for m in memory) / sum(m.hbm.budget for m in memory), 4),
    }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=AtLeast(1), nargs="+", default=[26, 100, 500, 1000])
    parser.add_argument("--ranks", type=AtLeast(1), nargs="+", default=[8, 64])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.5, 0.2, 0.05])
    parser.add_argument("--frequencies", type=int, nargs="+", choices=(0, 1), default=[0, 1])
    parser.add_argument("--batch", type=AtLeast(1), default=1024, help="of a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
