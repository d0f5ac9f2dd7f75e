"""For many tables only some sizes are tried; plans are about as good as with all sizes."""

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
    get_default_sharders,
)
from torchrec_hkv.backends import Kept
from torchrec_hkv.planner import IdFrequencies
from torchrec_hkv.planner.levels import LossLevel, TableLevels
from torchrec_hkv.planner.loss_bounds import ScarceResource
from torchrec_hkv.planner.losses import NO_LOSS, TableLoss
from torchrec_hkv.planner.options import is_backend_option
from torchrec_hkv.planner.search import LeastLossSearch
from torchrec_hkv.planner.thinning import Thinning, chains_of

pytestmark = pytest.mark.compat


def _level(size, loss=None):
    lost = NO_LOSS if loss is None else TableLoss(loss, (Kept("compression", 0.5, "kept"),))
    return LossLevel(lost, (), size, 0, size, () if loss is None else ("tt",))


@pytest.mark.parametrize("seed", range(20))
def test_tables_that_may_lose_are_those_of_all_sets_that_suffice(seed):
    draw = random.Random(seed)
    tables, smallest = {}, {}
    for index in range(7):
        whole = draw.choice([None, draw.randint(20, 200), draw.randint(20, 200)])
        sizes = sorted((draw.randint(1, 60) for _ in range(3)), reverse=True)
        lossy = tuple(_level(size, 0.1 * (i + 1)) for i, size in enumerate(sizes))
        tables[index] = TableLevels(None if whole is None else _level(whole), lossy)
        smallest[index] = sizes[-1]
    forced = {table for table, levels in tables.items() if levels.lossless is None}
    free = sorted(set(tables) - forced)
    maximum = sum(smallest[t] if t in forced else tables[t].lossless.hbm for t in tables)
    room = draw.randint(sum(smallest.values()), maximum)
    scarce = ScarceResource(tables, lambda level: level.hbm, room)
    for count in range(scarce.min_lossy_tables(), len(free) + 1):
        enough = set(forced)
        for chosen in itertools.combinations(free, count):
            lost = forced | set(chosen)
            taken = sum(smallest[t] if t in lost else tables[t].lossless.hbm for t in tables)
            if taken <= room:
                enough |= lost
        # A lossy variant that is larger than the table can't help, but may be included.
        assert enough <= scarce.tables_that_may_lose(count)
        if all(tables[t].lossless.hbm >= smallest[t] for t in free):
            assert scarce.tables_that_may_lose(count) == enough


@pytest.mark.parametrize("seed", range(20))
def test_small_tables_are_left_out_only_if_as_many_tables_have_to_lose(seed):
    draw = random.Random(seed)
    sizes = sorted((int(10 ** draw.uniform(1, 5)) for _ in range(60)), reverse=True)
    tables = {
        index: TableLevels(_level(size), (_level(size // draw.randint(2, 20), 0.1),))
        for index, size in enumerate(sizes)
    }
    saved = sorted((t.lossless.hbm - t.lossy[0].hbm for t in tables.values()), reverse=True)
    missing = draw.randint(1, sum(saved[:8]))
    fewest = next(n for n in range(61) if sum(saved[:n]) >= missing)
    option_selector = _OneRank(sum(sizes) - missing)
    ended = False
    for listed in range(1, 60):
        known = {
            index: levels if index < listed else TableLevels(levels.lossless, ())
            for index, levels in tables.items()
        }
        found = LeastLossSearch(known, option_selector).tables_that_may_lose(sizes[listed])
        if found is None:
            assert not ended
            continue
        ended = True
        chosen = sorted((saved_by(tables[index]) for index in found), reverse=True)
        assert sum(chosen[:fewest]) >= missing
    assert ended
    assert LeastLossSearch(tables, option_selector).tables_that_may_lose() is not None


def saved_by(levels):
    return levels.lossless.hbm - levels.lossy[0].hbm


class _OneRank:
    """The parts of a single rank that a search uses."""

    host, num_ranks, adds_times = 0, 1, False

    def __init__(self, room):
        self.hbm = room


class _Option:
    path, name = "", "t"
    backend_options = HKVOptions()


def test_the_ends_of_chains_and_the_neighbours_of_chosen_sizes_are_selected():
    rows = [HKVOptions(capacity=number) for number in range(100, 0, -1)]
    tiers = [HKVOptions(hbm_bytes=number) for number in (30, 20, 10)]
    chains = chains_of(HKVOptions(), [*rows, *tiers])
    assert chains == [rows, tiers]
    option = _Option()
    assert Thinning().selected(option, chains) == [rows[0], rows[-1], tiers[0], tiers[-1]]
    coarse = Thinning.coarse(None, ())
    some = coarse.selected(option, chains)
    assert {rows[0], rows[-1], tiers[0], tiers[-1]} <= set(some)
    assert len(some) < len(rows) / 4
    refined = coarse.refined({("", "t"): rows[40]})
    more = set(refined.selected(option, chains)) - set(some)
    assert {rows[39], rows[41]} <= more
    assert more < set(rows[30:51])
    assert Thinning.coarse([("", "other")], ()).selected(option, chains) == []
    assert Thinning.coarse([], [("", "t")]).selected(option, chains) == [*rows, *tiers]


def _planner(tables, constraints, share, ranks=2):
    dense = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks,
            local_world_size=ranks,
            compute_device="cuda",
            hbm_cap=round(dense * share / ranks) + (8 << 20),
            ddr_cap=1,
        ),
        batch_size=64,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )


def _tables(count, draw):
    return [
        EmbeddingBagConfig(
            name=f"t{index}",
            num_embeddings=int(10 ** draw.uniform(4.5, 6.5)),
            embedding_dim=draw.choice([16, 32, 64]),
            feature_names=[f"f{index}"],
        )
        for index in range(count)
    ]


def _some_are_frequent(ids):
    return IdFrequencies(((ids // 100, 200.0), (ids // 10, 5.0), (ids - ids // 100 - ids // 10, 1)))


@pytest.mark.parametrize(("seed", "share", "has_ids"), [(0, 0.3, False), (1, 0.3, True)])
def test_plans_are_as_good_as_those_of_all_sizes(seed, share, has_ids):
    draw = random.Random(seed)
    tables = _tables(16, draw)
    constraints = {
        table.name: ParameterConstraints(
            compute_kernels=["fused", "hkv", "tt"],
            frequencies=_some_are_frequent(table.num_embeddings) if has_ids else None,
        )
        for table in tables
    }
    planner = _planner(tables, constraints, share)
    model = make_model(tables, device=torch.device("meta"))
    reports = planner.plan(model, get_default_sharders()).plan["ebc"].reports
    losses = [report.loss.value for report in reports.values() if report.loss is not None]
    minimum = planner._least_loss
    room = planner._available_topology()
    tried = {option.backend_options for option in planner._best_plan if is_backend_option(option)}
    levels = minimum._levels(planner._space, room)
    best = LeastLossSearch(levels, minimum._option_selector(room)).least_loss()
    assert tried
    assert (
        0 < len(losses) <= sum(planner._enumerator.loss(option).is_lossy for option in best.options)
    )
    assert sum(losses) <= 1.02 * best.loss


def test_the_times_of_equal_shards_are_estimated_once_and_are_those_of_all():
    tables = _tables(3, random.Random(0))
    planner = _planner(tables, {}, 2.0, ranks=8)
    model = make_model(tables, device=torch.device("meta"))
    space = planner._enumerator.enumerate(model, get_default_sharders())
    assert {"row_wise", "table_wise", "column_wise"} <= {option.sharding_type for option in space}
    estimator = planner._enumerator.perf_estimator
    args, kwargs = estimator._handed_on
    found = [[vars(shard.perf).copy() for shard in option.shards] for option in space]
    assert len({id(s.perf) for option in space for s in option.shards}) == sum(map(len, found))
    estimator._stock.estimate(space, *args, **kwargs)  # every shard, as TorchRec counts
    assert found == [[vars(shard.perf) for shard in option.shards] for option in space]
