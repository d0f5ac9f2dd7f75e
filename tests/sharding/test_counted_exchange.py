"""The exchange of ids equals TorchRec's own, and waits for a GPU once."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.dists.all_to_all import CountedAllToAll

pytestmark = pytest.mark.compat

#: Features of each of two ranks, and of four where two make a host.
SPLITS = {2: [[3, 3], [4, 1], [0, 2]], 4: [[2, 2, 2, 2], [1, 3, 0, 2]]}


def _batch(rank, step, features, samples, weighted, narrow, device):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 5, (features * samples,), generator=generator)
    total = int(lengths.sum())
    values = torch.randint(-(2**62), 2**62, (total,), generator=generator)
    return KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(features)],
        values=values.to(device),
        lengths=lengths.to(torch.int32 if narrow else torch.int64).to(device),
        weights=torch.rand(total, generator=generator).to(device) if weighted else None,
        stride=samples,
    )


def _compare(rank, world_size, device, stagger, samples):
    for step, splits in enumerate(SPLITS[world_size]):
        theirs = KJTAllToAll(dist.group.WORLD, splits, stagger)
        actual = CountedAllToAll(dist.group.WORLD, splits, stagger, device)
        for weighted in (False, True):
            for narrow in (False, True):
                given = (rank, step, sum(splits), samples[rank], weighted, narrow, device)
                expected = theirs(_batch(*given)).wait().wait()
                got = actual(_batch(*given)).wait().wait()
                assert got.keys() == expected.keys()
                assert got.stride() == expected.stride()
                assert torch.equal(got.values(), expected.values())
                assert torch.equal(got.lengths(), expected.lengths())
                assert got.lengths().dtype == expected.lengths().dtype
                assert got.length_per_key() == expected.length_per_key()
                assert got.offset_per_key() == expected.offset_per_key()
                assert (got.weights_or_none() is None) == (not weighted)
                if weighted:
                    assert torch.equal(got.weights(), expected.weights())
    return int(expected.values().numel())


@pytest.mark.slow
@pytest.mark.parametrize("samples", [(7, 7, 7, 7), (1, 5, 3, 2), (4, 0, 4, 4), (0, 0, 0, 0)])
@pytest.mark.parametrize(("world_size", "stagger"), [(2, 1), (4, 1), (4, 2)])
def test_as_torchrecs(run_ranks, world_size, stagger, samples):
    counts = run_ranks(world_size, _compare, stagger, samples)
    assert any(counts) == any(samples)


def _waits(rank, world_size, device):
    counted = CountedAllToAll(dist.group.WORLD, [2, 2], 1, device)
    batch = _batch(rank, 0, 4, 100, True, False, device)
    counted(batch).wait().wait()  # creates the communicator
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            received = counted(batch).wait().wait()
            received.split([1, 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


def test_waits_once(run_ranks, device_type):
    if device_type == "cpu":
        pytest.skip("the host waits for GPUs only")
    assert run_ranks(2, _waits) == [1, 1]
