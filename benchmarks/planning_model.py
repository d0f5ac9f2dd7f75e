"""Synthetic models with many tables, like click models, for :mod:`benchmarks.planning`."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_hkv import ParameterConstraints
from torchrec_hkv.planner import IdFrequencies
from torchrec_hkv.replay import Curve, Point, Policy, Replayed, ReplayedLog

KERNELS = ("fused", "hkv", "tt")
#: Rows of the smallest and of the largest possible table, and the exponent of their power law.
MIN, LARGEST, POWER = 1_000, 300_000_000, 0.2
DIMS = (16, 32, 64, 128, 256)
#: Pooling factors.
POOLING = (1.0, 1.0, 1.0, 4.0, 20.0)
#: Exponents of the power laws of lookups, and lookups per id.
POWERS, LOOKUPS = (0.8, 1.2), 20


def make_tables(count: int, seed: int) -> list[EmbeddingBagConfig]:
    """Creates tables in random order, whose rows are quantiles of a bounded power law."""
    draw = random.Random(seed)
    share = 1 - (MIN / LARGEST) ** POWER
    rows = [round(MIN * (1 - share * (at + 0.5) / count) ** (-1 / POWER)) for at in range(count)]
    draw.shuffle(rows)
    return [
        EmbeddingBagConfig(
            name=f"t{at}",
            feature_names=[f"f{at}"],
            num_embeddings=number,
            embedding_dim=draw.choice(DIMS),
        )
        for at, number in enumerate(rows)
    ]


def make_model(tables: list[EmbeddingBagConfig]) -> EmbeddingBagCollection:
    """Creates a model on the meta device."""
    model = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 1e-3})
    return model


def dense_bytes(tables: Sequence[EmbeddingBagConfig]) -> int:
    """Returns the bytes of all rows."""
    return sum(4 * table.num_embeddings * table.embedding_dim for table in tables)


def replayed(table: EmbeddingBagConfig, power: float) -> Replayed:
    """Computes the result of a replay of ids by a power law."""
    ids = table.num_embeddings
    # Ranks of ids: first one by one, then in groups whose counts differ by less than 1 %.
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


def make_constraints(
    tables: Sequence[EmbeddingBagConfig], frequencies: float, seed: int
) -> dict[str, ParameterConstraints]:
    """Creates constraints that leave the kernel and the sharding type open.

    Args:
        tables: the tables.
        frequencies: share of the tables with frequencies from the JSON of a replay.
        seed: seed of the random choices.
    """
    draw = random.Random(seed)
    seen = [table for table in tables if draw.random() < frequencies]
    found = {table.name: ParameterConstraints() for table in tables}
    if seen:
        powers = {table.name: draw.uniform(*POWERS) for table in seen}
        log = ReplayedLog(8192, 1.0, {t.name: replayed(t, powers[t.name]) for t in seen})
        with tempfile.TemporaryDirectory() as folder:
            log.write(Path(folder) / "replay.json")
            found |= ReplayedLog.read(Path(folder) / "replay.json").constraints()
    for constraint in found.values():
        constraint.compute_kernels = list(KERNELS)
        constraint.pooling_factors = [draw.choice(POOLING)]
    return found
