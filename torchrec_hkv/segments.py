"""Nested bags: ids in segments of samples, pooled at one of the two levels.

The counterpart of HybridBackend's ``emb_segment_rank``. A sample may have several segments (the
items of a basket, the sentences of a text) of several ids each. Tables pool the bags of a
``KeyedJaggedTensor``, which has one level of bags: this module makes one from either level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv import environment


def segment_bags(
    segments: KeyedJaggedTensor,
    segment_counts: torch.Tensor,
    rank: int | Mapping[str, int] | None = None,
) -> KeyedJaggedTensor:
    """Makes features whose bags are samples or segments.

    Args:
        segments: a batch whose bags are segments: the segments of the first sample of the first
            feature, of its second sample, and so on; then those of the second feature. All features
            have the same number of segments.
        segment_counts: integers ``[features, samples]``: number of segments of each sample.
        rank: 0: a bag is a sample with the ids of all its segments; a pooled table returns
            ``[samples, dim]``. 1: a bag is a segment; a pooled table returns ``[segments, dim]``,
            which :func:`pool_segments` or the model reduces. A mapping gives the rank by feature, 0
            by default; all features of a batch must have the same rank, so use one call for each
            rank. None: the environment variable ``TORCHREC_HKV_EMB_SEGMENT_RANK``, else 0.

    Raises:
        ValueError: a rank is invalid, features have different ranks, or the counts do not fit the
            segments.
    """
    rank = _rank_of(segments.keys(), rank)
    _check_counts(segments, segment_counts)
    if rank == 1:
        return segments
    counts = segment_counts.long().flatten()
    sample = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    lengths = segments.lengths().new_zeros(counts.numel())
    lengths.index_add_(0, sample, segments.lengths())
    return KeyedJaggedTensor(
        keys=segments.keys(),
        values=segments.values(),
        weights=segments.weights_or_none(),
        lengths=lengths,
        stride=segment_counts.shape[1],
    )


def pool_segments(
    rows: torch.Tensor, segment_counts: torch.Tensor, *, mean: bool = False
) -> torch.Tensor:
    """Reduces the rows of one feature's segments (rank 1) to samples.

    Args:
        rows: ``[segments, dim]``; differentiable.
        segment_counts: integers ``[samples]``: number of segments of each sample.
        mean: whether to divide by the number of segments.

    Returns:
        ``[samples, dim]``, zeros for samples without segments.

    Raises:
        ValueError: the counts do not fit the rows.
    """
    counts = segment_counts.long()
    if counts.dim() != 1 or int(counts.sum()) != rows.shape[0] or bool((counts < 0).any()):
        raise ValueError(
            f"segment_counts have shape {tuple(counts.shape)} and the sum {int(counts.sum())}, but "
            f"must be as many as samples, none negative, with the sum {rows.shape[0]}."
        )
    sample = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    pooled = rows.new_zeros(counts.numel(), rows.shape[1]).index_add(0, sample, rows)
    return pooled / counts.clamp_min(1).unsqueeze(1).to(rows) if mean else pooled


def _rank_of(features: Sequence[str], given: int | Mapping[str, int] | None) -> int:
    name, ranks = "rank", given
    if given is None:
        name = f"{environment.PREFIX}EMB_SEGMENT_RANK"
        ranks = {
            feature: int(said) if said.isdecimal() else said
            for feature, said in environment.by_table("EMB_SEGMENT_RANK").items()
        }
    by_feature = ranks if isinstance(ranks, Mapping) else {"": ranks}
    for rank in by_feature.values():
        if rank not in (0, 1):
            raise ValueError(f"{name} is {rank!r}, but must be 0 or 1.")
    found = {feature: by_feature.get(feature, by_feature.get("", 0)) for feature in features}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{name} is {found} by feature, but features of one call must have the same rank: use "
            "a call for each rank."
        )
    return next(iter(found.values()), 0)


def _check_counts(segments: KeyedJaggedTensor, segment_counts: torch.Tensor) -> None:
    features = len(segments.keys())
    if segment_counts.dim() != 2 or segment_counts.shape[0] != features:
        raise ValueError(
            f"segment_counts have shape {tuple(segment_counts.shape)}, but must be "
            f"[{features}, samples]."
        )
    sums = segment_counts.sum(dim=1)
    if bool((segment_counts < 0).any()) or bool((sums != segments.stride()).any()):
        raise ValueError(
            f"segment_counts have the sums {sums.tolist()} by feature, but the features have "
            f"{segments.stride()} segments each, and no count may be negative."
        )
