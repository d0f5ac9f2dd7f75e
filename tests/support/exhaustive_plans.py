"""Enumerates all plans of small models, for tests of the planner's choice.

The best plan has the fewest tables with loss, then the lowest loss, then the lowest time of the
slowest rank. Bytes and times of each option are the planner's estimates; losses, placements and the
order of plans are computed here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError

from tests.support.calibrations import calibration
from tests.support.models import make_model
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.planner import IdFrequencies, QualityCurve

DIM, RANKS = 16, 2
CURVES = {
    "compression": {0.5: 0.01, 0.1: 0.03, 0.01: 0.2},
    "rows": {0.9: 0.002, 0.3: 0.3},
    "precision": {0.5: 0.001},
}


def curve_at(kind, share):
    """Interpolates linearly in the logarithm between points, and extrapolates the last segment."""
    points = [(0.0, 0.0)] + [(-math.log(s), loss) for s, loss in CURVES[kind].items()]
    x = -math.log(share)
    segments = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((s for s in segments if x <= s[1][0]), segments[-1])
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


def loss_of(option, counts, rows):
    """Computes the loss of an option from first principles; None without loss."""
    options = getattr(option, "backend_options", None)
    if isinstance(options, TTOptions):
        (p0, p1, p2), (q0, q1, q2), rank = options.p, options.q, options.ranks
        cores = p0 * q0 * rank + rank * p1 * q1 * rank + rank * p2 * q2
        kept_share = cores / (DIM * min(rows, len(counts)))
        return None if kept_share >= 1 else curve_at("compression", kept_share)
    if not isinstance(options, HKVOptions):
        return None
    total = None
    if options.capacity is not None and options.capacity < rows:
        covered = sum(sorted(counts, reverse=True)[: options.capacity])
        total = curve_at("rows", min(covered / sum(counts), 1 - 1e-9))
    if options.row_dtype is not None:
        total = (total or 0.0) + curve_at("precision", 0.5)
    return total


def placements(option, num_ranks=RANKS):
    """Yields all placements of the shards of an option: (bytes, time) by rank."""
    parts = [(s.storage.hbm + s.storage.ddr, s.perf.total) for s in option.shards]
    if option.partition_by == "uniform":
        yield [(each,) for each in parts]
        return
    for ranks in itertools.product(range(num_ranks), repeat=len(parts)):
        yield [
            tuple(part for part, rank in zip(parts, ranks, strict=True) if rank == first_rank)
            for first_rank in range(num_ranks)
        ]


def best_plan(by_table, room, max_loss=math.inf, max_time=math.inf, fastest=False):
    """Returns the key of the best plan: (tables with loss, loss, time). None if nothing fits.

    Args:
        by_table: options of each table, with their losses.
        room: bytes of each rank, or a list of bytes by rank.
        max_loss: largest loss of all tables together.
        max_time: largest time of the slowest rank.
        fastest: whether the fastest plan is the best.
    """
    rooms = bytes_by_rank(room)
    best = None
    every = [
        [
            (option_loss, way)
            for option, option_loss in table
            for way in placements(option, len(rooms))
        ]
        for table in by_table
    ]
    for plan in itertools.product(*every):
        losses = [loss for loss, _ in plan if loss is not None]
        ranks = [[p for _, way in plan for p in way[rank]] for rank in range(len(rooms))]
        time = max(sum(t for _, t in rank) for rank in ranks)
        if any(sum(b for b, _ in rank) > limit for rank, limit in zip(ranks, rooms, strict=True)):
            continue
        if sum(losses) > max_loss + 1e-12 or time > max_time:
            continue
        key = (len(losses), sum(losses), time)
        if best is None or (by_time(key) < by_time(best) if fastest else key < best):
            best = key
    return best


def bytes_by_rank(room):
    """Returns the bytes of each rank."""
    return [room] * RANKS if isinstance(room, int) else list(room)


def by_time(key):
    """Returns the part of a plan's key that orders plans when loss is traded for time."""
    return (key[2], key[1])


def case(seed, sharding_types=("table_wise", "row_wise"), more_kernels=()):
    """Creates tables with a few options each, for ranks on a CPU."""
    draw = random.Random(seed)
    tables, constraints, counts = [], {}, {}
    for index in range(draw.choice([2, 2, 3])):
        name, (p, rows) = f"t{index}", draw.choice([((8, 8, 16), 1000), ((16, 16, 16), 4000)])
        counts[name] = [1e6 / (i + 1) ** draw.uniform(0.2, 1.5) for i in range(rows)]
        options = [
            TTOptions(ranks=rank, p=p, q=(2, 2, 4)) for rank in draw.sample(range(1, 12), k=2)
        ]
        capacity = draw.randrange(rows // 8, rows)
        options += [HKVOptions(capacity=capacity)]
        if draw.random() < 0.5:
            options += [HKVOptions(row_dtype=torch.float16)]
        constraints[name] = ParameterConstraints(
            compute_kernels=[
                *draw.choice([["fused", "hkv", "tt"], ["fused", "tt"], ["hkv", "tt"]]),
                *more_kernels,
            ],
            sharding_types=list(sharding_types),
            frequencies=IdFrequencies(tuple((1, count) for count in counts[name])),
            quality_curves={k: QualityCurve(tuple(v.items())) for k, v in CURVES.items()},
        )
        kernels = constraints[name].compute_kernels
        constraints[name].options = tuple(
            o for o in options if ("tt" if isinstance(o, TTOptions) else "hkv") in kernels
        )
        tables.append(
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{index}"]
            )
        )
    costs = {kernel: draw.uniform(1e-3, 9e-3) for kernel in ("fused", "hkv", "tt")}
    return make_model(tables), constraints, counts, costs, draw


def equal_tables(seed):
    """Creates tables that differ only in their number of lookups."""
    model, constraints, counts, costs, draw = case(seed)
    first = model.ebc.embedding_bag_configs()[0]
    names = [f"t{index}" for index in range(draw.choice([2, 3]))]
    constraints = {
        name: dataclasses.replace(constraints["t0"], pooling_factors=[draw.uniform(1, 40)])
        for name in names
    }
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=first.num_embeddings,
            embedding_dim=DIM,
            feature_names=[f"f{name}"],
        )
        for name in names
    ]
    return make_model(tables), constraints, dict.fromkeys(names, counts["t0"]), costs, draw


def make_planner(constraints, costs, room, **kwargs):
    """Creates a planner that may use all memory for tables.

    Args:
        constraints: constraints by table.
        costs: milliseconds of a table's step, by kernel.
        room: bytes of each rank, or a list of bytes by rank.
        kwargs: other arguments of the planner.
    """
    rooms = bytes_by_rank(room)
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=len(rooms),
            local_world_size=len(rooms),
            compute_device="cpu",
            custom_topology_data=CustomTopologyData({"ddr_cap": rooms}, len(rooms)),
        ),
        batch_size=8,
        constraints=constraints,
        calibration=calibration(**costs),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        **kwargs,
    )


def all_options(model, constraints, counts, costs, room=1 << 40):
    """Returns the options of each table and the loss of each option.

    Args:
        model: model with the tables.
        constraints: constraints by table.
        counts: numbers of lookups of the ids, by table.
        costs: milliseconds of a table's step, by kernel.
        room: bytes by rank. TorchRec gives each rank the same share of a table's rows.
    """
    planner = make_planner(constraints, costs, room)
    by_table = {}
    for option in planner._enumerator.enumerate(model, get_default_sharders()):
        rows = option.tensor.shape[0]
        loss = loss_of(option, counts[option.name], rows)
        by_table.setdefault(option.name, []).append((option, loss))
    return list(by_table.values())


def planned(planner, model):
    """Returns the key of the planner's plan, or None if the planner refuses."""
    try:
        plan = planner.plan(model, get_default_sharders())
    except PlannerError:
        return None
    losses = [r.loss.value for r in plan.plan["ebc"].reports.values() if r.loss is not None]
    return len(losses), sum(losses), planner._perf_model.rate(planner._best_plan)


def draw_rank_bytes(by_table, draw):
    """Draws the bytes of a rank between those of the smallest and of the largest options."""
    sizes = [
        [sum(s.storage.hbm + s.storage.ddr for s in option.shards) for option, _ in table]
        for table in by_table
    ]
    minimum, maximum = sum(map(min, sizes)), sum(map(max, sizes))
    return [round(minimum / 2 + draw.random() ** 2 * (maximum - minimum / 2)) for _ in range(4)]


def same(planned, best):
    """Returns whether keys are equal except for rounding."""
    if best is None or planned is None:
        return planned is best
    return planned == (best[0], pytest.approx(best[1]), pytest.approx(best[2]))
