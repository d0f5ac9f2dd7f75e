"""One exchange of ids for row-wise tables whose rows are exchanged in groups.

TorchRec has an exchange of ids for each group that has one of rows, and cuts the batch in groups
before, for which the host asks the device how many ids each feature has. Exchanged together, the
batch is cut once it has come, when the host knows that anyway.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding

from torchrec_hkv.sharding.embedding_sharding import RowWisePooled, feature_is_hashed
from torchrec_hkv.sharding.input_dist import RowWiseFeaturesDist


class JointInput:
    """Exchanges the ids of groups of row-wise tables together.

    A mixin, to stand right before TorchRec's sharded collection of pooled tables. Only groups that
    follow each other and have a table of ours among them are joined; others are left as they are.
    """

    #: For each exchange of ids the number of features of each group that it serves.
    _groups_of_inputs: list[list[int]]

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        """TorchRec's, called with the first batch."""
        super()._create_input_dist(*args, **kwargs)  # type: ignore[misc]
        self._input_dists, self._groups_of_inputs = _joined(
            self._embedding_shardings, self._input_dists
        )
        self._feature_splits = [sum(sizes) for sizes in self._groups_of_inputs]

    def compute(self, ctx: Any, dist_input: KJTList) -> Any:
        """TorchRec's, of a batch that has come."""
        self._cut(ctx, dist_input)
        return super().compute(ctx, dist_input)  # type: ignore[misc]

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:
        """TorchRec's, of a batch that has come."""
        self._cut(ctx, input)
        return super().compute_and_output_dist(ctx, input)  # type: ignore[misc]

    def prefetch(self, dist_input: KJTList, *args: Any, **kwargs: Any) -> None:
        """TorchRec's, of a batch that has come."""
        self._cut(None, dist_input)
        super().prefetch(dist_input, *args, **kwargs)  # type: ignore[misc]

    def _cut(self, ctx: Any | None, batch: KJTList) -> None:
        """Gives each group its features, and what is known of them: in place, so that a batch that
        was prefetched is the one that is looked up."""
        if len(batch) < len(self._lookups):
            batch.features = [
                part
                for features, sizes in zip(batch.features, self._groups_of_inputs, strict=True)
                for part in (features.split(sizes) if len(sizes) > 1 else [features])
            ]
        if ctx is not None and len(ctx.sharding_contexts) < len(self._lookups):
            ctx.sharding_contexts = [
                part
                for context, sizes in zip(
                    ctx.sharding_contexts, self._groups_of_inputs, strict=True
                )
                for part in _contexts(context, sizes)
            ]


def _contexts(context: EmbeddingShardingContext, sizes: list[int]) -> list[Any]:
    if len(sizes) == 1:
        return [context]
    parts = []
    for begin, end in itertools.pairwise([0, *itertools.accumulate(sizes)]):
        part = copy.copy(context)  # TorchRec 1.6 has it as a class of its own, later as a dataclass
        part.batch_size_per_rank_per_feature = [
            of_rank[begin:end] for of_rank in context.batch_size_per_rank_per_feature
        ]
        part.batch_size_per_feature_pre_a2a = context.batch_size_per_feature_pre_a2a[begin:end]
        parts.append(part)
    return parts


def _joined(
    shardings: Sequence[EmbeddingSharding], dists: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[list[int]]]:
    """The exchanges of ids, and for each of them the numbers of features of its groups."""
    inputs: list[nn.Module] = []
    groups: list[list[int]] = []
    pairs = zip(shardings, dists, strict=True)
    for is_row_wise, run in itertools.groupby(
        pairs, key=lambda pair: isinstance(pair[0], RwPooledEmbeddingSharding)
    ):
        own, its_dists = zip(*run, strict=True)
        sizes = [len(sharding.feature_names()) for sharding in own]
        if len(own) > 1 and is_row_wise and any(isinstance(one, RowWisePooled) for one in own):
            inputs.append(_joint_dist(own))
            groups.append(sizes)
        else:
            inputs.extend(its_dists)
            groups.extend([size] for size in sizes)
    return inputs, groups


def _joint_dist(shardings: Sequence[RwPooledEmbeddingSharding]) -> RowWiseFeaturesDist:
    first = shardings[0]
    return RowWiseFeaturesDist(
        pg=first._pg,
        feature_hash_sizes=[
            size for sharding in shardings for size in sharding._get_feature_hash_sizes()
        ],
        feature_is_hashed=[
            is_hashed
            for sharding in shardings
            for is_hashed in feature_is_hashed(sharding._grouped_embedding_configs)
        ],
        is_sequence=False,
        device=first._device,
    )
