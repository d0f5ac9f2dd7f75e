"""Data-parallel tables save plain tensors, once for all ranks, of one shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.sharding.test_data_parallel import batch_of, lookups_of, make
from torchrec_hkv import checkpoint

TABLES = ("t", "u")


def _model(world_size, device, sharding_type, **options):
    return make("sum", "adam", sharding_type, world_size, device, TABLES, **options)


def _step(model, rank, device, step=0):
    model(batch_of(step, rank, device, TABLES, False, [6, 6])).square().sum().backward()


def _save_and_load(rank, world_size, device, folder, saved_as, loaded_as):
    first = _model(world_size, device, saved_as)
    second = _model(world_size, device, loaded_as, weight_dist="normal")
    _step(first, rank, device)
    features = batch_of(9, rank, device, TABLES, False, [6, 6])
    differed = not torch.equal(first(features), second(features))
    checkpoint.save(folder, first)
    checkpoint.load(folder, second)
    first.eval(), second.eval()
    equal = torch.equal(first(features), second(features))
    first.train(), second.train()
    # Optimizer states were loaded too, or the next steps would differ.
    for step in (1, 2):
        _step(first, rank, device, step)
        _step(second, rank, device, step)
    first.eval(), second.eval()
    after = torch.allclose(first(features), second(features), rtol=1e-4, atol=1e-5)
    names = {
        key.rsplit(".", 1)[1]: type(tensor).__name__
        for key, tensor in first.state_dict().items()
        if ".t." in key
    }
    return differed, equal, after, names


@pytest.mark.parametrize("loaded_as", ["data_parallel", "table_wise"])
def test_saved_data_parallel(run_ranks, tmp_path, loaded_as):
    folder = str(tmp_path / "saved")
    results = run_ranks(2, _save_and_load, folder, "data_parallel", loaded_as)
    for differed, equal, after, names in results:
        assert differed
        assert equal
        assert after
        assert set(names.values()) == {"Tensor"}
        assert {"tt_core_0", "tt_state_0", "optimizer_step", "tt_shape"} <= set(names)


def test_saved_table_wise(run_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    for _, equal, after, _ in run_ranks(2, _save_and_load, folder, "table_wise", "data_parallel"):
        assert equal
        assert after


def _load_other_shape(rank, world_size, device):
    first = _model(world_size, device, "data_parallel")
    second = _model(world_size, device, "data_parallel", p=(5, 6, 11))
    _step(first, rank, device)
    before = [core.clone() for core in lookups_of(second)["t"].cores("t")]
    try:
        second.load_state_dict(first.state_dict())
        message = ""
    except ValueError as error:
        message = str(error)
    after = lookups_of(second)["t"].cores("t")
    dist.barrier()
    return message, all(map(torch.equal, before, after))


def test_another_shape_is_refused(run_ranks):
    for message, unchanged in run_ranks(2, _load_other_shape):
        assert "'t'" in message
        assert "tt_core_0" in message
        assert unchanged
