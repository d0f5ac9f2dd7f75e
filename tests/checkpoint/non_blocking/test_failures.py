"""Non-blocking saves report errors; the previous checkpoint stays whole."""

from __future__ import annotations

import os
import resource
import signal

import pytest

from tests.support.checkpoint_models import make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.collective import on_every_rank


def _limited(failing, rank, work):
    """Simulates a full disk: files can't grow beyond this many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        handle = work()
        with pytest.raises(RuntimeError if rank != failing else Exception) as failure:
            handle.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert handle.done()
    on_every_rank(lambda: None)  # rank 0 cleans up
    return str(failure.value)


def _failed(rank, world_size, device, folder, failing):
    model, fresh = (make_tables(world_size, device, "row_wise") for _ in range(2))
    train(model, rank, device, range(2))
    checkpoint.save(folder / "c", model, blocking=False).wait()
    saved = checkpoint.digest(model)
    train(model, rank, device, range(2, 4))
    message = _limited(failing, rank, lambda: checkpoint.save(folder / "c", model, blocking=False))
    left = sorted(os.listdir(folder))
    checkpoint.load(folder / "c", fresh)
    return message, left, saved == checkpoint.digest(fresh)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_can_not_write(run_ranks, tmp_path, failing):
    for message, left, is_same in run_ranks(2, _failed, tmp_path, failing):
        assert "File too large" in message
        assert left == ["c"]
        assert is_same


def _failed_delta(rank, world_size, device, folder):
    model, fresh = (make_tables(world_size, device, "row_wise") for _ in range(2))
    writer = checkpoint.DeltaWriter(model, folder / "c", blocking=False)
    names = []
    for write in range(4):
        train(model, rank, device, range(write, write + 1))
        if write == 2:
            _limited(1, rank, writer.write)
        else:
            names.append(writer.write().wait().name)
    checkpoint.load(folder / "c", fresh)
    return names, checkpoint.digest(fresh) == checkpoint.digest(model)


def test_after_a_delta_that_failed_comes_a_base(run_ranks, tmp_path):
    for names, is_same in run_ranks(2, _failed_delta, tmp_path):
        assert names == ["base-000000", "delta-000001", "base-000002"]
        assert is_same


def _refused(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    (folder / "other").mkdir(exist_ok=True)
    for path, options, sentence in (
        ("c", {"blocking": 0}, "blocking is 0, but must be True or False"),
        ("c", {"staging_bytes": 0}, "staging_bytes is 0, but must be an integer, at least 1"),
        ("c", {"staging_bytes": 1.5}, "staging_bytes is 1.5"),
        ("other", {}, "is not a checkpoint and would be replaced"),
    ):
        with pytest.raises(ValueError, match=sentence):
            checkpoint.save(folder / path, model, **{"blocking": False, **options})
    with pytest.raises(ValueError, match="staging_bytes is 0"):
        checkpoint.DeltaWriter(model, folder / "chain", staging_bytes=0)
    return sorted(os.listdir(folder))


def test_bad_input(run_ranks, tmp_path):
    assert run_ranks(1, _refused, tmp_path) == [["other"]]
