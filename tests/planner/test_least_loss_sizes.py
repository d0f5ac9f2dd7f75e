"""The sizes of open tables are the best of all combinations."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from tests.support.models import make_model
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.planner import IdFrequencies

pytestmark = pytest.mark.compat

_DIM = 16
_RANKS = [1, 2, 3, *range(4, 257, 4), *range(272, 1025, 16)]


def _planner(constraints, room):
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device="cpu", ddr_cap=room),
        batch_size=8,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )


def _sizes(kernel, rows):
    if kernel == "tt":
        ranks = [
            r for r in _RANKS if TTOptions(ranks=r).shape(rows, _DIM).num_elements < rows * _DIM
        ]
        return [TTOptions(ranks=rank) for rank in ranks]
    return [HKVOptions(capacity=int(rows * 0.97**step)) for step in range(1, 182)]


def _alone(table, kernel, frequencies):
    """Bytes and loss of a table at each size, each planned separately."""
    found = []
    for options in _sizes(kernel, table.num_embeddings):
        constraint = ParameterConstraints(
            compute_kernels=[kernel],
            sharding_types=["table_wise"],
            options=options,
            frequencies=frequencies,
        )
        planner = _planner({table.name: constraint}, 1 << 40)
        plan = planner.plan(make_model([table]), get_default_sharders())
        loss = plan.plan["ebc"].reports[table.name].loss
        found.append((plan.memory[0].host.used, 0.0 if loss is None else loss.value))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kernel"), [(0, "tt"), (1, "tt"), (2, "hkv"), (3, "hkv")])
def test_two_tables(seed, kernel):
    draw = random.Random(seed)
    tables, constraints, alone, dense = [], {}, [], 0
    for name in ("a", "b"):
        rows = draw.randrange(1000, 9000)
        table = EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=_DIM, feature_names=[name]
        )
        counts = torch.arange(1, rows + 1, dtype=torch.float64) ** -draw.uniform(0.3, 1.3)
        frequencies = IdFrequencies.of_counts(1e6 * counts)
        constraints[name] = ParameterConstraints(
            compute_kernels=["fused", kernel],
            sharding_types=["table_wise"],
            frequencies=frequencies,
        )
        tables.append(table)
        alone.append(_alone(table, kernel, frequencies))
        dense += rows * _DIM * 4
    both = 0
    for _ in range(4):
        room = round(dense * draw.uniform(0.15, 0.4))
        fitting = [
            one[1] + other[1]
            for one, other in itertools.product(*alone)
            if one[0] + other[0] <= room
        ]
        plan = _planner(constraints, room).plan(make_model(tables), get_default_sharders())
        losses = [r.loss.value for r in plan.plan["ebc"].reports.values() if r.loss is not None]
        assert plan.memory[0].host.used <= room
        if len(losses) == 2:
            both += 1
            assert sum(losses) == pytest.approx(min(fitting))
    assert both
