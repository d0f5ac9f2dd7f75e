"""Stock tables that are averaged whole, tables over all ranks, and what sync() refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec.optim import RowWiseAdagrad

from tests.support.models import local_tables
from tests.support.two_dimensional import (
    configs,
    constraints,
    make_collection,
    model_contents,
    random_batch,
)
from torchrec_hkv import HKVOptions, ParameterConstraints

pytestmark = pytest.mark.compat


def _make(world_size, device, of, optimizer=(RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6})):
    return make_collection(2, world_size, device, configs(), {**constraints(), **of}, *optimizer)


def _train(model, rank, device, steps, first=0):
    for step in range(first, first + steps):
        model(random_batch(rank, step).to(device)).square().mean().backward()


def _stock(model):
    """Rows and states of the stock table, without a copy."""
    weights = [
        tensor for context in model._ctxs for tensor in context.weights_by_dtype[torch.float32]
    ]
    states = model._default_ctx.optimizer_tensors_by_dtype[torch.float32]
    return weights, states


def _averaged(rank, world_size, device, include):
    model = _make(world_size, device, {})
    _train(model, rank, device, 3)
    lookup = local_tables(model).get("cores")
    cores = [] if lookup is None else [*lookup.cores("cores")]
    states = [] if lookup is None else list(lookup._states)
    weights, sums = _stock(model)
    tensors, kept = [*weights, *cores], []
    (tensors if include else kept).extend([*sums, *states])
    expected = [tensor.detach().clone() for tensor in tensors]
    before = [tensor.detach().clone() for tensor in kept]
    for tensor in expected:
        dist.all_reduce(tensor, group=model._default_ctx.replica_pg)
        tensor /= 2
    model.sync(include_optimizer_state=include)
    for tensor, mean in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.detach(), mean, rtol=1e-6, atol=1e-8)
    for tensor, was in zip(kept, before, strict=True):
        assert torch.equal(tensor.detach(), was)
    return len(cores), len(sums)


@pytest.mark.parametrize("include", [True, False])
def test_stock_tables_and_cores_are_averaged_whole(run_ranks, include):
    counts = run_ranks(4, _averaged, include)
    assert sum(count[0] for count in counts) == 2 * 3
    assert sum(count[1] for count in counts) == 4


def _dense(rank, world_size, device):
    table = ParameterConstraints(
        compute_kernels=["hkv"], sharding_types=["row_wise"], options=HKVOptions(dense=True)
    )
    model = _make(world_size, device, {"stock": table})
    _train(model, rank, device, 3)
    (key,) = [key for key in local_tables(model) if key.startswith("stock")]
    lookup = local_tables(model)[key]
    own = {"weight": lookup.export_table(key)["weight"], **lookup.dense_states(key)}
    expected = {}
    for name, tensor in own.items():
        expected[name] = tensor.clone()
        dist.all_reduce(expected[name], group=model._default_ctx.replica_pg)
        expected[name] /= 2
    model.sync()
    after = {"weight": lookup.export_table(key)["weight"], **lookup.dense_states(key)}
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-8)
    _train(model, rank, device, 1, first=5)


def test_dense_tables_are_averaged_by_row_number(run_ranks):
    run_ranks(4, _dense)


def _data_parallel(rank, world_size, device):
    table = ParameterConstraints(compute_kernels=["tt"], sharding_types=["data_parallel"])
    model = _make(world_size, device, {"cores": table})
    _train(model, rank, device, 3)
    cores = torch.cat([core.flatten() for core in local_tables(model)["cores"].cores("cores")])
    of_ranks = [torch.empty_like(cores) for _ in range(world_size)]
    dist.all_gather(of_ranks, cores.detach())
    for other in of_ranks:  # without a sync
        assert torch.equal(other, of_ranks[0])
    model.sync()
    return model_contents(model)


def test_data_parallel_tables_are_alike_on_all_ranks(run_ranks):
    of_ranks = run_ranks(4, _data_parallel)
    assert of_ranks[0] == of_ranks[1]


def _refused(rank, world_size, device):
    model = _make(world_size, device, {})
    _train(model, rank, device, 2)
    before = model_contents(model)
    output = model(random_batch(rank, 2).to(device))
    with pytest.raises(RuntimeError, match=r"in tables 'hash' has not run, in replicas \[0, 1\]"):
        model.sync()
    rows = {key: {id_: own["row"] for id_, own in ids.items()} for key, ids in before.items()}
    now = model_contents(model)
    assert all(now[key][id_]["row"] == row for key, ids in rows.items() for id_, row in ids.items())
    output.square().mean().backward()
    model.sync()
    return model_contents(model)


def test_a_backward_to_come_refuses_a_sync(run_ranks):
    of_ranks = run_ranks(4, _refused)
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[2] == of_ranks[3]
