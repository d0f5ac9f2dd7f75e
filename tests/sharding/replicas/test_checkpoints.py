"""A checkpoint of a DMPCollection has one replica, and loads with any number of groups."""

from __future__ import annotations

import pytest
import torch
from torchrec.optim import RowWiseAdagrad

from tests.sharding.replicas.test_doubled_batch import evaluated
from tests.support.models import make_model, shard_model
from tests.support.two_dimensional import configs, constraints, make_collection, random_batch
from torchrec_hkv import checkpoint

OPTIMIZER = (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6})


def _make(world_size, device, group_size):
    if group_size is None:
        model = make_model(configs(dim=8), *OPTIMIZER)
        return shard_model(model, constraints(), world_size, device)
    return make_collection(
        group_size, world_size, device, configs(dim=8), constraints(), *OPTIMIZER
    )


def _train(model, rank, device, steps, first=0):
    for step in range(first, first + steps):
        model(random_batch(rank, step).to(device)).square().mean().backward()
        if hasattr(model, "sync"):
            model.sync()


def _save(rank, world_size, device, folder, group_size, chain):
    model = _make(world_size, device, group_size)
    _train(model, rank, device, 4)
    if chain:
        writer = checkpoint.DeltaWriter(model, folder, model.fused_optimizer)
        writer.write()
        _train(model, rank, device, 3, first=4)
        writer.write()
    else:
        checkpoint.save(folder, model, model.fused_optimizer)
    return checkpoint.digest(model), evaluated(model, device)


def _load(rank, world_size, device, folder, group_size):
    model = _make(world_size, device, group_size)
    _train(model, rank, device, 1, first=50)  # the load replaces the content
    checkpoint.load(folder, model, model.fused_optimizer)
    rows = evaluated(model, device)
    digest = checkpoint.digest(model)
    if group_size is not None:
        _train(model, rank, device, 2, first=20)  # training continues
        of_ranks = [None] * world_size
        torch.distributed.all_gather_object(of_ranks, evaluated(model, device))
        for other in of_ranks:
            torch.testing.assert_close(other, of_ranks[0], rtol=0, atol=0)
    return digest, rows


def _check_close(rows, others):
    # Partial sums of bags are added in another order.
    torch.testing.assert_close(rows, others, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chain", [False, True])
def test_any_number_of_groups(run_ranks, tmp_path, chain):
    folder = tmp_path / "saved"
    digest, rows = run_ranks(4, _save, folder, 2, chain)[0]
    assert sum(int(value.split("-")[0]) for value in digest.values()) > 40
    for world_size, group_size in ((4, 2), (4, 4)) if chain else ((4, 1), (4, None), (2, None)):
        for loaded, its_rows in run_ranks(world_size, _load, folder, group_size):
            assert loaded == digest
            _check_close(its_rows, rows)


@pytest.mark.slow
def test_from_one_group_to_several(run_ranks, tmp_path):
    folder = tmp_path / "saved"
    digest, rows = run_ranks(2, _save, folder, None, False)[0]
    for loaded, its_rows in run_ranks(4, _load, folder, 2):
        assert loaded == digest
        _check_close(its_rows, rows)
