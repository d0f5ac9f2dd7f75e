"""Groups that sync after each step of SGD equal one group that trains on the batches of all."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import make_model, shard_model
from tests.support.two_dimensional import (
    configs,
    constraints,
    make_collection,
    model_contents,
    random_batch,
)

pytestmark = pytest.mark.compat


def evaluated(model, device):
    """Outputs of the model for twelve batches, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        rows = [model(random_batch(0, step).to(device)).cpu() for step in range(12)]
    model.train()
    return torch.cat(rows)


def _train(rank, world_size, device, group_size, sharding_type, inter_host):
    tables, plan_of = configs(dim=8), constraints(sharding_type)
    torch.manual_seed(3)  # stock rows
    one = shard_model(make_model(tables), plan_of, world_size, device)
    torch.manual_seed(3)
    groups = make_collection(
        group_size, world_size, device, tables, plan_of, use_inter_host_allreduce=inter_host
    )
    _copy_stock(one, groups)
    for step in range(8):
        for model in (one, groups):
            (model(random_batch(rank, step).to(device)).square().mean()).backward()
        groups.sync()
    torch.testing.assert_close(evaluated(groups, device), evaluated(one, device), rtol=0, atol=1e-6)
    return model_contents(groups)


def _copy_stock(one, groups):
    """Sets the stock tables of both models to equal rows."""
    for model in (one, groups):
        for name, parameter in model.named_parameters():
            if name.endswith("stock.weight"):
                with torch.no_grad():
                    parameter.fill_(0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding_type", "inter_host"),
    [("row_wise", False), ("row_wise", True), ("table_wise", True), ("column_wise", False)],
)
def test_two_by_two(run_ranks, sharding_type, inter_host):
    of_ranks = run_ranks(4, _train, 2, sharding_type, inter_host)
    pairs = [(0, 2), (1, 3)] if inter_host else [(0, 1), (2, 3)]
    for first, second in pairs:
        assert of_ranks[first] == of_ranks[second]
    assert sum(len(ids) for of_rank in of_ranks for ids in of_rank.values()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [2, 3])
def test_two_by_three(run_ranks, group_size):
    of_ranks = run_ranks(6, _train, group_size, "row_wise", False)
    replicas = 6 // group_size
    for first in range(0, 6, replicas):
        assert all(of_ranks[first + k] == of_ranks[first] for k in range(replicas))
