"""The backward trains rows as FBGEMM's table-batched embeddings do."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import (
    SGD,
    Constant,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    initial_rows,
)

OPTIMIZERS = {"sgd": SGD(), "rowwise_adagrad": RowWiseAdagrad(eps=1e-6)}
FBGEMM = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
ROWS = 60
STEPS = 20


def make_fbgemm(specs, features, optimizer, mean, device, names):
    gpu = device == "cuda"
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (
                ROWS,
                spec.dim,
                EmbeddingLocation.DEVICE if gpu else EmbeddingLocation.HOST,
                ComputeDevice.CUDA if gpu else ComputeDevice.CPU,
            )
            for spec in specs
        ],
        feature_table_map=features,
        optimizer=FBGEMM[optimizer],
        learning_rate=0.1,
        eps=1e-6,
        pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM,
        device=torch.device(device, 0) if gpu else torch.device("cpu"),
    )
    for spec, weight in zip(specs, tbe.split_embedding_weights(), strict=True):
        weight.data.copy_(
            initial_rows(names, spec.dim, table=spec.name, initializer=spec.initializer)
        )
    return tbe


@pytest.mark.parametrize("optimizer", list(FBGEMM))
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_to_fbgemm(device_type, optimizer, mean, weighted):
    if device_type == "cpu" and mean and weighted:
        pytest.skip("FBGEMM's CPU backward of a weighted mean does not divide by the length")
    specs = [
        TableSpec(f"t{dim}", 100, dim, initializer=Uniform(-0.5, 0.5)) for dim in (4, 64, 132, 8)
    ]  # FBGEMM's GPU kernels take multiples of four
    features = [0, 1, 1, 2, 3]
    names = random_ids(ROWS)  # id of each row
    tbe = make_fbgemm(specs, features, optimizer, mean, device_type, names)
    group = TableGroup(specs, features, OPTIMIZERS[optimizer], device=device_type)
    for _ in range(STEPS):
        rows = Bags.random(len(features), 30, torch.arange(ROWS)).to(device_type)
        ours = Bags(names.to(device_type)[rows.ids], rows.offsets, 30)
        weights = torch.rand(len(rows.ids), device=device_type) if weighted else None
        out = lookup(group, ours, weights, mean)
        reference = tbe(rows.ids, rows.offsets, weights)
        torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(out)
        out.backward(grad)
        reference.backward(grad)
    for table, weight in enumerate(tbe.split_embedding_weights()):
        trained = rows_by_id(group, table)
        assert len(trained) > ROWS // 2
        by_row = torch.stack(
            [trained.get(id_, weight[row].cpu()) for row, id_ in enumerate(names.tolist())]
        )
        torch.testing.assert_close(by_row, weight.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 3, 7, 130, 513, 2048])
@pytest.mark.parametrize("optimizer", list(FBGEMM))
def test_any_dim_against_the_formula(device_type, dim, optimizer):
    """A weighted mean, in float64."""
    group = TableGroup(
        [TableSpec("t", 100, dim, initializer=Uniform(-1, 1))],
        [0],
        OPTIMIZERS[optimizer],
        device_type,
    )
    pool = random_ids(20)
    rows = initial_rows(pool, dim, table="t", initializer=Uniform(-1, 1)).double()
    states = torch.zeros(20, dtype=torch.double)
    for _ in range(3):
        bags = Bags.random(1, 40, torch.arange(20))
        ours = Bags(pool[bags.ids], bags.offsets, 40).to(device_type)
        grad, weights = torch.randn(40, dim), torch.rand(len(bags.ids))
        out = lookup(group, ours, weights.to(device_type), mean=True, learning_rate=0.05)
        out.backward(grad.to(device_type))
        lengths = bags.offsets.diff()
        bag_of = torch.repeat_interleave(torch.arange(40), lengths)
        scale = (weights.double() / lengths[bag_of]).unsqueeze(1)
        summed = (
            torch.zeros(20, dim).double().index_add_(0, bags.ids, grad.double()[bag_of] * scale)
        )
        if optimizer == "sgd":
            rows -= 0.05 * summed
        else:
            states += summed.square().mean(1)
            step = 0.05 / (states.sqrt() + 1e-6)
            rows -= torch.where(states > 0, step, 0.0).unsqueeze(1) * summed
    trained = rows_by_id(group)
    for row, id_ in enumerate(pool.tolist()):
        if id_ in trained:
            torch.testing.assert_close(trained[id_].double(), rows[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bag", [1, 7, 10**6])
def test_a_hot_id(device_type, bag):
    """One id a million times: its rows are added up, and its gradients once."""
    group = TableGroup(
        [TableSpec("t", 64, 8, initializer=Constant(0.375))], [0], SGD(), device=device_type
    )
    n = 10**6
    offsets = torch.arange(0, n + bag, bag, device=device_type).clamp(max=n)
    bags = Bags(torch.full((n,), 2**62, device=device_type), offsets, len(offsets) - 1)
    out = lookup(group, bags, learning_rate=1.0)
    # Such sums, and those below, are exact in float32, in any order.
    assert torch.equal(out, (offsets.diff() * 0.375).float().unsqueeze(1).expand_as(out))
    grad = (torch.randint(-8, 9, out.shape, device=device_type) / 1024).float()
    out.backward(grad)
    total = (grad.double() * offsets.diff().unsqueeze(1)).sum(0).cpu()
    assert torch.equal(rows_by_id(group)[2**62], (0.375 - total).float())


@pytest.mark.parametrize("n", [129, 160, 161, 257, 300, 700, 5000])
def test_hot_ids_in_small_batches(device_type, n):
    """Of few positions, runs that are cut in pieces are all there."""
    group = TableGroup(
        [TableSpec("t", 10_000, 8, initializer=Uniform(-1, 1))], [0], SGD(), device=device_type
    )
    generator = torch.Generator().manual_seed(n)
    ids = torch.arange(n) // 3 + 100
    ids[: min(n, 140)] = 1
    ids[140:400] = 2
    ids = ids[torch.randperm(n, generator=generator)]
    bags = Bags(ids, torch.arange(n + 1), n).to(device_type)
    out = lookup(group, bags, learning_rate=1.0)
    before = rows_by_id(group)
    grad = torch.randint(-8, 9, out.shape, generator=generator).float() / 1024
    out.backward(grad.to(device_type))
    after = rows_by_id(group)
    for id_ in ids.unique().tolist():
        expected = before[id_].double() - grad[ids == id_].double().sum(0)
        torch.testing.assert_close(after[id_].double(), expected, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_weights(device_type):
    specs = [
        TableSpec("a", 100, 20, initializer=Uniform(-1, 1)),
        TableSpec("b", 100, 5, initializer=Uniform(-1, 1)),
    ]
    for mean in (False, True):
        group = TableGroup(specs, [0, 1], SGD(), device=device_type)
        bags = Bags.random(2, 20, random_ids(30))
        weights = torch.rand(len(bags.ids), device=device_type, requires_grad=True)
        out = lookup(group, bags.to(device_type), weights, mean)
        grad = torch.randn_like(out)
        out.backward(grad)
        expected = []
        for feature, (spec, first) in enumerate(zip(specs, (0, 20), strict=True)):
            ids, offsets = bags.feature(feature)
            rows = initial_rows(ids, spec.dim, table=spec.name, initializer=Uniform(-1, 1)).double()
            lengths = offsets.diff()
            from_bag = grad[:, first : first + spec.dim].cpu().double()
            if mean:
                from_bag = from_bag / lengths.clamp(min=1).unsqueeze(1)
            expected.append((rows * from_bag.repeat_interleave(lengths, 0)).sum(1))
        torch.testing.assert_close(
            weights.grad.cpu().double(), torch.cat(expected), rtol=1e-5, atol=1e-5
        )
