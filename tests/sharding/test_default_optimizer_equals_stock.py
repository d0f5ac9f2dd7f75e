"""Tables without an optimizer use the defaults of stock ``fused`` tables."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from tests.support.backends import BACKENDS
from tests.support.dense_tables import dense_model, train_dense
from tests.support.pairwise import pairwise
from tests.support.sequences import SequenceScenario, train_sequences
from tests.support.stock_comparison import Scenario, train_with_stock

pytestmark = pytest.mark.compat

#: Fused parameters that name no optimizer, or leave its arguments to their defaults.
FUSED_PARAMS = {
    "nothing": None,
    "learning rate": {"learning_rate": 0.1},
    "clipping": {"gradient_clipping": True, "max_gradient": 0.25},
    "clipping by default": {"learning_rate": 0.05, "gradient_clipping": True},
    "defaults": {
        "eps": 1e-8,
        "beta1": 0.9,
        "eta": 0.001,
        "max_norm": 0.0,
        "weight_decay": 0.0,
        "weight_decay_mode": WeightDecayMode.NONE,
        "stochastic_rounding": True,
    },
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": 1e-4},
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-4},
}


def _check(outcomes):
    for outcome in outcomes:
        stock, backend_losses = outcome.losses.unbind(1)
        torch.testing.assert_close(backend_losses, stock, rtol=1e-5, atol=1e-5)
        assert stock[-1] != stock[0]
        for rows in outcome.rows.values():
            torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("told", FUSED_PARAMS)
def test_pooled(run_ranks, told):
    scenario = Scenario("hkv", "row_wise", "sum", "none", fused_params=FUSED_PARAMS[told])
    _check(run_ranks(2, train_with_stock, scenario))


@pytest.mark.parametrize(
    ("backend", "sharding_type", "told"),
    pairwise(BACKENDS, ["table_wise", "column_wise"], ["nothing", "learning rate"]),
)
def test_sharding_types(run_ranks, backend, sharding_type, told):
    scenario = Scenario(backend, sharding_type, "mean", "none", fused_params=FUSED_PARAMS[told])
    _check(run_ranks(2, train_with_stock, scenario))


@pytest.mark.parametrize("told", ["nothing", "learning rate", "rowwise_adagrad"])
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_sequences(run_ranks, sharding_type, told):
    scenario = SequenceScenario("hkv", sharding_type, "none", fused_params=FUSED_PARAMS[told])
    _check(run_ranks(2, train_sequences, scenario))


def _dense(rank, world_size, device):
    types = ("row_wise", "table_wise")
    stock, backend = (dense_model(world_size, device, k, types, None, {}) for k in ("fused", "hkv"))
    backend.load_state_dict(stock.state_dict())
    outputs = [train_dense(model, rank, device, range(4)) for model in (stock, backend)]
    weights = [
        {
            key: [shard.tensor.cpu().clone() for shard in value.local_shards()]
            for key, value in model.state_dict().items()
        }
        for model in (stock, backend)
    ]
    return outputs, weights


def test_dense_tables(run_ranks):
    for (expected, got), (stock, backend) in run_ranks(2, _dense):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert stock.keys() == backend.keys()
        for key, shards in stock.items():
            torch.testing.assert_close(backend[key], shards, rtol=1e-5, atol=1e-6)
