"""reshard moves all tables to another plan; contents stay, and training continues."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.checkpoint_models import (
    evaluate,
    features,
    joined,
    make_tables,
    model_contents,
    train,
)
from tests.support.models import plan_model
from torchrec_hkv import ParameterConstraints, checkpoint, get_default_sharders
from torchrec_hkv.hash_table import MinFrequency

TYPES = ["row_wise", "column_wise", "table_wise"]


def _plan(world_size, device, sharding_type, optimizer, **options):
    """The plan of the same tables under another sharding type."""
    return make_tables(world_size, device, sharding_type, optimizer, **options)._plan


def _reshard(rank, world_size, device, types, optimizer, options, folder):
    model, twin = (
        make_tables(world_size, device, types[0], optimizer, **options) for _ in range(2)
    )
    train(model, rank, device, range(6))
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.07
    checkpoint.save(folder, model, model.fused_optimizer)
    checkpoint.load(folder, twin, twin.fused_optimizer)
    before = checkpoint.digest(model), model_contents(model, optimizer), evaluate(model, device)
    plan = _plan(world_size, device, types[1], optimizer, **options)
    assert checkpoint.reshard(model, plan) == 0
    after = checkpoint.digest(model), model_contents(model, optimizer), evaluate(model, device)
    assert before[0] == after[0]
    torch.testing.assert_close(after[2], before[2])
    assert {group["lr"] for group in model.fused_optimizer.param_groups} == {0.07}
    assert model.module.ebc.module_sharding_plan["lru"].sharding_type == types[1]
    # Training goes on as it would have, that of the stock and the Tensor-Train table, too. Where
    # ranks count ids, or column shards have sums of their own, it depends on the sharding.
    outputs = [train(one, rank, device, range(6, 9)) for one in (model, twin)]
    if not options and optimizer == "adam":
        torch.testing.assert_close(*outputs)
    assert model.state_dict().keys() == twin.state_dict().keys()
    return before[1], after[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "types", "optimizer", "counts"),
    [
        (2, ("row_wise", "column_wise"), "adam", False),
        (2, ("row_wise", "table_wise"), "adam", True),
        (2, ("table_wise", "column_wise"), "rowwise_adagrad", False),
        (3, ("column_wise", "row_wise"), "adam", False),
        (3, ("table_wise", "row_wise"), "rowwise_adagrad", False),
    ],
)
def test_all_stays(run_ranks, tmp_path, world_size, types, optimizer, counts):
    options = {"admission": MinFrequency(2, entries=64)} if counts else {}
    arguments = (types, optimizer, options, tmp_path / "saved")
    results = run_ranks(world_size, _reshard, *arguments)
    before, after = ([result[k] for result in results] for k in (0, 1))
    assert joined(before) == joined(after)


def _dense(rank, world_size, device, folder, optimizer):
    options = {"dense": True, "kinds": {"lfu": "fused"}, "rows": 64}
    if optimizer == "adam":  # which stock tables lack on a CPU
        options = {"dense": True, "kinds": {"stock": "tt"}, "rows": 256}
    model = make_tables(world_size, device, "row_wise", optimizer, **options)

    def steps(one, numbers):
        outputs = []
        for step in numbers:
            output = one(features(device, 1000 * rank + step, 60, names=()))
            output.square().sum().backward()
            outputs.append(output.detach().cpu())
        return torch.cat(outputs)

    twin = make_tables(world_size, device, "row_wise", optimizer, **options)
    steps(model, range(4))
    checkpoint.save(folder, model, model.fused_optimizer)
    checkpoint.load(folder, twin, twin.fused_optimizer)
    plan = _plan(world_size, device, "column_wise", optimizer, **options)
    assert checkpoint.reshard(model, plan) == 0
    torch.testing.assert_close(steps(model, range(4, 8)), steps(twin, range(4, 8)))
    return True


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_dense_and_stock_tables(optimizer, run_ranks, tmp_path):
    assert run_ranks(2, _dense, tmp_path / "saved", optimizer) == [True, True]


def _refusals(rank, world_size, device):
    model = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(3))
    digest = checkpoint.digest(model)
    cases = {
        "has options": {"eviction": "lru"},
        "has backend 'hkv', but the plan says": {"kinds": {"lru": "fused"}},
    }
    for sentence, options in cases.items():
        plan = _plan(world_size, device, "column_wise", "adam", **options)
        with pytest.raises(ValueError, match=sentence):
            checkpoint.reshard(model, plan)
    plan = _plan(world_size, device, "column_wise", "adam")
    tables = dict(plan.plan["ebc"])
    tables["other"] = tables.pop("lru")
    plan.plan["ebc"] = tables
    with pytest.raises(ValueError, match="but the model has"):
        checkpoint.reshard(model, plan)
    del plan.plan["ebc"]
    with pytest.raises(ValueError, match="The plan has no module 'ebc'"):
        checkpoint.reshard(model, plan)
    with pytest.raises(ValueError, match="must be a DistributedModelParallel"):
        checkpoint.reshard(model.module, plan)
    same = model._plan
    collection = model.module.ebc
    assert checkpoint.reshard(model, same) == 0
    assert model.module.ebc is collection
    return checkpoint.digest(model) == digest


def test_refusals(run_ranks):
    assert run_ranks(2, _refusals) == [True, True]


def _full(rank, world_size, device):
    model = make_tables(world_size, device, "table_wise", rows=192)
    train(model, rank, device, range(60))
    digest, collection = checkpoint.digest(model), model.module.ebc
    plan = _plan(world_size, device, "row_wise", "adam", rows=192)
    with pytest.raises(ValueError, match="found no slot"):
        checkpoint.reshard(model, plan)
    assert model.module.ebc is collection
    assert checkpoint.digest(model) == digest
    lost = checkpoint.reshard(model, plan, allow_loss=True)
    now = checkpoint.digest(model)
    before, after = (
        sum(int(value.partition("-")[0]) for value in values.values()) for values in (digest, now)
    )
    assert before - after == lost > 0
    return lost


def test_a_full_table(run_ranks):
    assert len(set(run_ranks(3, _full))) == 1


class _Dense(torch.nn.Module):
    """A model whose dense parameters are wrapped by DDP."""

    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, feature_names=[name], embedding_dim=8, num_embeddings=400)
            for name in ("hash", "stock")
        ]
        self.ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.over = torch.nn.Linear(16, 1)
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1})

    def forward(self, features):
        return self.over(self.ebc(features).values())


def _beside_dense(rank, world_size, device, folder):
    def plan(sharding_type):
        constraints = {
            name: ParameterConstraints(compute_kernels=[kernel], sharding_types=[sharding_type])
            for name, kernel in {"hash": "hkv", "stock": "fused"}.items()
        }
        return plan_model(_Dense(), constraints, world_size, device)

    def train_step(seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 300, (32,), generator=generator).to(device)
        lengths = torch.full((16,), 2, device=device)
        batch = KeyedJaggedTensor(keys=["hash", "stock"], values=ids, lengths=lengths)
        output = model(batch)
        output.sum().backward()
        return output.detach()

    sharders = get_default_sharders()
    model = DistributedModelParallel(
        _Dense(), device=device, plan=plan("row_wise"), sharders=sharders
    )
    assert isinstance(model._dmp_wrapped_module, DistributedDataParallel)
    for step in range(4):
        train_step(10 * rank + step)
    keys, names = sorted(model.state_dict()), sorted(model.fused_optimizer.params)
    digest = checkpoint.digest(model)
    rows = torch.cat([part for _, part in checkpoint.export_rows(model, "stock")])
    checkpoint.reshard(model, plan("table_wise"))
    assert checkpoint.digest(model) == digest
    assert torch.cat([part for _, part in checkpoint.export_rows(model, "stock")]).equal(rows)
    checkpoint.reshard(model, plan("row_wise"))
    assert checkpoint.digest(model) == digest
    assert sorted(model.state_dict()) == keys
    assert sorted(model.fused_optimizer.params) == names
    checkpoint.save(folder, model, model.fused_optimizer)
    checkpoint.load(folder, model, model.fused_optimizer)
    return digest == checkpoint.digest(model) and bool(train_step(rank).isfinite().all())


def test_beside_dense_parameters(run_ranks, tmp_path):
    assert run_ranks(2, _beside_dense, tmp_path / "saved") == [True, True]
