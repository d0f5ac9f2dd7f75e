"""Bags of bags: ids that are nested twice, reduced at one of the two levels.

The counterpart of HybridBackend's ``emb_segment_rank``. A sample may have several segments (the
items of a basket, the sentences of a text) of several ids each. A ``KeyedJaggedTensor`` has one
level of bags, which is what tables reduce: this makes one of either level.
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
    """Features whose bags are samples, or the segments of samples.

    Args:
        segments: its bags are segments: those of the first feature's first sample, of its second
            sample, and so on; then those of the second feature. All features have as many.
        segment_counts: integers ``[features, samples]``: segments of each sample.
        rank: 0: a bag is a sample, all ids of its segments; ``[samples, dim]`` comes out of a
            pooled table. 1: a bag is a segment; ``[segments, dim]`` comes out, which
            :func:`pool_segments` or a model of one's own reduces. Or by feature, 0 for those that
            are not named; one batch has bags of one kind, so that features of different ranks take
            a call each. None: what ``TORCHREC_HKV_EMB_SEGMENT_RANK`` says, else 0.

    Raises:
        ValueError: another rank, features of different ranks, or counts that do not fit the
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
    """Reduces what rank 1 gave of one feature to samples.

    Args:
        rows: ``[segments, dim]``; differentiable.
        segment_counts: integers ``[samples]``.
        mean: divides by the number of segments.

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


def _rank_of(features: Sequence[str], told: int | Mapping[str, int] | None) -> int:
    name, ranks = "rank", told
    if told is None:
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
            f"{name} is {found} by feature, but a batch has bags of one kind: take the features of "
            "each rank in a call of their own."
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
