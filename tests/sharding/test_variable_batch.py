"""The order of pooled features, and padded lengths, if features have different batch sizes."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_hkv.sharding.dists.features import prepare_features
from torchrec_hkv.sharding.dists.variable_batch import merged_groups, padded_lengths, rank_major


@pytest.mark.parametrize(
    "strides", [[[2, 3, 1], [1, 0, 4]], [[3], [2]], [[2, 5]], [[0, 0], [0, 0]]], ids=str
)
def test_rank_by_rank(strides):
    dims = [2, 3][: len(strides)]
    wanted = {
        (rank, feature): torch.randn(counts[rank], dims[feature])
        for feature, counts in enumerate(strides)
        for rank in range(len(counts))
    }
    ranks = range(len(strides[0]))
    flat = torch.cat([wanted[r, f].flatten() for f in range(len(strides)) for r in ranks])
    expected = torch.cat([wanted[r, f].flatten() for r in ranks for f in range(len(strides))])
    assert torch.equal(rank_major(flat, strides, dims), expected)


def test_groups_are_put_together_rank_by_rank():
    groups, ranks = {"a": 2, "b": 1}, range(3)
    wanted = {
        (rank, group, feature): torch.randn(int(torch.randint(0, 4, ())))
        for rank in ranks
        for group, count in groups.items()
        for feature in range(count)
    }
    ordered = {
        group: [wanted[rank, group, f] for rank in ranks for f in range(count)]
        for group, count in groups.items()
    }
    merged = merged_groups(
        [torch.cat(parts) for parts in ordered.values()],
        [[part.numel() for part in parts] for parts in ordered.values()],
        list(groups.values()),
    )
    assert torch.equal(merged, torch.cat(list(wanted.values())))


@pytest.mark.parametrize("strides", [[2, 0, 3], [1], [0, 0], [4, 4]], ids=str)
def test_lengths_are_filled_up_with_zeros(strides):
    lengths = torch.arange(1, sum(strides) + 1)
    padded, places = padded_lengths(lengths, strides)
    longest = max(strides)
    parts = lengths.split(strides)
    expected = torch.zeros(len(strides), longest, dtype=torch.int64)
    for row, part in zip(expected, parts, strict=True):
        row[: part.numel()] = part
    assert torch.equal(padded, expected.flatten())
    assert torch.equal(padded[places], lengths)


def test_a_batch_without_inverse_indices_is_refused():

    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f", "g"])
    ]
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(3),
        lengths=torch.tensor([1, 0, 2]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match="but no inverse indices: give the KeyedJaggedTensor"):
        prepare_features(features, tables, is_weighted=False)
