"""The planner counts the bytes of tables on backends, and of stock buffers."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.optim import RowWiseAdagrad

from tests.support.models import make_model, topology
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, backends
from torchrec_hkv.backends import OptimizerSpec
from torchrec_hkv.compat import stock_table_bytes
from torchrec_hkv.planner.options import is_backend_option, shards_of
from torchrec_hkv.sharding.modules.sharders import (
    BackendEmbeddingBagCollectionSharder,
    get_default_sharders,
)

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("planned_for", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["toy", "hkv"])
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_tables_and_buffers(planned_for, backend, sharding_type):
    table = EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=16, feature_names=["f"])
    model = make_model([table], RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6})
    constraint = ParameterConstraints(
        compute_kernels=[backend, "fused"], sharding_types=[sharding_type]
    )
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device(planned_for)), constraints={"t": constraint}
    )
    options = planner._enumerator.enumerate(model, get_default_sharders())
    (backend_option,) = [option for option in options if is_backend_option(option)]
    (stock,) = [option for option in options if option.compute_kernel == "fused"]
    shards = shards_of(backend_option)
    for mine, expected, counted, shard in zip(
        backend_option.shards, stock.shards, stock_table_bytes(stock), shards, strict=True
    ):
        taken = backends.get(backend).storage(
            shard, OptimizerSpec("rowwise_adagrad", 1e-6), planned_for
        )
        # Stock: rows and optimizer state, and buffers, all in one memory.
        is_cpu = planned_for == "cpu"
        buffers = (expected.storage.ddr if is_cpu else expected.storage.hbm) - counted
        assert counted == shard.capacity * 16 * 4 + shard.capacity * 4
        assert mine.storage.hbm == taken.hbm + (0 if is_cpu else buffers)
        assert mine.storage.ddr == taken.host + (buffers if is_cpu else 0)
        assert mine.perf.total > 0


def _counted(backend, optimizer, fused_params):
    """Bytes of the table on a backend; and of rows and states of the stock table."""
    table = EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=16, feature_names=["f"])
    constraint = ParameterConstraints(
        compute_kernels=[backend, "fused"], sharding_types=["table_wise"]
    )
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device("cpu")), constraints={"t": constraint}
    )
    sharders = [BackendEmbeddingBagCollectionSharder(fused_params)]
    options = planner._enumerator.enumerate(make_model([table], optimizer), sharders)
    (backend_option,) = [option for option in options if is_backend_option(option)]
    (stock,) = [option for option in options if option.compute_kernel == "fused"]
    return backend_option.shards[0].storage.ddr, stock_table_bytes(stock)


@pytest.mark.parametrize("fused_params", [None, {"learning_rate": 0.1}])
@pytest.mark.parametrize("backend", ["hkv", "tt"])
def test_without_an_optimizer_there_are_no_states(backend, fused_params):
    """Without an optimizer neither table has states: SGD needs none."""
    ours, stock = _counted(backend, None, fused_params)
    assert stock == [1000 * 16 * 4]
    assert ours == _counted(backend, torch.optim.SGD, None)[0]
    assert ours < _counted(backend, torch.optim.Adagrad, None)[0]


def test_stock_tables_are_counted_as_torchrec_does():
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"]),
        EmbeddingBagConfig(name="s", num_embeddings=100, embedding_dim=8, feature_names=["g"]),
    ]
    planner = EmbeddingShardingPlanner(
        topology=topology(2, torch.device("cpu")),
        constraints={"t": ParameterConstraints(compute_kernels=["toy"])},
    )
    options = planner._enumerator.enumerate(make_model(tables), get_default_sharders())
    stock = [option for option in options if option.name == "s"]
    before = [(shard.storage, shard.perf) for option in stock for shard in option.shards]
    assert issubclass(type(planner._enumerator.storage_estimator), EmbeddingStorageEstimator)
    alone = EmbeddingShardingPlanner(topology=topology(2, torch.device("cpu")))
    free = alone._enumerator.enumerate(make_model(tables), get_default_sharders())
    stock_alone = [option for option in free if option.name == "s"]
    assert before == [(s.storage, s.perf) for option in stock_alone for s in option.shards]
