"""Tables on backends behind feature processors train like stock tables."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.support.backends import BACKENDS
from tests.support.models import topology
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    checkpoint,
    get_default_sharders,
    serving,
)
from torchrec_hkv.metrics import collect
from torchrec_hkv.sharding import BackendFeatureProcessedEmbeddingBagCollectionSharder

KEYS = ["f0", "f1"]
DIMS = {"f0": 8, "f1": 12}
IDS, LONGEST, BATCH, STEPS = 40, 5, 6, 8


class _Model(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bags(features)
        output = torch.cat([pooled[key] for key in KEYS], dim=1)
        return output.square().sum() / BATCH, output


def _make(kernel, sharding_type, is_collection, world_size, device, options=None):
    rows = IDS if kernel == "fused" else 16 * IDS
    tables = [
        EmbeddingBagConfig(
            name=f"t_{key}", feature_names=[key], embedding_dim=DIMS[key], num_embeddings=rows
        )
        for key in KEYS
    ]
    bags = EmbeddingBagCollection(tables, is_weighted=True, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.05})
    if is_collection:
        processors = PositionWeightedModuleCollection(dict.fromkeys(KEYS, LONGEST), device)
    else:
        processors = {key: PositionWeightedModule(LONGEST, device) for key in KEYS}
    model = _Model(FeatureProcessedEmbeddingBagCollection(bags, processors))
    constraints = {
        f"t_{key}": ParameterConstraints(
            compute_kernels=[kernel], sharding_types=[sharding_type], options=options
        )
        for key in KEYS
    }
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size, device), constraints=constraints
    )
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def _batch(generator, device):
    lengths = torch.randint(0, LONGEST + 1, (len(KEYS) * BATCH,), generator=generator)
    ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=generator)
    # Row-wise, TorchRec writes positions into a batch, so each model gets its own copy.
    return KeyedJaggedTensor(keys=list(KEYS), values=ids, lengths=lengths).to(device)


def _rows(model, device):
    """The row of each id, while all position weights are 1."""
    ids = torch.arange(IDS, device=device).repeat(len(KEYS))
    batch = KeyedJaggedTensor(keys=list(KEYS), values=ids, lengths=torch.ones_like(ids))
    model.eval()
    with torch.no_grad():
        rows = model(batch)[1].clone()
    model.train()
    return dict(zip(KEYS, rows.split([DIMS[key] for key in KEYS], dim=1), strict=True))


def _copy_rows(model, rows):
    state = model.state_dict()
    for key, values in rows.items():
        name = f"bags._embedding_bag_collection.embedding_bags.t_{key}.weight"
        for shard in state[name].local_shards():
            (row, column), (count, dim) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(values[row : row + count, column : column + dim])


def _positions(model):
    return dict(in_backward_optimizer_filter(model.named_parameters()))


def _beside_stock(rank, world_size, device, backend, sharding_type, is_collection, is_pipelined):
    models = [
        _make(kernel, sharding_type, is_collection, world_size, device)
        for kernel in ("fused", backend)
    ]
    _copy_rows(models[0], _rows(models[1], device))
    generator = torch.Generator().manual_seed(3)
    for parameters in zip(*(_positions(model).values() for model in models), strict=True):
        drawn = torch.rand(parameters[0].shape, generator=generator) + 0.5
        for parameter in parameters:
            parameter.data.copy_(drawn)
    results = []
    for model in models:
        optimizer = torch.optim.SGD(_positions(model).values(), lr=0.01)
        generator = torch.Generator().manual_seed(100 + rank)
        batches = (_batch(generator, device) for _ in range(STEPS))
        if is_pipelined:
            pipeline = TrainPipelineSparseDist(model, optimizer, device)
            outputs = [pipeline.progress(batches).detach() for _ in range(STEPS)]
        else:
            outputs = []
            for batch in batches:
                optimizer.zero_grad()
                loss, output = model(batch)
                loss.backward()
                optimizer.step()
                outputs.append(output.detach())
        results.append((outputs, [value.detach() for value in _positions(model).values()]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("sharding_type", "is_collection", "is_pipelined", "world_size"),
    [
        ("row_wise", False, False, 2),
        ("row_wise", True, True, 2),
        ("table_wise", True, False, 2),
        ("table_wise", False, True, 1),
        ("column_wise", True, False, 2),
    ],
)
def test_equal_to_stock(run_ranks, backend, sharding_type, is_collection, is_pipelined, world_size):
    arguments = (backend, sharding_type, is_collection, is_pipelined)
    for results in run_ranks(world_size, _beside_stock, *arguments):
        (stock, stock_positions), (ours, our_positions) = results
        assert not torch.equal(stock[0], stock[-1])
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(our_positions, stock_positions, rtol=1e-5, atol=1e-6)
        assert all((values != 1).all() for values in our_positions)


def _save_and_load(rank, world_size, device, folder):
    model = _make("hkv", "row_wise", True, world_size, device)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(_batch(generator, device))[0].backward()
    names = [f"bags._embedding_bag_collection.embedding_bags.t_{key}" for key in KEYS]
    metrics = collect(model, dist.group.WORLD)
    assert sorted(metrics) == names
    assert all(table.size > 0 for table in metrics.values())
    checkpoint.save(folder, model)
    other = _make("hkv", "row_wise", True, world_size, device)
    assert checkpoint.load(folder, other) == 0
    assert checkpoint.digest(other) == checkpoint.digest(model)
    assert sorted(checkpoint.digest(other)) == names
    rows, before = _rows(other, device), _rows(model, device)
    assert all(torch.equal(rows[key], before[key]) for key in KEYS)
    plan = _make("hkv", "table_wise", True, world_size, device)._plan
    with pytest.raises(ValueError, match="shards module 'bags' in another way, but only"):
        checkpoint.reshard(model, plan)
    with pytest.raises(ValueError, match="'bags' is a FeatureProcessedEmbeddingBagCollection"):
        serving.export(model, folder / "served", inputs=(_batch(generator, device),))


def test_checkpoint_metrics_and_refusals(run_ranks, tmp_path):
    run_ranks(2, _save_and_load, tmp_path / "saved")


def _scored(rank, world_size, device):
    options = HKVOptions(eviction="customized", score_feature="f1")
    with pytest.raises(ValueError, match="'t_f0' takes scores from its batches"):
        _make("hkv", "row_wise", True, world_size, device, options)


def test_scores_are_refused(run_ranks):
    run_ranks(1, _scored)


def test_a_sharder_of_stock_tables_is_refused():
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    with pytest.raises(TypeError, match="is a EmbeddingBagCollectionSharder, but must be a"):
        BackendFeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder())
