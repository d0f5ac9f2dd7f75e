"""A model's state dict holds the tables of backends, and restores them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.backends import BACKENDS
from tests.support.small_models import make_small, outputs_and_train
from torchrec_hkv.sharding.state.sharded_state import LAYOUT_KEY, SHARDS_KEY

pytestmark = pytest.mark.compat

TABLE = "ebc.embedding_bags.t."


def _round_trip(rank, world_size, device, backend, sharding_type):
    saved = make_small(world_size, device, backend, sharding_type)
    fresh = make_small(world_size, device, backend, sharding_type)
    outputs_and_train(saved, rank, device, steps=3)
    fresh.load_state_dict(saved.state_dict())
    # The fused optimizer's state dict has states of stock tables; ours are saved with the rows.
    fresh.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    after = [outputs_and_train(model, rank, device, steps=3, seed=9) for model in (saved, fresh)]
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_fresh_model_goes_on_as_the_saved_one(run_ranks, backend, sharding_type):
    run_ranks(2, _round_trip, backend, sharding_type)


def _through_dcp(rank, world_size, device, backend, folder):
    saved = make_small(world_size, device, backend)
    fresh = make_small(world_size, device, backend)
    outputs_and_train(saved, rank, device, steps=3)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state)
    after = [outputs_and_train(model, rank, device, steps=1) for model in (saved, fresh)]
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_distributed_checkpoint_saves_and_loads_it(run_ranks, backend, tmp_path):
    run_ranks(2, _through_dcp, backend, tmp_path / "checkpoint")


def _alone(rank, world_size, device, backend, sharding_type):
    model = make_small(world_size, device, backend, sharding_type)
    outputs_and_train(model, rank, device, steps=1)
    state = {}
    if rank == 1:
        state = model.state_dict()
    dist.barrier()
    return {key: tuple(value.size()) for key, value in state.items() if key.startswith(TABLE)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_one_rank_alone_may_ask_for_it(run_ranks, backend, sharding_type):
    sizes = run_ranks(2, _alone, backend, sharding_type, timeout=60)[1]
    shards = 2 if sharding_type == "row_wise" else 1
    if backend == "toy":
        assert sizes[TABLE + SHARDS_KEY] == (shards,)
    else:  # at any number of ranks
        assert sizes[TABLE + LAYOUT_KEY] == (1,)
        assert sizes[TABLE + "ids"] == (256 + 8 + 4096,)
    assert sizes[TABLE + "weight"][1] == 4


def _refusals(rank, world_size, device, backend):
    model = make_small(world_size, device, backend)
    outputs_and_train(model, rank, device, steps=1)
    before = model.state_dict()

    def refusal(change):
        state = dict(model.state_dict())
        change(state)
        with pytest.raises(
            ValueError, match=r"The state of table 't'|In the state of table 't'"
        ) as e:
            model.load_state_dict(state)
        return str(e.value)

    def lacking(state):
        del state[TABLE + "weight"]

    def plain(state):
        state[TABLE + "weight"] = torch.zeros(64, 4)

    def reshaped(state):
        state[TABLE + "weight"] = state["ebc.embedding_bags.s.weight"]

    messages = [refusal(change) for change in (lacking, plain, reshaped)]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in before.items() if not k.startswith(TABLE)})
    after = model.state_dict()
    for key, value in before.items():
        if key.startswith(TABLE):
            shards = value.local_shards(), after[key].local_shards()
            for mine, now in zip(*shards, strict=True):
                torch.testing.assert_close(now.tensor, mine.tensor, rtol=0, atol=0)
    return messages


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_does_not_fit_changes_nothing(run_ranks, backend):
    lacking, plain, reshaped = run_ranks(2, _refusals, backend)[0]
    assert "lacks ['weight']" in lacking
    assert "is a Tensor" in plain
    assert "has shape (8, 4)" in reshaped
