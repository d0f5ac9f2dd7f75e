"""Dtypes that users request for tables, and the dtypes that tables then have."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.table_dtypes import with_data_types


def _tables():
    return [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=4, feature_names=[name])
        for name in ("t", "s")
    ]


def _types(tables):
    return {table.name: table.data_type for table in tables}


def test_for_all_and_by_table(monkeypatch):
    assert _types(with_data_types(_tables())) == {"t": DataType.FP32, "s": DataType.FP32}
    assert _types(with_data_types(_tables(), "fp16")) == {"t": DataType.FP16, "s": DataType.FP16}
    monkeypatch.setenv("TORCHREC_HKV_EMB_DTYPE", "t=bf16")
    assert _types(with_data_types(_tables())) == {"t": DataType.BF16, "s": DataType.FP32}
    assert _types(with_data_types(_tables(), {"s": "fp16"})) == {
        "t": DataType.FP32,
        "s": DataType.FP16,
    }
    given = _tables()
    with_data_types(given, "bf16")
    assert _types(given) == {"t": DataType.FP32, "s": DataType.FP32}


def _rows(rank, world_size, device):
    tables = with_data_types(_tables(), {"t": "bf16", "s": "fp16"})
    constraints = {
        "t": ParameterConstraints(compute_kernels=["tt"], sharding_types=["table_wise"]),
        "s": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise"]),
    }
    model = shard_model(make_model(tables), constraints, world_size, device)
    ids = torch.arange(4, device=device)
    features = KeyedJaggedTensor(["t", "s"], ids, lengths=torch.ones(4, device=device).long())
    output = model(features)
    output.sum().backward()
    state = model.state_dict()
    return {
        key: weight.local_shards()[0].tensor.dtype
        for key, weight in state.items()
        if "tt_core_0" in key or key.endswith("s.weight")
    }


def test_tables_of_these_types_train(run_ranks):
    (dtypes,) = run_ranks(1, _rows)
    assert sorted(map(str, dtypes.values())) == ["torch.bfloat16", "torch.float16"]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("fp8", "data type is 'fp8', but must be one of"),
        ({"z": "fp16"}, r"Tables \['z'\] have data types, but the tables are \['s', 't'\]"),
    ],
)
def test_refused(told, message):
    with pytest.raises(ValueError, match=message):
        with_data_types(_tables(), told)
