"""Exchanging tables in groups, or with different wire dtypes, equals one exchange of all."""

from __future__ import annotations

import pytest
import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.exchanges import number_of_exchanges
from tests.support.models import Model, shard_model
from torchrec_hkv import ParameterConstraints, get_default_sharders
from torchrec_hkv.sharding import (
    BackendEmbeddingBagCollectionSharder,
    BackendEmbeddingCollectionSharder,
)
from torchrec_hkv.sharding.dists.exchange_groups import Exchange

pytestmark = pytest.mark.compat

NAMES = ["a", "b", "c", "d", "e"]
ROWS, BATCH, DIMS = 400, 8, [8, 16, 4, 12, 8]


def _model(is_sequence):
    if is_sequence:
        tables = [
            EmbeddingConfig(
                name=name, num_embeddings=ROWS, embedding_dim=8, feature_names=[f"f_{name}"]
            )
            for name in NAMES
        ]
        collection = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    else:
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"f_{name}"]
            )
            for name, dim in zip(NAMES, DIMS, strict=True)
        ]
        collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    return Sequences(collection) if is_sequence else Model(collection)


class Sequences(torch.nn.Module):
    """Rows of all features, concatenated."""

    def __init__(self, collection):
        super().__init__()
        self.ec = collection

    def forward(self, features):
        rows = self.ec(features)
        return torch.cat([rows[f"f_{name}"].values() for name in NAMES])


def _train(rank, world_size, device, sharding_type, is_sequence, kernels, arguments):
    """Outputs of some steps, the number of exchanges, and the tables of each."""
    make = (
        BackendEmbeddingCollectionSharder if is_sequence else BackendEmbeddingBagCollectionSharder
    )
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernels[i % len(kernels)]],
            sharding_types=[sharding_type],
            min_partition=4,
        )
        for i, name in enumerate(NAMES)
    }
    model = shard_model(_model(is_sequence), constraints, world_size, device, [make(**arguments)])
    collection = model.module.ec if is_sequence else model.module.ebc
    if "fused" in kernels:
        for key, weight in model.state_dict().items():
            if "embedding" in key and hasattr(weight, "local_shards"):
                for shard in weight.local_shards():
                    if shard.tensor.shape[0] == shard.metadata.shard_sizes[0] and (
                        NAMES.index(key.split(".")[-2]) % len(kernels) == kernels.index("fused")
                    ):
                        shard.tensor.fill_(0.125)
    generator = torch.Generator().manual_seed(rank)
    outputs = []
    for _ in range(3):
        lengths = torch.randint(0, 4, (len(NAMES) * BATCH,), generator=generator)
        ids = torch.randint(100, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor(
            [f"f_{name}" for name in NAMES], ids.to(device), lengths=lengths.to(device)
        )
        output = model(features)
        (output.square().sum() / 10).backward()
        outputs.append(output.detach().cpu())
    return outputs, number_of_exchanges(collection), sorted(model.state_dict())


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("kernels", [["hkv"], ["hkv", "fused"]])
def test_groups_change_nothing_but_the_number_of_exchanges(
    run_ranks, sharding_type, is_sequence, kernels
):
    alone = run_ranks(2, _train, sharding_type, is_sequence, kernels, {})
    for groups in (2, 9):
        results = run_ranks(2, _train, sharding_type, is_sequence, kernels, {"num_groups": groups})
        for (one, count, keys), (many, made, more_keys) in zip(alone, results, strict=True):
            assert count == 1
            is_whole = is_sequence and sharding_type == "column_wise"
            assert made == (1 if is_whole else min(groups, len(NAMES)))
            assert keys == more_keys
            for left, right in zip(one, many, strict=True):
                torch.testing.assert_close(left, right)


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize("is_sequence", [False, True])
def test_a_table_has_a_wire_of_its_own(run_ranks, sharding_type, is_sequence):
    exact = run_ranks(2, _train, sharding_type, is_sequence, ["hkv"], {})
    told = {"wire_dtype": {"b": "bf16", "d": torch.float16}}
    results = run_ranks(2, _train, sharding_type, is_sequence, ["hkv"], told)
    for (one, _, _), (other, made, _) in zip(exact, results, strict=True):
        assert made == 3
        if is_sequence:
            assert not torch.equal(one[0], other[0])
            continue
        columns = zip(NAMES, one[0].split(DIMS, 1), other[0].split(DIMS, 1), strict=True)
        for name, left, right in columns:
            assert torch.equal(left, right) == (name not in "bd")
            dtype = {"b": torch.bfloat16, "d": torch.float16}.get(name, torch.float32)
            # Row-wise, each rank's partial sum is rounded on the wire before the final sum.
            if sharding_type == "table_wise":
                assert torch.equal(right, left.to(dtype).float())
            torch.testing.assert_close(left, right, rtol=0.02, atol=1e-3)


def test_one_wire_for_all(run_ranks):
    exact = run_ranks(2, _train, "table_wise", False, ["hkv"], {})
    results = run_ranks(2, _train, "table_wise", False, ["hkv"], {"wire_dtype": "fp16"})
    for (one, _, _), (other, made, _) in zip(exact, results, strict=True):
        assert made == 1
        assert torch.equal(other[0], one[0].half().float())


def test_groups_are_balanced_by_the_columns_that_are_sent():
    tables = dict(zip(NAMES, DIMS, strict=True))
    for count in (1, 2, 3, 4, 5, 6):
        made = Exchange(count).split(
            {"row_wise": list(tables), "data_parallel": ["x", "y"]},
            {id(name): name for name in [*tables, "x", "y"]},
            {id(name): tables.get(name, 1) for name in [*tables, "x", "y"]},
        )
        assert made.pop("data_parallel") == ["x", "y"]
        groups = list(made.values())
        assert len(groups) == min(count, 5)
        assert [name for group in groups for name in group] == NAMES
        assert all(groups)
        if count == 2:
            assert [sum(tables[name] for name in group) for group in groups] == [24, 24]


@pytest.mark.parametrize(
    ("variables", "groups", "wires"),
    [
        ({}, 1, {}),
        ({"EMB_NUM_GROUPS": "3"}, 3, {}),
        ({"EMB_WIRE_DTYPE": "fp16"}, 1, {"": "fp16"}),
        ({"EMB_WIRE_DTYPE": "user=fp16, page=bf16"}, 1, {"user": "fp16", "page": "bf16"}),
    ],
)
def test_environment(monkeypatch, variables, groups, wires):
    for name, value in variables.items():
        monkeypatch.setenv(f"TORCHREC_HKV_{name}", value)
    for sharder in get_default_sharders():
        if hasattr(sharder, "_exchange"):
            assert sharder._exchange == Exchange(groups, wires, is_checked=False)
    told = BackendEmbeddingBagCollectionSharder(num_groups=2, wire_dtype="bf16")
    assert told._exchange == Exchange(2, {"": "bf16"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_groups": 0}, "num_groups is 0"),
        ({"num_groups": 1.5}, "num_groups is 1.5"),
        ({"wire_dtype": "fp4"}, r"wire dtype is 'fp4', but must be one of \['fp32', 'fp16'"),
        ({"wire_dtype": {"t": torch.float64}}, "wire dtype of table 't' is 'torch.float64'"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BackendEmbeddingBagCollectionSharder(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EMB_NUM_GROUPS", "none", "TORCHREC_HKV_EMB_NUM_GROUPS is 'none'"),
        ("EMB_NUM_GROUPS", "0", "must be a whole number of at least 1"),
        ("EMB_WIRE_DTYPE", "a=", "must be a value, or values by table"),
        ("EMB_WIRE_DTYPE", "=fp16", "must be a value, or values by table"),
        ("EMB_WIRE_DTYPE", "fp4", "wire dtype is 'fp4'"),
    ],
)
def test_refused_variables(monkeypatch, name, value, message):
    monkeypatch.setenv(f"TORCHREC_HKV_{name}", value)
    with pytest.raises(ValueError, match=message):
        get_default_sharders()


def _unknown(rank, world_size, device):
    with pytest.raises(ValueError, match=r"Tables \['z'\] have wire dtypes") as refusal:
        _train(
            rank, world_size, device, "table_wise", False, ["hkv"], {"wire_dtype": {"z": "fp16"}}
        )
    return str(refusal.value)


def test_a_wire_for_a_table_that_is_not_there(run_ranks):
    assert "'a', 'b', 'c', 'd', 'e'" in run_ranks(1, _unknown)[0]
