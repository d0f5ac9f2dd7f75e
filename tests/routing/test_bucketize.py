"""Ids reach the rank that owns them: hashed ids by owner bucket, row numbers by TorchRec's
blocks."""

import pytest
import torch

from tests.support.batches import random_ids
from torchrec_hkv.hash_table import bucketize, owner_rank

MASK = (1 << 64) - 1


def model_owner(id_: int, world_size: int) -> int:
    x = (id_ + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    x ^= x >> 31
    return (x >> 48) * world_size >> 16


def batch(features: int, batch_size: int) -> tuple[torch.Tensor, int]:
    lengths = torch.randint(0, 50, (features * batch_size,), dtype=torch.int32)
    lengths[::3] = 0
    return lengths, int(lengths.sum())


def test_owner_rank_is_the_documented_function():
    ids = torch.cat([random_ids(200), torch.tensor([-(2**63), -1, 0, 2**62, 2**63 - 1])])
    for world_size in (1, 2, 3, 7, 64):
        expected = [model_owner(id_, world_size) for id_ in ids.tolist()]
        assert owner_rank(ids, world_size).tolist() == expected


@pytest.mark.parametrize("stride", [1, 2, 64, 2**16, 2**40])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_strided_ids_spread_over_ranks(stride, world_size):
    n = 60_000
    counts = torch.bincount(owner_rank(torch.arange(n) * stride, world_size), minlength=world_size)
    share = n / world_size
    # Five standard deviations of a binomial.
    assert (counts - share).abs().max() < 5 * (share * (1 - 1 / world_size)) ** 0.5


@pytest.mark.parametrize("world_size", [1, 2, 3, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_hashed_and_block_features_in_one_call(device_type, world_size, weighted):
    block_sizes = torch.tensor([0, 7, 0, 1000])
    lengths, n = batch(4, 9)
    ids = random_ids(n)
    starts = torch.cat([torch.zeros(1).long(), lengths.long().cumsum(0)])
    for feature in (1, 3):
        first, last = starts[feature * 9], starts[(feature + 1) * 9]
        rows = int(block_sizes[feature]) * world_size
        ids[first:last] = torch.randint(0, rows, (int(last - first),))
    weights = torch.rand(n) if weighted else None
    out = bucketize(
        lengths.to(device_type),
        ids.to(device_type),
        block_sizes.to(device_type),
        world_size,
        None if weights is None else weights.to(device_type),
    )
    new_lengths, new_ids, new_weights, permute = (None if t is None else t.cpu() for t in out)
    assert new_lengths.dtype == torch.int32
    # The same computed in Python.
    expected = [[[] for _ in range(36)] for _ in range(world_size)]
    for bag in range(36):
        block = int(block_sizes[bag // 9])
        for at in range(int(starts[bag]), int(starts[bag + 1])):
            id_ = int(ids[at])
            rank, value = (
                (id_ // block, id_ % block) if block else (model_owner(id_, world_size), id_)
            )
            expected[rank][bag].append((value, at))
    flat = [entry for rank in expected for bag in rank for entry in bag]
    assert new_lengths.tolist() == [len(bag) for rank in expected for bag in rank]
    assert new_ids.tolist() == [value for value, _ in flat]
    origins = torch.tensor([at for _, at in flat], dtype=torch.long)
    assert torch.equal(permute[origins], torch.arange(n))
    if weighted:
        assert torch.equal(new_weights, weights[origins])
    else:
        assert new_weights is None


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_blocks_equal_fbgemm(device_type, world_size):
    block_sizes = torch.tensor([5, 64])
    lengths, n = batch(2, 20)
    rows = torch.randint(0, 5 * world_size + 20, (n,))  # some past the last block
    stock = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths.long().to(device_type),
        rows.to(device_type),
        bucketize_pos=False,
        sequence=True,
        block_sizes=block_sizes.to(device_type),
        my_size=world_size,
    )
    ours = bucketize(
        lengths.to(device_type), rows.to(device_type), block_sizes.to(device_type), world_size
    )
    assert ours[0].tolist() == stock[0].tolist()
    assert ours[1].tolist() == stock[1].tolist()
    assert ours[3].tolist() == stock[4].tolist()


def test_no_ids(device_type):
    lengths = torch.zeros(6, dtype=torch.int64, device=device_type)
    values = torch.empty(0, dtype=torch.int64, device=device_type)
    blocks = torch.tensor([0, 3], device=device_type)
    out_lengths, out_values, _, _ = bucketize(lengths, values, blocks, 2)
    assert out_lengths.tolist() == [0] * 12
    assert out_values.numel() == 0
    out_lengths, _, _, _ = bucketize(lengths[:0], values, blocks, 2)
    assert out_lengths.numel() == 0


def test_opcheck(device_type):
    lengths, n = batch(2, 4)
    args = (lengths, random_ids(n), torch.tensor([0, 0]), 3)
    args = tuple(a.to(device_type) if isinstance(a, torch.Tensor) else a for a in args)
    torch.library.opcheck(torch.ops.torchrec_hkv.bucketize, args)


def test_opcheck_of_owner_ranks():
    torch.library.opcheck(torch.ops.torchrec_hkv.owner_ranks, (random_ids(5), 3))


@pytest.mark.parametrize(
    ("lengths", "values", "blocks", "match"),
    [
        (torch.tensor([1, 1]), torch.rand(2), torch.tensor([0]), r"values must be of dtype Long"),
        (torch.rand(2), torch.arange(2), torch.tensor([0]), r"lengths must be of an integer"),
        (torch.tensor([1, 2]), torch.arange(2), torch.tensor([0]), r"lengths must add up to the"),
        (torch.tensor([1, 1, 0]), torch.arange(2), torch.tensor([0, 0]), r"a multiple of 2"),
    ],
)
def test_bad_input_is_refused(lengths, values, blocks, match):
    with pytest.raises((ValueError, TypeError), match=match):
        bucketize(lengths, values, blocks, 2)
