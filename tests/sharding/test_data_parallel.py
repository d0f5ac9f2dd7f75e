"""Data-parallel Tensor-Train tables train like table-wise ones, and stay equal on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import SGD
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.models import plan_model
from tests.support.stock_support import skip_unsupported_by_stock
from torchrec_hkv import HKVOptions, ParameterConstraints, TTOptions, get_default_sharders
from torchrec_hkv.sharding.modules.collection import BackendCollection

ROWS = {"t": 300, "u": 90, "h": 400, "s": 50}
# Table t has two features, and is updated once for both.
FEATURES = {"t": ["t1", "t2"], "u": ["u"], "h": ["h"], "s": ["s"]}
STEPS, DIM = 4, 8
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "clipped": (SGD, {"lr": 0.1, "gradient_clipping": True, "max_gradient": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3}),
}


class Model(torch.nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.embeddings = collection
        self.is_bags = isinstance(collection, EmbeddingBagCollection)
        configs = (
            collection.embedding_bag_configs() if self.is_bags else collection.embedding_configs()
        )
        self.keys = sorted(key for config in configs for key in config.feature_names)
        self.over = torch.nn.Linear(DIM, 1)

    def forward(self, features):
        out = self.embeddings(features)
        if not self.is_bags:
            out = {key: jagged.values() for key, jagged in out.items()}
        return torch.cat([self.over(out[key]) for key in self.keys])


def make(kind, optimizer, sharding_type, world_size, device, tables, **options):
    torch.manual_seed(0)
    names = {name: FEATURES[name] for name in tables}
    if kind == "sequences":
        configs = [
            EmbeddingConfig(
                name=n, num_embeddings=ROWS[n], embedding_dim=DIM, feature_names=f,
                weight_init_min=-0.5, weight_init_max=0.5,
            )
            for n, f in names.items()
        ]  # fmt: skip
        collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    else:
        pooling = PoolingType.MEAN if kind == "mean" else PoolingType.SUM
        configs = [
            EmbeddingBagConfig(
                name=n, num_embeddings=ROWS[n], embedding_dim=DIM, feature_names=f, pooling=pooling,
                weight_init_min=-0.5, weight_init_max=0.5,
            )
            for n, f in names.items()
        ]  # fmt: skip
        collection = EmbeddingBagCollection(
            tables=configs, device=torch.device("meta"), is_weighted=kind == "weighted"
        )
    kind_of, arguments = OPTIMIZERS[optimizer]
    apply_optimizer_in_backward(kind_of, collection.parameters(), dict(arguments))
    ours = {"compute_kernels": ["tt"], "sharding_types": [sharding_type]}
    constraints = {
        "t": ParameterConstraints(**ours, options=TTOptions(ranks=(5, 4), seed=3, **options)),
        "u": ParameterConstraints(**ours, options=TTOptions(ranks=3, num_cores=2)),
        "h": ParameterConstraints(compute_kernels=["hkv"], options=HKVOptions()),
        "s": ParameterConstraints(compute_kernels=["dense"], sharding_types=["data_parallel"]),
    }
    if kind == "sequences" and device.type == "cpu":
        # TorchRec's dense kernel pools sequences on a CPU.
        constraints["s"] = ParameterConstraints(
            compute_kernels=["fused"], sharding_types=["table_wise"]
        )
    constraints = {name: constraints[name] for name in tables}
    model = Model(collection)
    sharders = get_default_sharders()
    plan = plan_model(model, constraints, world_size, device, sharders)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def batch_of(step, rank, device, tables, weighted, sizes):
    generator = torch.Generator().manual_seed(100 * step + rank)
    keys, values, lengths = [], [], []
    for name in tables:
        for key in FEATURES[name]:
            length = torch.randint(0, 5, (sizes[rank],), generator=generator)
            keys.append(key)
            lengths.append(length)
            total = int(length.sum())
            values.append(torch.randint(0, ROWS[name], (total,), generator=generator))
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator).to(device) if weighted else None
    return KeyedJaggedTensor(
        keys=keys, values=ids.to(device), lengths=torch.cat(lengths).to(device), weights=weights
    )


def lookups_of(model):
    (collection,) = [m for m in model.modules() if isinstance(m, BackendCollection)]
    return collection.group_lookups()


def _train(rank, world_size, device, kind, optimizer, sharding_type, tables=("t", "u"), sizes=None):
    model = make(kind, optimizer, sharding_type, world_size, device, tables)
    sizes = sizes or [6] * world_size
    rest = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer_of_rest = torch.optim.SGD(rest, lr=0.01)
    outputs = []
    for step in range(STEPS):
        features = batch_of(step, rank, device, tables, kind == "weighted", sizes)
        out = model(features)
        outputs.append(out.detach().cpu())
        out.square().sum().backward()
        # Of stock tables and the dense layer, which are the same under both plans.
        optimizer_of_rest.step()
        optimizer_of_rest.zero_grad()
    local = {
        name: [core.cpu() for core in lookup.cores(name)]
        for name, lookup in lookups_of(model).items()
        if name in "tu"
    }
    everywhere = [None] * world_size
    dist.all_gather_object(everywhere, local)
    return outputs, everywhere


def check_alike(results, names, world_size):
    """Every rank has the same bits."""
    everywhere = results[0][1]
    for name in names:
        first = everywhere[0][name]
        for other in everywhere[1:]:
            assert all(map(torch.equal, first, other[name]))
    assert len(everywhere) == world_size
    return everywhere[0]


def compare(run_ranks, world_size, *arguments, **keywords):
    kind, optimizer, *rest = arguments
    parallel = run_ranks(world_size, _train, kind, optimizer, "data_parallel", *rest)
    cores = check_alike(parallel, "tu", world_size)
    wise = run_ranks(world_size, _train, kind, optimizer, "table_wise", *rest)
    for (ours, _), (reference, _) in zip(parallel, wise, strict=True):
        assert not torch.equal(ours[0], ours[-1])
        for one, other in zip(ours, reference, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for held in wise[0][1]:
        for name, expected in held.items():
            for one, other in zip(cores[name], expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("kind", ["sum", "sequences"])
def test_trains_as_table_wise(run_ranks, kind, optimizer):
    compare(run_ranks, 2, kind, optimizer)


@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_means_and_weights(run_ranks, kind):
    compare(run_ranks, 2, kind, "adagrad")


@pytest.mark.parametrize("world_size", [1, 3])
def test_numbers_of_ranks(run_ranks, world_size):
    compare(run_ranks, world_size, "sum", "sgd")


@pytest.mark.parametrize("kind", ["sum", "sequences"])
def test_beside_hash_and_replicated_stock_tables(run_ranks, kind):
    with skip_unsupported_by_stock():
        compare(run_ranks, 2, kind, "rowwise_adagrad", ("t", "h", "s", "u"))


def test_a_rank_without_a_batch(run_ranks):
    results = run_ranks(2, _train, "sum", "adam", "data_parallel", ("t", "u"), [6, 0])
    check_alike(results, "tu", 2)
    assert results[1][0][0].numel() == 0
