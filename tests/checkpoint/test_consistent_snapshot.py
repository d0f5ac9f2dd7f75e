"""A checkpoint has all tables of a rank at one point in time, whatever other threads do."""

import itertools
import threading

import torch
from torchrec import EmbeddingBagConfig

from tests.support.models import local_tables, make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, checkpoint

BATCH = 40


def _make(world_size, device):
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], embedding_dim=4, num_embeddings=40_000)
        for name in ("a", "b")
    ]
    options = HKVOptions(initial_capacity=64)
    constraints = {
        name: ParameterConstraints(compute_kernels=["hkv"], options=options) for name in ("a", "b")
    }
    return shard_model(make_model(tables), constraints, world_size, device)


def _save_beside_insertions(rank, world_size, device, folder):
    model = _make(world_size, device)
    group = local_tables(model)["a"]._group
    assert local_tables(model)["b"]._group is group
    stop = threading.Event()
    errors = []

    def insert():
        """Inserts the same ids into both tables in one call."""
        try:
            offsets = torch.tensor([0, BATCH, 2 * BATCH], device=device)
            for first in range(0, 30_000, BATCH):
                if stop.is_set():
                    return
                ids = torch.arange(first, first + BATCH, device=device).repeat(2)
                group.find_or_insert(ids, offsets, 1)
        except BaseException as error:  # the test's thread raises it
            errors.append(error)

    thread = threading.Thread(target=insert)
    thread.start()
    sizes = []
    for _ in range(3):
        checkpoint.save(folder, model)
        loaded = _make(world_size, device)
        checkpoint.load(folder, loaded)
        lookups = local_tables(loaded)
        held = [
            torch.cat([*itertools.chain(lookups[name].ids(name, 1 << 20)), torch.empty(0).long()])
            for name in ("a", "b")
        ]
        assert torch.equal(held[0].sort().values, held[1].sort().values)
        assert torch.equal(held[0].sort().values, torch.arange(len(held[0])))
        assert len(held[0]) % BATCH == 0
        sizes.append(len(held[0]))
    stop.set()
    thread.join()
    assert not errors, errors
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0


def test_a_save_beside_insertions(run_ranks, tmp_path):
    run_ranks(1, _save_beside_insertions, str(tmp_path / "checkpoint"))
