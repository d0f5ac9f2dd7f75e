"""Row-wise tables whose rows are exchanged in groups: parts of one sharding."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding import test_train_pipelines_evicting as pipelines
from tests.support.exchanges import number_of_exchanges
from tests.support.models import make_model, shard_model
from tests.support.pipelines import make_pipeline_model, pipeline_batch
from tests.support.stock_comparison import Scenario, train_with_stock
from torchrec_hkv import ParameterConstraints

pytestmark = pytest.mark.compat

GROUPS = "TORCHREC_HKV_EMB_NUM_GROUPS"


def _in_groups(rank, world_size, device, function, *arguments):
    os.environ[GROUPS] = "2"
    try:
        return function(rank, world_size, device, *arguments)
    finally:
        del os.environ[GROUPS]


def _exchanges(rank, world_size, device, sharding_type):
    """Exchanges of ids, and of rows, of a collection with one table of ours and one stock table."""
    model = make_pipeline_model(world_size, device, sharding_type)
    for step in range(2):
        model(pipeline_batch(rank, step, device))[0].backward()
    ebc = model.module.ebc
    of_ids = sum(
        isinstance(module, KJTAllToAll)
        for input_dist in ebc._input_dists
        for module in input_dist.modules()
    )
    return of_ids, number_of_exchanges(ebc)


@pytest.mark.parametrize(
    ("sharding_type", "exchanges"), [("row_wise", (1, 2)), ("table_wise", (2, 2))]
)
def test_one_exchange_of_ids(run_ranks, sharding_type, exchanges):
    assert run_ranks(2, _in_groups, _exchanges, sharding_type) == [exchanges] * 2


@pytest.mark.parametrize(
    "told",
    [
        {"pooling": "weighted"},
        {"pooling": "mean"},
        {"output": "fp16"},
        {"output": "fp16", "sharding_type": "table_wise"},
    ],
    ids=str,
)
def test_groups_change_nothing(run_ranks, told):
    """Groups do not change results, nor those of stock tables: table-wise, each group is on another
    rank."""
    scenario = dataclasses.replace(Scenario("hkv", "row_wise", "sum", "sgd"), **told)
    alone = run_ranks(2, train_with_stock, scenario)
    for one, many in zip(alone, run_ranks(2, _in_groups, train_with_stock, scenario), strict=True):
        bound = {"rtol": 1e-2, "atol": 1e-2} if scenario.output else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(one.losses, many.losses, **bound)
        torch.testing.assert_close(one.rows, many.rows, **bound)


def _batches_of_features(rank, world_size, device):
    """Batch sizes differ between features; for gloo, ranks have equal sizes in total."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=dim, feature_names=names)
        for name, dim, names in (("t", 4, ["f", "g"]), ("u", 8, ["h"]))
    ]
    constraint = ParameterConstraints(compute_kernels=["hkv"], sharding_types=["row_wise"])
    model = shard_model(make_model(tables), {"t": constraint, "u": constraint}, world_size, device)
    generator = torch.Generator().manual_seed(rank)
    outputs = []
    for _ in range(4):
        lengths = torch.randint(0, 4, (3 + 2 + 5,), generator=generator)
        features = KeyedJaggedTensor(
            ["f", "g", "h"],
            torch.randint(50, (int(lengths.sum()),), generator=generator),
            lengths=lengths,
            stride_per_key_per_rank=[[3], [2], [5]],
            inverse_indices=(
                ["f", "g", "h"],
                torch.tensor([[0, 1, 2, 2, 1], [1, 1, 0, 0, 1], [4, 3, 2, 1, 0]]),
            ),
        )
        output = model(features.to(device))
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return torch.stack(outputs)


def test_batch_sizes_of_features(run_ranks):
    alone = run_ranks(2, _batches_of_features)
    for one, many in zip(alone, run_ranks(2, _in_groups, _batches_of_features), strict=True):
        torch.testing.assert_close(one, many)
        assert not torch.equal(one[0], one[-1])


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pipeline(run_ranks, device_type):
    for counts in run_ranks(2, _in_groups, pipelines._run, "row_wise", TrainPipelineSparseDist):
        assert counts["t"] > 0


def _kernel_by_itself(rank, world_size, device):
    """Results of kernels that are called outside of their lookup, and of a step after that."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=dim, feature_names=[name])
        for name, dim in (("t", 4), ("u", 8))
    ]
    constraint = ParameterConstraints(compute_kernels=["hkv"], sharding_types=["row_wise"])
    model = shard_model(make_model(tables), {"t": constraint, "u": constraint}, world_size, device)
    features = KeyedJaggedTensor(["t", "u"], torch.arange(12), lengths=torch.full((6,), 2))
    features = features.to(device)
    before = model(features).detach().cpu()
    (lookup,) = model.module.ebc._lookups
    kernels = lookup._emb_modules
    rows = []
    for kernel, name in zip(kernels, ("t", "u"), strict=True):
        lengths = torch.zeros(3, dtype=torch.int64)
        ids = KeyedJaggedTensor([name], torch.empty(0, dtype=torch.int64), lengths=lengths)
        rows.append(kernel(ids.to(device)).detach().cpu())
    return before, rows, model(features).detach().cpu()


def test_a_kernel_by_itself(run_ranks):
    for before, rows, after in run_ranks(2, _in_groups, _kernel_by_itself):
        torch.testing.assert_close(before, after)
        assert [tuple(part.shape) for part in rows] == [(3, 4), (3, 8)]
