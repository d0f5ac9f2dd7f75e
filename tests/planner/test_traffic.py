"""Bytes between ranks in a step equal a count message by message; the report shows them."""

from __future__ import annotations

import itertools
import pickle

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology

from tests.support.models import make_model
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.planner.traffic import HostTopology, TableLookups, step_traffic

IDS, BAGS = 40.0, 10.0


def _messages(sharding_type, dims, hosts, pooled):
    """Yields ``(from, to, bytes)`` for each message of a step."""
    ranks, local = hosts.ranks, hosts.ranks_of_host
    everybody = range(ranks)
    outputs = BAGS if pooled else IDS
    if sharding_type == "row_wise":
        for a, b in itertools.permutations(everybody, 2):
            yield a, b, 8 * IDS / ranks + 4 * BAGS
            values = 4 * dims[0] * (outputs if pooled else outputs / ranks)
            yield a, b, values  # partial sums of b's bags
            yield a, b, values  # gradients of a's bags
    elif sharding_type in ("table_row_wise", "grid_shard"):
        for index, dim in enumerate(dims):
            # Shards lie on the ranks of the first host, then on those of the next.
            holder = index % ranks
            host = holder // local
            values = 4 * dim * BAGS
            for a in everybody:
                yield a, holder, 8 * IDS / local + 4 * BAGS
            for other in range(host * local, (host + 1) * local):
                for _ in range(hosts.hosts):
                    yield holder, other, values
                    yield other, holder, values
            for far in range(hosts.hosts):
                yield holder, far * local + holder % local, values
                yield far * local + holder % local, holder, values
    else:
        for index, dim in enumerate(dims):
            for a in everybody:
                yield a, index % ranks, 8 * IDS + 4 * BAGS
                yield index % ranks, a, 4 * dim * outputs
                yield a, index % ranks, 4 * dim * outputs


@pytest.mark.parametrize(("ranks", "local"), [(8, 4), (4, 4), (6, 2), (1, 1)])
@pytest.mark.parametrize(
    ("sharding_type", "pooled"),
    [
        ("row_wise", True),
        ("row_wise", False),
        ("table_wise", True),
        ("column_wise", True),
        ("column_wise", False),
        ("table_column_wise", True),
        ("table_row_wise", True),
        ("grid_shard", True),
    ],
)
def test_message_by_message(sharding_type, pooled, ranks, local):
    hosts = HostTopology(ranks, local)
    shards = {"row_wise": ranks, "table_wise": 1, "table_row_wise": local, "grid_shard": ranks}
    dims = [16] * shards.get(sharding_type, 3)
    found = step_traffic(TableLookups(sharding_type, dims, IDS, BAGS, pooled), hosts)
    intra = inter = 0.0
    for a, b, size in _messages(sharding_type, dims, hosts, pooled):
        if a != b and a // local == b // local:
            intra += size
        elif a // local != b // local:
            inter += size
    assert found.intra_host == pytest.approx(intra / ranks)
    assert found.inter_host == pytest.approx(inter / ranks)


def _plan(world_size, local, constraints, **kwargs):
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=10_000, embedding_dim=16, feature_names=[name])
        for name in constraints
    ]
    topology = Topology(world_size=world_size, local_world_size=local, compute_device="cpu")
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, batch_size=64, **kwargs
    )
    return planner.plan(make_model(tables), get_default_sharders()).plan["ebc"]


def _constraint(kernel, sharding_type):
    return ParameterConstraints(
        compute_kernels=[kernel], sharding_types=[sharding_type], pooling_factors=[4.0]
    )


def test_the_report_names_bytes_within_and_between_hosts():
    plan = _plan(4, 2, {"user": _constraint("hkv", "row_wise")})
    # 256 ids, 64 lengths, and 64 bags of 16 values in each direction.
    size = 8 * 256 / 4 + 4 * 64 + 2 * 4 * 64 * 16
    assert plan.traffic().intra_host == pytest.approx(size)
    assert plan.traffic().inter_host == pytest.approx(2 * size)
    text = " ".join(str(plan).split())
    assert "on average: 8.8 KiB to ranks of its host, 17.5 KiB to other hosts" in text
    assert "A rank sends" not in str(_plan(1, 1, {"user": _constraint("hkv", "row_wise")}))


def test_data_parallel_tables_average_gradients():
    plan = _plan(4, 2, {"user": _constraint("tt", "data_parallel")})
    cores = plan.reports["user"].traffic
    assert cores.intra_host == pytest.approx(cores.inter_host)
    assert cores.inter_host > 0
    assert cores.intra_host + cores.inter_host < 2 * 4 * 10_000 * 16


def test_the_report_names_bytes_of_syncs():
    constraints = {"user": _constraint("hkv", "row_wise"), "page": _constraint("fused", "row_wise")}
    plan = _plan(2, 2, constraints, replica_groups=3, sync_every=10)
    assert plan.reports["page"].sync_bytes == pytest.approx(2 * (2 / 3) * 4 * 16 * 5000)
    # In 10 steps, 2 ranks look up 512 of 10,000 ids each, and three groups three times as many.
    here = 10_000 * (1 - (1 - 1e-4) ** 5120) / 2
    anywhere = 10_000 * (1 - (1 - 1e-4) ** 15360) / 2
    # Each row is sent with its last step, its score, and this replica's count.
    size = 8 * here * 2 + 2 * (2 / 3) * anywhere * (4 * (16 + 2) + 3 * 8)
    assert plan.reports["user"].sync_bytes == pytest.approx(size)
    assert plan.sync_bytes(0) == pytest.approx(size + plan.reports["page"].sync_bytes)
    text = " ".join(str(plan).split())
    assert "A sync of 3 replicas, every 10 steps, has a rank send up to" in text
    assert "sync" not in str(_plan(2, 2, constraints))


def test_two_replicas_on_cpus_send_each_other_rows():
    plan = _plan(2, 2, {"user": _constraint("hkv", "row_wise")}, replica_groups=2, sync_every=10)
    here, anywhere = (10_000 * (1 - (1 - 1e-4) ** (5120 * n)) / 2 for n in (1, 2))
    # The last step is not sent separately, but as one of the columns.
    size = 8 * here + anywhere * (4 * (16 + 2) + 2 * 8)
    assert plan.reports["user"].sync_bytes == pytest.approx(size)


@pytest.mark.parametrize("argument", ["replica_groups", "sync_every"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_impossible_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument} is {value}, but must be an integer"):
        EmbeddingShardingPlanner(**{argument: value})


def test_plans_can_be_sent():
    plan = _plan(2, 2, {"user": _constraint("hkv", "row_wise")}, replica_groups=2)
    sent = pickle.loads(pickle.dumps(plan))
    assert str(sent) == str(plan)
