"""Tables of an EmbeddingCollection are saved and loaded like those of an EmbeddingBagCollection."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.backends import BACKENDS
from tests.support.sequences import (
    OUTPUTS,
    SequenceScenario,
    sequence_features,
    shard_sequences,
)
from tests.support.stock_comparison import BATCH, CAPACITY, IDS, KEYS, raw_ids
from torchrec_hkv import checkpoint
from torchrec_hkv.sharding import table_counters


def _train(model, rank, device, steps, seed):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    mapped = raw_ids()
    seen = []
    for _ in range(steps):
        lengths = [torch.randint(0, 4, (BATCH,), generator=generator) for _ in KEYS]
        ids = [torch.randint(0, IDS, (int(n.sum()),), generator=generator) for n in lengths]
        sent = [mapped[ids[0]], mapped[ids[1]], mapped[ids[2]], ids[3]]
        outputs = model(sequence_features(sent, lengths, device))
        values = torch.cat([outputs[key].values() for key in OUTPUTS])
        values.square().sum().backward()
        seen.append(values.detach())
    return torch.cat(seen)


def _go_on(rank, world_size, device, backend, sharding_type, folder):
    scenario = SequenceScenario(backend, sharding_type, "rowwise_adagrad")
    saved, fresh = (
        shard_sequences(scenario, CAPACITY, backend, world_size, device) for _ in range(2)
    )
    _train(saved, rank, device, steps=3, seed=1)
    checkpoint.save(folder, saved, saved.fused_optimizer)
    checkpoint.load(folder, fresh, fresh.fused_optimizer)
    outputs = [_train(model, rank, device, steps=3, seed=2) for model in (saved, fresh)]
    assert outputs[0].abs().sum() > 0
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    return {key: counts["size"] for key, counts in table_counters(fresh).items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_as_before(run_ranks, backend, sharding_type, world_size, tmp_path):
    sizes = run_ranks(world_size, _go_on, backend, sharding_type, tmp_path / "checkpoint")
    for table in ("t0", "t1"):
        assert 0 < sum(counts.get(f"ec.embeddings.{table}", 0) for counts in sizes) <= IDS


def _save(rank, world_size, device, folder):
    scenario = SequenceScenario("toy", "row_wise")
    checkpoint.save(folder, shard_sequences(scenario, CAPACITY, "toy", world_size, device))


def _refused(rank, world_size, device, folder):
    model = shard_sequences(
        SequenceScenario("toy", "table_wise"), CAPACITY, "toy", world_size, device
    )
    with pytest.raises(ValueError, match=r"holds table 't.' in 2 shards and the model has 1"):
        checkpoint.load(folder, model)


def test_another_sharding_type_is_refused(run_ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    run_ranks(2, _save, folder)
    run_ranks(2, _refused, folder)


def _plain(rank, world_size, device, sharding_type, folder, saves):
    scenario = SequenceScenario("hkv", sharding_type, "rowwise_adagrad")
    model = shard_sequences(scenario, CAPACITY, "hkv", world_size, device)
    if saves:
        _train(model, rank, device, steps=3, seed=1)
        dcp.save(model.state_dict(), checkpoint_id=folder)
    else:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
    return checkpoint.digest(model)


def test_plain_distributed_checkpoint(run_ranks, tmp_path):
    saved = run_ranks(2, _plain, "row_wise", tmp_path / "c", True)
    loaded = run_ranks(1, _plain, "table_wise", tmp_path / "c", False)
    assert loaded[0] == saved[0] == saved[1]
    assert all(int(value.split("-")[0]) > 10 for value in saved[0].values())
