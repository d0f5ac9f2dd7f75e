"""Tables of every sharding type are saved and loaded; several shards on a rank are kept apart."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import BACKENDS
from tests.support.small_models import make_small, outputs_and_train
from torchrec_hkv import checkpoint
from torchrec_hkv.sharding import table_counters

pytestmark = pytest.mark.compat

DIM = 8
TYPES = ["column_wise", "table_row_wise", "table_column_wise", "grid_shard"]


def _go_on(rank, world_size, device, backend, sharding_type, folder):
    saved, fresh = (
        make_small(world_size, device, backend, sharding_type, dim=DIM) for _ in range(2)
    )
    outputs_and_train(saved, rank, device, steps=3)
    checkpoint.save(folder, saved, saved.fused_optimizer)
    checkpoint.load(folder, fresh, fresh.fused_optimizer)
    after = [outputs_and_train(model, rank, device, steps=3, seed=9) for model in (saved, fresh)]
    torch.testing.assert_close(after[1], after[0], rtol=0, atol=0)
    size = tuple(fresh.state_dict()["ebc.embedding_bags.t.weight"].size())
    return {key: counts["size"] for key, counts in table_counters(fresh).items()}, size


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "host_size"), [(1, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("sharding_type", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_goes_on_as_before(
    run_ranks, backend, sharding_type, world_size, host_size, tmp_path
):
    results = run_ranks(
        world_size,
        _go_on,
        backend,
        sharding_type,
        tmp_path / "checkpoint",
        host_size=host_size,
    )
    first, second = "ebc.embedding_bags.t", "ebc.embedding_bags.t/4"
    shards = {first: 0, second: 0}
    for sizes, size in results:
        assert size[1] == DIM
        for key, count in sizes.items():
            shards[key] += count
    by_columns = sharding_type != "table_row_wise"
    assert shards[first] > 0
    assert shards[second] == (shards[first] if by_columns else 0)


def _save(rank, world_size, device, sharding_type, folder):
    model = make_small(world_size, device, "toy", sharding_type, dim=DIM)
    outputs_and_train(model, rank, device, steps=2)
    checkpoint.save(folder, model)


def _refused(rank, world_size, device, sharding_type, folder):
    model = make_small(world_size, device, "toy", sharding_type, dim=DIM)
    with pytest.raises(ValueError, match=r"checkpoint.*has shape") as refusal:
        checkpoint.load(folder, model)
    return str(refusal.value)


def test_as_many_shards_of_another_type_are_refused(run_ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    run_ranks(2, _save, "column_wise", folder)
    for refusal in run_ranks(2, _refused, "row_wise", folder):
        assert "load it into the model that it was saved from" in refusal
