"""Options with their own rows and bits train like tables whose configs have these values."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from tests.support.models import local_tables, make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints

pytestmark = pytest.mark.compat

_ROWS, _CAPACITY, _DIM, _BATCH = 4000, 512, 8, 64
_FLOATS, _HALVES = DataType.FP32, DataType.FP16


def _trained(rank, world_size, device, sharding_type, rows, data_type, options):
    """Outputs of some steps, the counters, and the state."""
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=_DIM,
            feature_names=[f"f_{name}"],
            weight_init_min=-0.1,
            weight_init_max=0.1,
            data_type=data_type,
        )
        for name in ("t", "plain")
    ]
    tables[1].num_embeddings, tables[1].data_type = _ROWS, _FLOATS
    constraints = {
        name: ParameterConstraints(
            compute_kernels=["hkv"], sharding_types=[sharding_type], options=own, min_partition=4
        )
        for name, own in (("t", options), ("plain", HKVOptions(deterministic=True)))
    }
    model = shard_model(
        make_model(tables, RowWiseAdagrad, {"lr": 0.1}), constraints, world_size, device
    )
    generator = torch.Generator().manual_seed(rank)
    outputs = []
    for _ in range(6):
        ids = torch.randint(-(1 << 62), 1 << 62, (4 * _BATCH,), generator=generator) % 3001 - 1500
        features = KeyedJaggedTensor(
            ["f_t", "f_plain"], ids.to(device), lengths=torch.full((2 * _BATCH,), 2).to(device)
        )
        output = model(features)
        (output * output).sum().backward()
        outputs.append(output.detach().cpu())
    counters = [table.counters(key) for key, table in local_tables(model).items()]
    weights = {
        key: [shard.tensor.cpu() for shard in value.local_shards()]
        for key, value in model.state_dict().items()
        if key.endswith(".t.weight")
    }
    return torch.stack(outputs), counters, weights


def _counters(results):
    return sorted(str(count) for _, counters, _ in results for count in counters)


def _weights(results):
    return [shard for _, _, weights in results for key in sorted(weights) for shard in weights[key]]


@pytest.mark.parametrize(
    ("config", "options", "as_config"),
    [
        ((_ROWS, _FLOATS), HKVOptions(capacity=_CAPACITY), (_CAPACITY, _FLOATS)),
        ((_ROWS, _FLOATS), HKVOptions(row_dtype=torch.float16), (_ROWS, _HALVES)),
        (
            (_CAPACITY, _HALVES),
            HKVOptions(capacity=_ROWS, row_dtype=torch.float32),
            (_ROWS, _FLOATS),
        ),
    ],
    ids=["fewer rows", "fewer bits", "more of both"],
)
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_as_in_the_config(run_ranks, world_size, sharding_type, config, options, as_config):
    told = HKVOptions(capacity=options.capacity, row_dtype=options.row_dtype, deterministic=True)
    own = run_ranks(world_size, _trained, sharding_type, *config, told)
    other = run_ranks(
        world_size, _trained, sharding_type, *as_config, HKVOptions(deterministic=True)
    )
    for (output, _, _), (wanted, _, _) in zip(own, other, strict=True):
        assert torch.equal(output, wanted)
    # Plans may place whole tables on different ranks.
    assert _counters(own) == _counters(other)
    for shard, row in zip(_weights(own), _weights(other), strict=True):
        assert shard.dtype == row.dtype
        assert torch.equal(shard, row)
    if as_config[0] == _CAPACITY:
        assert any(count["evicted"] > 0 for _, counters, _ in own for count in counters)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, 1 << 63])
def test_impossible_capacities(value):
    with pytest.raises(ValueError, match=f"capacity is {value!r}, but must be None or a number"):
        HKVOptions(capacity=value)


@pytest.mark.parametrize("value", [torch.float64, torch.int32, "fp16", 16])
def test_impossible_data_types(value):
    with pytest.raises(ValueError, match=r"row_dtype is .*, but must be None or one of torch"):
        HKVOptions(row_dtype=value)


def test_a_dense_table_has_all_its_rows():
    with pytest.raises(ValueError, match="capacity is 5 and dense is True"):
        HKVOptions(capacity=5, dense=True)
