"""Means of tables that are sharded by rows: their lookups give sums over ranks, divided afterwards.

TorchRec divides the outputs of a collection by the lengths of all its bags as soon as one table by
rows has means, but for those of features that a table by rows sums. So tables sharded otherwise,
whose lookups give what was asked for, sums or means, are divided once more, and of several tables
of one feature all or none. It forgets to divide by grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_hkv.sharding.tables import SUMMED_OVER_RANKS


class Means:
    """What the outputs of a collection are divided by.

    Args:
        configs: of its tables.
        sharding_types: by table.
    """

    def __init__(
        self, configs: Sequence[EmbeddingBagConfig], sharding_types: Mapping[str, str]
    ) -> None:
        self._feature_of: dict[str, str] = {}
        all_features = [feature for config in configs for feature in config.feature_names]
        for config in configs:
            is_sum = sharding_types[config.name] in SUMMED_OVER_RANKS
            if config.pooling != PoolingType.MEAN or not is_sum:
                continue
            for feature in config.feature_names:
                # As TorchRec names outputs.
                is_shared = all_features.count(feature) > 1
                self._feature_of[f"{feature}@{config.name}" if is_shared else feature] = feature

    def __bool__(self) -> bool:
        """Whether anything is to be divided."""
        return bool(self._feature_of)

    def divisor(
        self, features: KeyedJaggedTensor, names: Sequence[str], dims: Tensor, width: int
    ) -> Tensor:
        """What the outputs of a batch are divided by, float32 ``[samples, width]``.

        Args:
            features: of the batch on this rank, before it is sent.
            names: of the outputs, in order.
            dims: int64 ``[outputs]`` on the device.
            width: their sum.
        """
        lengths = _lengths(features)
        ones = torch.ones_like(next(iter(lengths.values())))
        by_output = [
            lengths[self._feature_of[name]] if name in self._feature_of else ones for name in names
        ]
        return torch.stack(by_output, dim=1).repeat_interleave(dims, dim=1, output_size=width)


def divide(outputs: KeyedTensor, divisor: Tensor) -> KeyedTensor:
    """The outputs, with sums made means."""
    return KeyedTensor(
        keys=outputs.keys(),
        values=outputs.values() / divisor,
        length_per_key=outputs.length_per_key(),
        key_dim=1,
    )


def _lengths(features: KeyedJaggedTensor) -> dict[str, Tensor]:
    """Of the bag of each sample by feature, weights instead of ids where there are some; 1 where
    they are 0."""
    weights = features.weights_or_none()
    if weights is None:
        lengths = features.lengths().float()
    else:  # by an op that does not wait for a GPU, as torch.segment_reduce does
        lengths = torch.ops.fbgemm.segment_sum_csr(1, features.offsets().int(), weights.float())
    lengths = torch.where(lengths == 0, torch.ones_like(lengths), lengths)
    by_key = dict(zip(features.keys(), lengths.split(features.stride_per_key()), strict=True))
    inverse = features.inverse_indices_or_none()
    if not features.variable_stride_per_key() or inverse is None:
        return by_key
    keys, bags = inverse
    return {key: by_key[key][of_key] for key, of_key in zip(keys, bags, strict=True)}
