"""Row-wise pooled tables whose rows are exchanged in several parts.

If TorchRec's sharding is split into groups, each group has its own input distribution, which takes
as much host time as one for all tables. Parts share one sharding and one input distribution. The
lookup processes them one after the other: the rows of a part are sent while the next part is looked
up. In the backward, gradients of one part arrive while rows of another are updated.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.dists.exchange_groups import ExchangePart
from torchrec_hkv.sharding.dists.output_dist import RowWiseOutputDist
from torchrec_hkv.sharding.dists.variable_batch import merged_groups
from torchrec_hkv.sharding.kernels.lookups import BackendPooledLookup


def groups_of_parts(
    groups: Sequence[GroupedEmbeddingConfig], parts: Sequence[ExchangePart]
) -> list[list[GroupedEmbeddingConfig]]:
    """Splits TorchRec's groups of tables, each served by one kernel, by part.

    Args:
        groups: the groups of a sharding on one rank.
        parts: the parts.

    Returns:
        The groups of each part.
    """
    return [
        [
            dataclasses.replace(group, embedding_tables=tables)
            for group in groups
            if (tables := [table for table in group.embedding_tables if table.name in part.tables])
        ]
        for part in parts
    ]


class PartsAwaitable(Awaitable[Tensor]):
    """Concatenates the pooled rows of all parts when they have arrived."""

    def __init__(self, parts: Sequence[Awaitable[Tensor]]) -> None:
        """
        Args:
            parts: the exchanges of the parts.
        """
        super().__init__()
        self._parts = parts

    def _wait_impl(self) -> Tensor:
        # Batches of variable size are flat, one feature after the other.
        return torch.cat([part.wait() for part in self._parts], dim=-1)


class MultiPartOutputDist(BaseEmbeddingDist[EmbeddingShardingContext, Any, Tensor]):
    """The output distribution after a :class:`MultiPartLookup`, which has already started it."""

    def __init__(self, dists: Iterable[RowWiseOutputDist]) -> None:
        """
        Args:
            dists: output distributions of the parts.
        """
        super().__init__()
        self._dists = nn.ModuleList(dists)

    def forward(
        self, local_embs: PartsAwaitable, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Returns the exchange that the lookup has started."""
        return local_embs


class MultiPartLookup(BackendPooledLookup):
    """A lookup that starts the exchange of each part as soon as the part is looked up."""

    def __init__(
        self, *args: Any, parts: Sequence[int], dists: Sequence[RowWiseOutputDist], **kwargs: Any
    ) -> None:
        """
        Args:
            args: arguments of TorchRec's class.
            parts: number of groups of each part.
            dists: output distribution of each part.
            kwargs: keyword arguments of TorchRec's class.
        """
        super().__init__(*args, **kwargs)
        self._sender = _Sender(parts, self._feature_splits, dists)
        for kernel in self._emb_modules:
            kernel.register_forward_hook(self._sender.after_lookup)

    def expect(self, context: EmbeddingShardingContext) -> None:
        """Sets the context of the batch that is looked up next."""
        self._sender.context = context

    def _forward(self, features_by_group: list[KeyedJaggedTensor]) -> list[Any]:
        with self._sender.batch(None):
            super()._forward(features_by_group)
        return [self._sender.finish()]

    def _forward_with_vbe_merging(
        self, features_by_group: list[KeyedJaggedTensor], device: torch.device
    ) -> Any:
        with self._sender.batch(self._vbe_splits(features_by_group)):
            super()._forward(features_by_group)
        return self._sender.finish()


class _Sender:
    """Collects the outputs of groups, and sends a part when all of its groups are looked up."""

    def __init__(
        self, parts: Sequence[int], num_features: Sequence[int], dists: Sequence[RowWiseOutputDist]
    ) -> None:
        self._spans = list(itertools.pairwise(itertools.accumulate(parts, initial=0)))
        self._num_features = num_features
        self._first_feature = list(itertools.accumulate(num_features, initial=0))
        self._dists = tuple(dists)
        self.context: EmbeddingShardingContext | None = None
        self._is_looking_up = False

    @contextlib.contextmanager
    def batch(self, sizes: list[list[int]] | None) -> Iterator[None]:
        """A context for the lookup of a batch.

        Args:
            sizes: for flat outputs, the sizes of each group's outputs; else None.
        """
        self._sizes = sizes
        self._outputs: list[Tensor] = []
        self._exchanges: list[Awaitable[Tensor]] = []
        self._is_looking_up = True
        try:
            yield
        finally:
            self._is_looking_up = False

    def after_lookup(self, kernel: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        """A forward hook of kernels, which are called group by group. Calls outside of
        :meth:`batch` are ignored."""
        if not self._is_looking_up:
            return
        self._outputs.append(output)
        begin, end = self._spans[len(self._exchanges)]
        if len(self._outputs) == end:
            of_part = slice(begin, end)
            self._exchanges.append(
                self._dists[len(self._exchanges)](
                    self._concatenated(of_part),
                    self._context_of(self._first_feature[begin], self._first_feature[end]),
                )
            )

    def finish(self) -> PartsAwaitable:
        """The exchange of all parts."""
        sent, self._exchanges, self._outputs, self.context = self._exchanges, [], [], None
        return PartsAwaitable(sent)

    def _concatenated(self, groups: slice) -> Tensor:
        outputs = self._outputs[groups]
        if len(outputs) == 1:
            return outputs[0]
        if self._sizes is None:
            return torch.cat(outputs, dim=1)
        return merged_groups(outputs, self._sizes[groups], self._num_features[groups])

    def _context_of(self, begin: int, end: int) -> EmbeddingShardingContext | None:
        """The context for the features from ``begin`` to ``end``."""
        context = self.context
        if context is None or not context.variable_batch_per_feature:
            return context
        part = copy.copy(context)  # not dataclasses.replace: in TorchRec 1.6 it is no dataclass
        part.batch_size_per_rank_per_feature = [
            of_rank[begin:end] for of_rank in context.batch_size_per_rank_per_feature
        ]
        part.batch_size_per_feature_pre_a2a = context.batch_size_per_feature_pre_a2a[begin:end]
        return part
