"""Plans of models with many tables on many hosts are found, no slower than TorchRec's, or refused
with a table's name."""

from __future__ import annotations

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner as StockPlanner
from torchrec.distributed.planner import ParameterConstraints as StockConstraints
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from tests.support.models import make_model
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.planner.options import is_backend_option

pytestmark = pytest.mark.compat


def _tables(rows, dim=64):
    return [
        EmbeddingBagConfig(
            name=f"t{at}", feature_names=[f"f{at}"], num_embeddings=count, embedding_dim=dim
        )
        for at, count in enumerate(rows)
    ]


def _given(tables, ranks, hbm, constraint):
    return {
        "topology": Topology(
            world_size=ranks,
            local_world_size=min(ranks, 8),
            compute_device="cuda",
            hbm_cap=hbm,
            ddr_cap=1,
        ),
        "batch_size": 64,
        "constraints": {table.name: constraint for table in tables},
        "storage_reservation": FixedPercentageStorageReservation(0.0),
    }


def _step(planner, options, ranks):
    """The slowest rank's time by this planner's estimates."""
    times = [0.0] * ranks
    own = {
        (option.name, option.sharding_type): option
        for option in planner._space
        if not is_backend_option(option)
    }
    for option in options:
        shards = (
            option.shards
            if is_backend_option(option)
            else own[option.name, option.sharding_type].shards
        )
        for shard, placed in zip(shards, option.shards, strict=True):
            times[placed.rank] += shard.perf.total
    return max(times)


@pytest.mark.parametrize(("ranks", "number"), [(8, 20), (16, 14)])
def test_no_slower_than_torchrecs_plan_where_all_fits(ranks, number):
    tables = _tables([10 ** (3 + at % 4) for at in range(number)])
    hbm = 4 * 64 * sum(table.num_embeddings for table in tables) // ranks * 2 + (8 << 20)
    planner = EmbeddingShardingPlanner(
        **_given(tables, ranks, hbm, ParameterConstraints(compute_kernels=["fused", "hkv", "tt"]))
    )
    planner.plan(make_model(tables), get_default_sharders())
    stock = StockPlanner(
        **_given(tables, ranks, hbm, StockConstraints(compute_kernels=["fused"])), stats=[]
    )
    stock.plan(make_model(tables), get_default_sharders())
    elapsed = _step(planner, planner._best_plan, ranks)
    assert elapsed <= _step(planner, stock._best_plan, ranks) * (1 + 1e-9)


def _gradient_time(ranks):
    """Estimated time to send the gradients of a replicated table of a million rows: a ``tt`` table
    with these ranks, or a dense one if ``ranks`` is None."""
    tables, sharding = _tables([1_000_000]), ["data_parallel"]
    if ranks is None:
        constraint = StockConstraints(compute_kernels=["dense"], sharding_types=sharding)
        planner = StockPlanner(**_given(tables, 8, 1 << 40, constraint), stats=[])
    else:
        options = TTOptions(ranks=ranks, p=(100, 100, 100), q=(4, 4, 4))
        constraint = ParameterConstraints(
            compute_kernels=["tt"], sharding_types=sharding, options=options
        )
        planner = EmbeddingShardingPlanner(**_given(tables, 8, 1 << 40, constraint))
    planner.plan(make_model(tables), get_default_sharders())
    (option,) = planner._best_plan
    return option.shards[0].perf.bwd_comms


def test_replicated_compressed_tables_send_the_gradients_of_their_cores():
    cores = {rank: 400 * rank + 400 * rank * rank + 400 * rank for rank in (8, 16)}
    assert _gradient_time(16) / _gradient_time(8) == pytest.approx(cores[16] / cores[8])
    # TorchRec adds the optimizer's time, at the kernel's bandwidth.
    sent = cores[8] / (1_000_000 * 64) * _gradient_time(None)
    assert sent <= _gradient_time(8) <= 3 * sent


def test_few_tables_on_ranks_with_room_for_about_one_shard():
    tables = _tables([40_000] * 13, dim=256)
    # Buffers of one table, for the batches of all ranks, take half of a rank.
    buffers = 16 * 64 * 256 * 4
    planner = EmbeddingShardingPlanner(
        **_given(
            tables, 16, 5 * buffers, ParameterConstraints(compute_kernels=["fused", "hkv", "tt"])
        )
    )
    plan = planner.plan(make_model(tables), get_default_sharders())
    assert all(memory.hbm.free >= 0 for memory in plan.memory)


def test_shards_that_fit_no_rank_are_named():
    tables = _tables([1000] * 13 + [40_000_000], dim=256)
    planner = EmbeddingShardingPlanner(
        **_given(tables, 8, 200 << 20, ParameterConstraints(compute_kernels=["fused", "hkv"]))
    )
    with pytest.raises(PlannerError) as refusal:
        planner.plan(make_model(tables), get_default_sharders())
    text = str(refusal.value)
    assert " of HBM and 8 B of host memory for tables lack " in text
    _, _, last = text.partition("A rank has 200.0 MiB of HBM and 1 B of host memory, but a shard ")
    assert last.startswith("needs: 'ebc.embedding_bags.t13' at least 4.8 GiB of HBM (fused, ")
    assert "t12" not in last
