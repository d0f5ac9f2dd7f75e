"""Planners refuse impossible constraints at construction, with one sentence."""

from __future__ import annotations

import math

import pytest
import torch
from torchrec.distributed.planner import ParameterConstraints as StockParameterConstraints
from torchrec.modules.embedding_configs import DataType

from tests.support.models import topology
from tests.support.toy_backend import ToyOptions
from torchrec_hkv import EmbeddingShardingPlanner, HKVOptions, ParameterConstraints
from torchrec_hkv.planner import IdFrequencies
from torchrec_hkv.planner.constraints import Candidate, choices, translated

pytestmark = pytest.mark.compat

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (
            {"compute_kernels": ["hkw"]},
            r"compute kernel 'hkw', which is neither a registered backend \(\[.*'hkv'.*\]\)",
        ),
        ({"compute_kernels": ["customized_kernel"]}, "compute kernel 'customized_kernel'"),
        (
            {"compute_kernels": ["hkv", "tt"], "options": ToyOptions()},
            "has options ToyOptions: that backend takes HKVOptions",
        ),
        (
            {"compute_kernels": ["hkv"], "options": [HKVOptions(seed=1), HKVOptions(seed=1)]},
            "has equal options HKVOptions twice",
        ),
        ({"compute_kernels": ["hkv"], "frequencies": [1, 2]}, "must be an IdFrequencies"),
        (
            {"compute_kernels": ["toy"], "options": HKVOptions()},
            "backend 'toy' and has options HKVOptions: that backend takes ToyOptions",
        ),
        (
            {"compute_kernels": ["hkv"], "options": ToyOptions()},
            "backend 'hkv' and has options ToyOptions: that backend takes HKVOptions",
        ),
        ({"compute_kernels": ["fused"], "options": HKVOptions()}, "no backend that takes"),
        ({"options": HKVOptions()}, "no backend that takes"),
        (
            {"compute_kernels": ["toy"], "sharding_types": ["data_parallel"]},
            r"'data_parallel' on backend 'toy': allowed are \['column_wise', 'grid_shard', 'row",
        ),
        (
            {"compute_kernels": ["toy"], "sharding_types": ["data_parallel", "diagonal"]},
            "'data_parallel' on backend 'toy'",
        ),
        ({"compute_kernels": ["toy"], "enforce_hbm": True}, "enforce_hbm=True"),
        ({"compute_kernels": ["toy"], "stochastic_rounding": True}, "stochastic_rounding=True"),
        ({"compute_kernels": ["toy"], "use_virtual_table": True}, "use_virtual_table=True"),
        ({"compute_kernels": ["toy"], "output_dtype": DataType.FP16}, "output_dtype="),
        *(
            ({"compute_kernels": ["toy"], "min_partition": value}, "min_partition=.* positive int")
            for value in (0, -4, True, 2.5, "4")
        ),
        *(
            ({"compute_kernels": ["toy"], "pooling_factors": value}, "pooling_factors=.* must be")
            for value in ([], [-1.0], [math.nan], [math.inf], ["3"], [True], 3.0, "3")
        ),
        *(
            ({"compute_kernels": ["toy"], "num_poolings": value}, "num_poolings=.* must be")
            for value in ([], [0.0], [-1.0], [math.nan], [math.inf], ["3"], [True], 3.0, "3")
        ),
        *(
            ({"compute_kernels": ["toy"], "batch_sizes": value}, "batch_sizes=.* must be")
            for value in ([], [0], [-1], [math.nan], [math.inf], ["3"], [True], 3, "3")
        ),
    ],
)
def test_refused(constraint, message):
    with pytest.raises(ValueError, match=message) as refusal:
        EmbeddingShardingPlanner(
            topology=topology(2, CPU), constraints={"t": ParameterConstraints(**constraint)}
        )
    assert "Table 't'" in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_an_enumerator_of_the_users_is_refused():
    with pytest.raises(ValueError, match="does not know backends: leave it None"):
        EmbeddingShardingPlanner(topology=topology(2, CPU), enumerator=object())


def test_backends_become_the_kernel_that_torchrec_knows():
    options = ToyOptions(seed=4)
    constraints = {
        "ours": ParameterConstraints(compute_kernels=["toy"], options=options),
        "either": ParameterConstraints(compute_kernels=["fused", "toy"]),
        "any": ParameterConstraints(
            compute_kernels=["toy", "hkv"], options=[HKVOptions(seed=5), HKVOptions()]
        ),
        "counted": ParameterConstraints(frequencies=IdFrequencies.of_counts([1])),
        "stock": StockParameterConstraints(compute_kernels=["fused"]),
        "free": StockParameterConstraints(),
    }
    found = choices(constraints)
    assert set(found) == {"ours", "either", "any", "counted"}
    assert found["counted"].candidates == ()
    assert found["ours"].candidates == (Candidate("toy", options, "toy"),)
    assert found["ours"].is_settled
    assert found["either"].candidates == (Candidate("toy", ToyOptions(), "toy"),)
    assert not found["either"].is_settled
    assert found["any"].candidates == (
        Candidate("toy", ToyOptions(), "toy"),
        Candidate("hkv", HKVOptions(seed=5), "hkv (seed=5)"),
        Candidate("hkv", HKVOptions(), "hkv (defaults)"),
    )
    assert found["any"].backends == ["toy", "hkv"]
    assert not found["any"].has_stock
    assert not found["any"].is_settled
    kernels = {name: c.compute_kernels for name, c in translated(constraints, found).items()}
    assert kernels == {
        "ours": ["customized_kernel"],
        "either": ["fused", "customized_kernel"],
        "any": ["customized_kernel"],
        "counted": None,
        "stock": ["fused"],
        "free": None,
    }
    assert constraints["ours"].compute_kernels == ["toy"]


def test_options_count_in_the_hash():
    made = [ParameterConstraints(options=ToyOptions(seed=seed)) for seed in (1, 1, 2)]
    assert hash(made[0]) == hash(made[1])
    assert hash(made[0]) != hash(made[2])
