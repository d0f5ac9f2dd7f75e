"""Blocks that ranks exchange have the right contents, and are merged to one batch."""

from __future__ import annotations

import itertools

import pytest
import torch

ops = torch.ops.torchrec_hkv
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def drawn(features, batch_size, longest=4, dtype=torch.int64):
    lengths = torch.randint(0, longest + 1, (features * batch_size,), dtype=dtype)
    ids = torch.randint(INT64_MIN, INT64_MAX, (int(lengths.sum()),))
    return lengths, ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("batch_size", [0, 1, 5, 700])
@pytest.mark.parametrize("splits", [[3], [2, 2], [4, 0, 1]], ids=str)
def test_counts(device_type, splits, batch_size, dtype):
    lengths, _ = drawn(sum(splits), batch_size, dtype=dtype)
    wanted, at, samples_at = [], [], []
    sums = iter(lengths.view(sum(splits), batch_size).sum(1).tolist())
    for features in splits:
        at += range(len(wanted), len(wanted) + features)
        wanted += itertools.islice(sums, features)
        samples_at.append(len(wanted))
        wanted.append(batch_size)
    places = [torch.tensor(p, dtype=torch.int64, device=device_type) for p in (at, samples_at)]
    args = (lengths.to(device_type), *places, batch_size, len(wanted) + 3)
    assert ops.count_ids(*args)[:-3].tolist() == wanted
    checks = ("test_schema", "test_faketensor")  # the op leaves the rest of the output unwritten
    torch.library.opcheck(ops.count_ids, args, test_utils=checks)


def test_blocks_of_features(device_type):
    """Each rank gets the lengths of its features, then their ids."""
    splits, batch_size = [2, 0, 1], 6
    lengths, ids = drawn(3, batch_size, dtype=torch.int32)
    ends = [0, *itertools.accumulate(splits)]
    bags = [end * batch_size for end in ends]
    of_ranks = [lengths[begin:end] for begin, end in itertools.pairwise(bags)]
    numbers = [int(part.sum()) for part in of_ranks]
    wanted = []
    for part, own in zip(of_ranks, ids.split(numbers), strict=True):
        wanted += [part.long(), own]
    args = (lengths.to(device_type), ids.to(device_type))
    args = (*args, [features * batch_size for features in splits], numbers)
    assert ops.pack_blocks(*args).tolist() == torch.cat(wanted).tolist()
    torch.library.opcheck(ops.pack_blocks, args)


@pytest.mark.parametrize("permutes", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_bucketized_blocks(device_type, world_size, weighted, permutes):
    """The ids equal those bucketized without blocks; the lengths for each rank come before them."""
    lengths, ids = drawn(4, 9)
    weights = torch.rand(len(ids), device=device_type) if weighted else None
    sizes = torch.tensor([0, 100, 0, 7], device=device_type)
    args = (lengths.to(device_type), ids.to(device_type), sizes, world_size, weights)
    by_rank, values, out_weights, permute = ops.bucketize(*args)
    got = ops.bucketize(*args, True, permutes)
    numbers = by_rank.view(world_size, -1).sum(1).tolist()
    wanted = [
        part
        for pair in zip(by_rank.view(world_size, -1), values.split(numbers), strict=True)
        for part in pair
    ]
    assert torch.equal(got[0], by_rank)
    assert torch.equal(got[1], torch.cat(wanted))
    assert torch.equal(got[2], out_weights)
    assert torch.equal(got[3], permute if permutes else permute[:0])
    torch.library.opcheck(ops.bucketize, (*args, True, permutes))


def arrived(ranks, features, batch_size, longest):
    """Data received from each rank: lengths ``[features, batch_size]``, ids, weights."""
    parts = []
    for _ in range(ranks):
        lengths, ids = drawn(features, batch_size, longest)
        parts.append((lengths.view(features, batch_size), ids, torch.rand(len(ids))))
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("longest", [0, 3])
@pytest.mark.parametrize(
    ("ranks", "features", "batch_size"),
    [(1, 1, 1), (2, 3, 5), (4, 26, 8), (3, 1, 3000), (2, 0, 4), (2, 3, 0), (7, 100, 2)],
)
def test_merged_blocks(device_type, ranks, features, batch_size, longest, weighted, dtype):
    parts = arrived(ranks, features, batch_size, longest)
    counts = torch.tensor(
        [[*lengths.sum(1).tolist(), batch_size] for lengths, _, _ in parts], dtype=torch.int64
    )
    order = torch.randperm(ranks * features, dtype=torch.int32)
    words = torch.cat([part for lengths, ids, _ in parts for part in (lengths.flatten(), ids)])
    weights = torch.cat([weights for _, _, weights in parts])
    args = (words.to(device_type), weights.to(device_type) if weighted else None)
    args = (*args, counts.flatten().to(device_type), order.to(device_type), ranks, batch_size)
    lengths, offsets, ids, out_weights = ops.merge_blocks(*args, dtype)

    segments = [
        (of_feature, *cut)
        for of_rank, its_ids, its_weights in parts
        for of_feature, *cut in zip(
            of_rank,
            its_ids.split(of_rank.sum(1).tolist()),
            its_weights.split(of_rank.sum(1).tolist()),
            strict=True,
        )
    ]
    chosen = [segments[at] for at in order.tolist()]
    wanted = [torch.cat([*column, column[0][:0]]) for column in zip(*chosen, strict=True)]
    wanted = wanted or [torch.empty(0, dtype=torch.int64)] * 2 + [torch.empty(0)]
    assert lengths.dtype == dtype
    assert lengths.tolist() == wanted[0].tolist()
    assert offsets.tolist() == [0, *itertools.accumulate(wanted[0].tolist())]
    assert ids.tolist() == wanted[1].tolist()
    assert out_weights.tolist() == (wanted[2].tolist() if weighted else [])
    torch.library.opcheck(ops.merge_blocks, (*args, dtype))


WORDS, COUNTS = torch.tensor([1, 2, 9, 9, 9]), torch.tensor([1, 2, 1])
ORDER = torch.tensor([1, 0], dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((WORDS.int(), None, COUNTS, ORDER, 1, 1, torch.int64), "words must be of dtype Long"),
        ((WORDS, None, COUNTS, ORDER.long(), 1, 1, torch.int64), "order must be of dtype Int"),
        ((WORDS, None, COUNTS, ORDER, 0, 1, torch.int64), "num_ranks is 0"),
        ((WORDS, None, COUNTS, ORDER, 1, -1, torch.int64), "batch_size is -1"),
        ((WORDS, None, COUNTS, ORDER, 1, 9, torch.int64), "words must have at least 18 elements"),
        ((WORDS, None, COUNTS[:2], ORDER, 1, 1, torch.int64), "counts must have 3 elements"),
        ((WORDS, None, COUNTS, ORDER, 1, 1, torch.int8), "lengths_dtype must be an integer dtype"),
        ((WORDS, torch.ones(2), COUNTS, ORDER, 1, 1, torch.int64), "weights must have 3 elements"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_blocks_are_refused(device_type, args, match):
    given = [arg.to(device_type) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with pytest.raises((ValueError, TypeError), match=match):
        ops.merge_blocks(*given)


@pytest.mark.parametrize("device_type", ["cpu"])
@pytest.mark.parametrize(
    ("counts", "order", "match"),
    [
        ([1, 1, 1], [1, 0], "counts must add up to the number of ids, 3, but add up to 2"),
        ([-1, 4, 1], [1, 0], "counts must not be negative, but have -1"),
        ([1, 2, 1], [1, 1], "order must be a permutation, but has 1 at 1"),
        ([1, 2, 1], [1, 2], "order must be a permutation, but has 2 at 1"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(device_type, counts, order, match):
    args = (torch.tensor(counts), torch.tensor(order, dtype=torch.int32), 1, 1, torch.int64)
    with pytest.raises(ValueError, match=match):
        ops.merge_blocks(WORDS, None, *args)
