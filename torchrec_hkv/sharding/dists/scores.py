"""Scores of ids in a batch, and how they are sent together with the ids.

Scores are sent as the weights of the KeyedJaggedTensor. If all scores come from weights, the
float32 weights are sent. Otherwise a float64 tensor carries the 64 bits of a score, or, in a
weighted collection, the bits of a float32 weight and an int32 score.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.backends.specs import BackendOptions
from torchrec_hkv.hash_table import scores_of_weights
from torchrec_hkv.sharding.kernels.kernel import BackendKernel

_INT32 = torch.iinfo(torch.int32)


@dataclasses.dataclass(frozen=True)
class ScoredTable:
    """A table that takes scores.

    Attributes:
        name: name of the table.
        features: the features that look it up.
        score_features: features with the same bags whose values are the scores; empty if the scores
            are the weights.
    """

    name: str
    features: tuple[str, ...]
    score_features: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ScoreWire:
    """How the scores of a collection's batches are sent.

    Attributes:
        tables: the tables that take scores.
        is_weighted: whether the collection is weighted.
    """

    tables: tuple[ScoredTable, ...]
    is_weighted: bool

    @classmethod
    def of(
        cls, tables: Iterable[tuple[str, Sequence[str], BackendOptions]], is_weighted: bool
    ) -> ScoreWire | None:
        """Makes it for a collection; None if no table takes scores.

        Args:
            tables: name, features and options of each table.
            is_weighted: whether the collection is weighted.
        """
        scored = tuple(
            ScoredTable(name, tuple(features), source.features)
            for name, features, options in tables
            if (source := options.score_source) is not None
        )
        return cls(scored, is_weighted) if scored else None

    @property
    def are_weights(self) -> bool:
        """Whether all scores come from weights."""
        return not any(table.score_features for table in self.tables)

    @property
    def needs_weights(self) -> bool:
        """Whether some scores come from weights."""
        return not all(table.score_features for table in self.tables)

    def attach(self, features: KeyedJaggedTensor) -> Tensor:
        """The weights to send.

        If scores are values of features, it reads the number of ids of each feature, which
        synchronizes with a GPU.

        Args:
            features: the batch, with weights if they are needed.

        Returns:
            float32 or float64 ``[ids]``.

        Raises:
            ValueError: a feature of scores is missing, or has other bags than its feature; or, on a
                CPU, a score in a weighted collection does not fit in 32 bits.
        """
        weights = features.weights_or_none()
        if self.are_weights:
            return weights.float()
        values = features.values()
        if self.needs_weights:
            scores = scores_of_weights(weights)
        else:
            scores = torch.zeros(values.numel(), dtype=torch.int64, device=values.device)
        ends = features.offset_per_key()
        at = {key: slice(ends[i], ends[i + 1]) for i, key in enumerate(features.keys())}
        for table in self.tables:
            for feature, source in zip(table.features, table.score_features, strict=False):
                _check_bags(features, table.name, feature, source)
                scores[at[feature]] = values[at[source]].long()
        if not self.is_weighted:
            return scores.view(torch.float64)
        if scores.device.type == "cpu" and scores.numel() > 0:
            self._check_range(scores)
        narrow = scores.clamp(_INT32.min, _INT32.max).int()
        return torch.stack([weights.float().view(torch.int32), narrow], 1).view(torch.float64)[:, 0]

    def without_scores(
        self, features: KeyedJaggedTensor, configs: Sequence[BaseEmbeddingConfig]
    ) -> KeyedJaggedTensor:
        """The batch without features that only hold scores. TorchRec keeps the feature order of the
        first batch, so batches with and without scores must have the same features.

        Args:
            features: the batch.
            configs: configs of all tables of the collection.
        """
        looked_up = {feature for config in configs for feature in config.feature_names}
        scores = {feature for table in self.tables for feature in table.score_features}
        positions = [i for i, key in enumerate(features.keys()) if key not in scores - looked_up]
        if len(positions) == len(features.keys()):
            return features
        others = features.permute(positions)
        others._inverse_indices = features.inverse_indices_or_none()
        return others

    def _check_range(self, scores: Tensor) -> None:
        lowest, highest = scores.aminmax()
        for score in (int(lowest), int(highest)):
            if not _INT32.min <= score <= _INT32.max:
                names = ", ".join(repr(table.name) for table in self.tables)
                raise ValueError(
                    f"A score of the tables {names} is {score}, but scores in a weighted "
                    "collection must be from -2^31 to 2^31 - 1, as they are sent beside weights."
                )

    def unpack(self, weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Splits received weights into weights and scores.

        Args:
            weights: the result of :meth:`attach`. For a batch sent without scores: None, or float32
                weights.

        Returns:
            float32 weights of a weighted collection, else None; and int64 scores or None.
        """
        if weights is None:
            return None, None
        if weights.dtype == torch.float64:
            if not self.is_weighted:
                return None, weights.view(torch.int64)
            pairs = weights.contiguous().view(torch.int32).view(-1, 2)
            return pairs[:, 0].contiguous().view(torch.float32), pairs[:, 1].long()
        scores = scores_of_weights(weights) if self.are_weights else None
        return weights if self.is_weighted else None, scores

    def install(self, lookups: Iterable[nn.Module]) -> None:
        """Makes kernels unpack received weights: kernels of backends get scores, stock kernels only
        the weights."""
        for lookup in lookups:
            for kernel in lookup.modules():
                if isinstance(kernel, BackendKernel):
                    kernel.score_wire = self
                elif isinstance(kernel, BaseBatchedEmbedding | BaseBatchedEmbeddingBag):
                    kernel.register_forward_pre_hook(functools.partial(_without_scores, self))


def check_score_source(table: str, features: Sequence[str], options: BackendOptions) -> None:
    """Checks that a table has one feature of scores for each feature.

    Raises:
        ValueError: the numbers differ; the message names the table and both lists.
    """
    source = options.score_source
    if source is None or not source.features or len(source.features) == len(features):
        return
    raise ValueError(
        f"Table {table!r} has score_feature={list(source.features)} and looks up {list(features)}: "
        "it must have one feature of scores for each feature, in their order."
    )


def _check_bags(features: KeyedJaggedTensor, table: str, feature: str, source: str) -> None:
    """Checks that there is one score per id."""
    what = f"Table {table!r} takes the scores of feature {feature!r} from feature {source!r}"
    if source not in features.keys():  # noqa: SIM118
        raise ValueError(f"{what}, which the batch lacks: it has {features.keys()}.")
    ids, scores = features[feature], features[source]
    id_lengths, score_lengths = ids.lengths(), scores.lengths()
    if id_lengths.shape != score_lengths.shape or ids.values().numel() != scores.values().numel():
        raise ValueError(
            f"{what}, which has {scores.values().numel()} values in {score_lengths.numel()} bags, "
            f"but must have one for each of {ids.values().numel()} ids in {id_lengths.numel()} "
            "bags."
        )
    if id_lengths.device.type == "cuda":
        torch._assert_async(
            (id_lengths == score_lengths).all(), f"{what}: its bags must have the same lengths."
        )
    elif not torch.equal(id_lengths, score_lengths):
        bag = int((id_lengths != score_lengths).nonzero()[0])
        raise ValueError(
            f"{what}, whose bag {bag} has {int(score_lengths[bag])} values, but must have one for "
            f"each of {int(id_lengths[bag])} ids."
        )


def _without_scores(wire: ScoreWire, _kernel: nn.Module, arguments: tuple[Any, ...]) -> Any:
    features, *others = arguments
    stripped = copy.copy(features)
    stripped._weights, _ = wire.unpack(features.weights_or_none())
    return (stripped, *others)
