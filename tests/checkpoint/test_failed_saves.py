"""A failed save leaves only the previous checkpoint."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import torch.distributed as dist

from tests.support.checkpoint_models import make_tables, train
from torchrec_hkv import checkpoint


def _failed(rank, world_size, device, folder, failing):
    model, fresh = (make_tables(world_size, device, "row_wise") for _ in range(2))
    train(model, rank, device, range(2))
    checkpoint.save(folder / "c", model)
    saved = checkpoint.digest(model)
    train(model, rank, device, range(2, 4))
    # Simulates a full disk: files can't grow beyond this many bytes.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(RuntimeError if rank != failing else Exception) as failure:
            checkpoint.save(folder / "c", model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    dist.barrier()  # rank 0 deletes the files
    left = sorted(os.listdir(folder))
    checkpoint.load(folder / "c", fresh)
    return str(failure.value), left, saved == checkpoint.digest(fresh)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_can_not_write(run_ranks, tmp_path, failing):
    for message, left, is_same in run_ranks(2, _failed, tmp_path, failing):
        assert "File too large" in message
        assert left == ["c"]
        assert is_same
