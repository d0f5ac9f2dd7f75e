"""Ids nested twice equal sums over Python lists."""

from __future__ import annotations

import itertools

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.segments import pool_segments, segment_bags

ROWS, DIM = 30, 4


def _draw(seed, samples=5, segments=12, features=("f", "g")):
    """Ids of each segment of each sample of each feature, as lists."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in features:
        cuts = torch.randint(0, segments + 1, (samples - 1,), generator=generator).sort()[0]
        bounds = [0, *cuts.tolist(), segments]
        lengths = torch.randint(0, 4, (segments,), generator=generator).tolist()
        ids = [torch.randint(ROWS, (n,), generator=generator).tolist() for n in lengths]
        drawn.append([ids[low:high] for low, high in itertools.pairwise(bounds)])
    return drawn


def _features(drawn, weighted=False):
    flat = [segment for feature in drawn for sample in feature for segment in sample]
    values = torch.tensor([i for segment in flat for i in segment])
    segments = KeyedJaggedTensor(
        ["f", "g"],
        values,
        weights=torch.rand(values.numel()) if weighted else None,
        lengths=torch.tensor([len(segment) for segment in flat]),
    )
    counts = torch.tensor([[len(sample) for sample in feature] for feature in drawn])
    return segments, counts


@pytest.mark.parametrize("seed", range(5))
def test_samples_as_bags(seed):
    drawn = _draw(seed)
    segments, counts = _features(drawn, weighted=True)
    bags = segment_bags(segments, counts, 0)
    assert bags.stride() == 5
    found = [bag.tolist() for key in ("f", "g") for bag in bags[key].to_dense()]
    assert found == [[i for segment in sample for i in segment] for f in drawn for sample in f]
    assert torch.equal(bags.weights(), segments.weights())


def test_segments_as_bags():
    segments, counts = _features(_draw(1))
    assert segment_bags(segments, counts, 1) is segments


@pytest.mark.parametrize("mean", [False, True])
def test_rows_of_segments_are_pooled(mean):
    generator = torch.Generator().manual_seed(2)
    counts = torch.tensor([2, 0, 3, 1])
    rows = torch.randn(6, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    pooled = pool_segments(rows, counts, mean=mean)
    for row, part in zip(pooled, rows.split(counts.tolist()), strict=True):
        expected = part.sum(0) / (max(len(part), 1) if mean else 1)
        torch.testing.assert_close(row, expected)
    assert torch.autograd.gradcheck(lambda r: pool_segments(r, counts, mean=mean), rows)


def _both(rank, world_size, device):
    """A table's samples, pooled directly and by segments."""
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=8 * ROWS, embedding_dim=DIM, feature_names=[name]
        )
        for name in ("f", "g")
    ]
    constraint = ParameterConstraints(compute_kernels=["hkv"], sharding_types=["table_wise"])
    model = shard_model(make_model(tables), {"f": constraint, "g": constraint}, world_size, device)
    segments, counts = _features(_draw(7 + rank))
    segments, counts = segments.to(device), counts.to(device)
    model(segment_bags(segments, counts, 0))
    model.eval()
    at_once = model(segment_bags(segments, counts, 0))
    by_segment = model(segment_bags(segments, counts, 1))
    assert by_segment.shape == (12, 2 * DIM)
    pooled = [
        pool_segments(rows, count)
        for rows, count in zip(by_segment.split(DIM, 1), counts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(pooled, 1), at_once)
    assert at_once.abs().sum() > 0
    return at_once.shape


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_sharded_table(run_ranks, world_size):
    assert run_ranks(world_size, _both) == [torch.Size([5, 2 * DIM])] * world_size


def test_environment(monkeypatch):
    segments, counts = _features(_draw(3))
    assert segment_bags(segments, counts).stride() == 5
    monkeypatch.setenv("TORCHREC_HKV_EMB_SEGMENT_RANK", "1")
    assert segment_bags(segments, counts) is segments
    assert segment_bags(segments, counts, 0).stride() == 5
    for bad in ("2", "-1", "one"):
        monkeypatch.setenv("TORCHREC_HKV_EMB_SEGMENT_RANK", bad)
        with pytest.raises(ValueError, match=r"TORCHREC_HKV_EMB_SEGMENT_RANK is .*must be 0 or 1"):
            segment_bags(segments, counts)


def test_by_feature(monkeypatch):
    segments, counts = _features(_draw(3))
    assert segment_bags(segments, counts, {"f": 1, "g": 1}) is segments
    assert segment_bags(segments, counts, {"other": 1}).stride() == 5
    with pytest.raises(
        ValueError, match=r"rank is \{'f': 1, 'g': 0\} by feature, but features of one call"
    ):
        segment_bags(segments, counts, {"f": 1})
    with pytest.raises(ValueError, match="rank is 3, but must be 0 or 1"):
        segment_bags(segments, counts, {"f": 3, "g": 3})
    monkeypatch.setenv("TORCHREC_HKV_EMB_SEGMENT_RANK", "f=1,g=1")
    assert segment_bags(segments, counts) is segments
    monkeypatch.setenv("TORCHREC_HKV_EMB_SEGMENT_RANK", "f=1")
    with pytest.raises(ValueError, match=r"TORCHREC_HKV_EMB_SEGMENT_RANK is .* by feature"):
        segment_bags(segments, counts)


@pytest.mark.parametrize(
    ("counts", "rank", "message"),
    [
        ([[12], [12]], 2, "rank is 2"),
        ([12], 0, r"have shape \(1,\), but must be \[2, samples\]"),
        ([[11], [12]], 0, r"the sums \[11, 12\] by feature, but the features have 12"),
        ([[13, -1], [6, 6]], 1, "no count may be negative"),
    ],
)
def test_refused(counts, rank, message):
    segments, _ = _features(_draw(4))
    with pytest.raises(ValueError, match=message):
        segment_bags(segments, torch.tensor(counts), rank)


def test_counts_that_do_not_fit_rows_are_refused():
    with pytest.raises(ValueError, match="with the sum 3"):
        pool_segments(torch.zeros(3, DIM), torch.tensor([1, 1]))
