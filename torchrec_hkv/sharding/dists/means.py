"""Mean pooling of row-wise sharded tables: lookups return sums, which are divided after the
reduction over ranks.

If one row-wise table has mean pooling, TorchRec divides all outputs of a collection by their bag
lengths, except for features that a row-wise table sums. It thus also divides outputs of tables with
other sharding types, whose lookups return final sums or means. It divides either all or no tables
of a shared feature, and it does not divide grid-sharded tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_hkv.sharding.tables import SUMMED_OVER_RANKS


class Means:
    """The divisors of a collection's outputs.

    Args:
        configs: configs of the tables.
        sharding_types: sharding type of each table by name.
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
                # The names of outputs in TorchRec.
                is_shared = all_features.count(feature) > 1
                self._feature_of[f"{feature}@{config.name}" if is_shared else feature] = feature

    def __bool__(self) -> bool:
        """Whether any output has to be divided."""
        return bool(self._feature_of)

    def divisor(
        self, features: KeyedJaggedTensor, names: Sequence[str], dims: Tensor, width: int
    ) -> Tensor:
        """The divisors of a batch's outputs, float32 ``[samples, width]``.

        Args:
            features: the batch on this rank, before it is sent.
            names: names of the outputs, in order.
            dims: int64 ``[outputs]`` on the device: number of columns of each output.
            width: sum of ``dims``.
        """
        lengths = _lengths(features)
        ones = torch.ones_like(next(iter(lengths.values())))
        by_output = [
            lengths[self._feature_of[name]] if name in self._feature_of else ones for name in names
        ]
        return torch.stack(by_output, dim=1).repeat_interleave(dims, dim=1, output_size=width)


def divide(outputs: KeyedTensor, divisor: Tensor) -> KeyedTensor:
    """Divides outputs."""
    return KeyedTensor(
        keys=outputs.keys(),
        values=outputs.values() / divisor,
        length_per_key=outputs.length_per_key(),
        key_dim=1,
    )


def _lengths(features: KeyedJaggedTensor) -> dict[str, Tensor]:
    """For each feature, the length or the sum of weights of each sample's bag; 1 instead of 0."""
    weights = features.weights_or_none()
    if weights is None:
        lengths = features.lengths().float()
    else:  # torch.segment_reduce would synchronize with a GPU
        lengths = torch.ops.fbgemm.segment_sum_csr(1, features.offsets().int(), weights.float())
    lengths = torch.where(lengths == 0, torch.ones_like(lengths), lengths)
    by_key = dict(zip(features.keys(), lengths.split(features.stride_per_key()), strict=True))
    inverse = features.inverse_indices_or_none()
    if not features.variable_stride_per_key() or inverse is None:
        return by_key
    keys, bags = inverse
    return {key: by_key[key][of_key] for key, of_key in zip(keys, bags, strict=True)}
