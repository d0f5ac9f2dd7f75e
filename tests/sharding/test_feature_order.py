"""Reordered features equal those of TorchRec's permute, without a wait for a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.dists.features import in_order

pytestmark = pytest.mark.compat


def make(device, weighted, dtype, samples, keys=("a", "b", "c", "d")):
    lengths = torch.randint(0, 4, (len(keys) * samples,), dtype=dtype)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(-(2**62), 2**62, (count,)).to(device),
        lengths=lengths.to(device),
        weights=torch.rand(count).to(device) if weighted else None,
        stride=samples,
    )


@pytest.mark.parametrize("order", [[2, 0, 3, 1], [0, 1, 2, 3], [3, 1], [1, 1, 0, 2], []], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_as_torchrecs(device_type, samples, weighted, dtype, order):
    features = make(device_type, weighted, dtype, samples)
    tensor = torch.tensor(order, dtype=torch.int32, device=device_type)
    got, wanted = in_order(features, order, tensor), features.permute(order, tensor)
    assert got.keys() == wanted.keys()
    assert got.stride() == wanted.stride()
    assert torch.equal(got.values(), wanted.values())
    assert torch.equal(got.lengths(), wanted.lengths())
    assert got.lengths().dtype == wanted.lengths().dtype
    assert got.length_per_key() == wanted.length_per_key()
    assert (got.weights_or_none() is None) == (not weighted)
    if weighted:
        assert torch.equal(got.weights(), wanted.weights())


def test_sizes_of_their_own(device_type):
    lengths = torch.tensor([1, 2, 0, 3], device=device_type)
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(6, device=device_type),
        lengths=lengths,
        stride_per_key_per_rank=[[1], [3]],
    )
    order = torch.tensor([1, 0], dtype=torch.int32, device=device_type)
    got = in_order(features, [1, 0], order)
    assert got.lengths().tolist() == [2, 0, 3, 1]
    assert got.values().tolist() == [1, 2, 3, 4, 5, 0]
    assert got.stride_per_key() == [3, 1]


def test_no_wait(device_type):
    if device_type == "cpu":
        pytest.skip("the host waits for GPUs only")
    features = make(device_type, True, torch.int64, 100)
    order = torch.tensor([1, 0, 3, 2], dtype=torch.int32, device=device_type)
    in_order(features, [1, 0, 3, 2], order)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            in_order(features, [1, 0, 3, 2], order)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [warning for warning in seen if "synchronizing" in str(warning.message)]
