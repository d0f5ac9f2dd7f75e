"""Checks and conversions of a batch before it is sent to other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.dists.scores import ScoreWire

_ID_DTYPES: frozenset[torch.dtype] = frozenset(
    {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def prepare_features(
    features: KeyedJaggedTensor,
    configs: Sequence[BaseEmbeddingConfig],
    *,
    is_weighted: bool,
    score_wire: ScoreWire | None = None,
    is_training: bool = False,
) -> KeyedJaggedTensor:
    """Checks a batch on the rank that loaded it, and converts its ids to int64.

    Args:
        features: ids of any integer dtype up to int64; weights of any float dtype.
        configs: configs of the collection's tables.
        is_weighted: whether the collection is weighted.
        score_wire: how the collection's scores are sent; None if no table takes scores.
        is_training: whether the batch is sent with scores.

    Returns:
        The same bags with int64 ids and, in a weighted collection, float32 weights; ``features``
        itself if nothing changes. Weights are dropped if the collection is not weighted. Features
        that only hold scores are dropped, and in training the weights are the result of
        :meth:`ScoreWire.attach`.

    Raises:
        ValueError: ids have another dtype, a feature or weights are missing, or batch sizes differ
            between features without inverse indices.
    """
    values = features.values()
    if values.dtype not in _ID_DTYPES:
        raise ValueError(
            f"The ids have dtype {values.dtype}, but must have an integer dtype: int64 or narrower."
        )
    keys = set(features.keys())
    for config in configs:
        for feature in config.feature_names:
            if feature not in keys:
                raise ValueError(
                    f"Table {config.name!r} looks up feature {feature!r}, which the batch lacks: "
                    f"it has {features.keys()}."
                )
    if features.variable_stride_per_key() and features.inverse_indices_or_none() is None:
        raise ValueError(
            "The batch has a separate batch size for each feature but no inverse indices: give the "
            "KeyedJaggedTensor inverse_indices, which map samples to bags."
        )
    weights = features.weights_or_none()
    if is_weighted and (weights is None or not weights.is_floating_point()):
        raise ValueError(
            "The collection is weighted and the batch has "
            + ("no weights" if weights is None else f"weights of dtype {weights.dtype}")
            + ": it must have weights of a float dtype."
        )
    wanted_weights = weights.float() if is_weighted else None
    if score_wire is not None and is_training:
        if score_wire.needs_weights and (weights is None or not weights.is_floating_point()):
            raise ValueError(
                f"Tables {[t.name for t in score_wire.tables if not t.score_features]} take scores "
                "from weights, and the batch has "
                + ("none" if weights is None else f"weights of dtype {weights.dtype}")
                + ": training needs weights of a float dtype."
            )
        wanted_weights = score_wire.attach(features)
    if values.dtype != torch.int64 or wanted_weights is not weights:
        features = _changed(features, values.long(), wanted_weights)
    if score_wire is not None:
        features = score_wire.without_scores(features, configs)
    return features


def _changed(
    features: KeyedJaggedTensor, values: torch.Tensor, weights: torch.Tensor | None
) -> KeyedJaggedTensor:
    """The same bags with other values and weights."""
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=weights,
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=features.stride(),
        stride_per_key_per_rank=(
            features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        ),
        inverse_indices=features.inverse_indices_or_none(),
    )


def in_order(
    features: KeyedJaggedTensor, order: list[int], order_tensor: torch.Tensor
) -> KeyedJaggedTensor:
    """Permutes features like ``KeyedJaggedTensor.permute``, but without synchronization if
    possible.

    ``permute`` reads the number of ids of each feature from the device. This function does not,
    if ``order`` contains each feature once and all features have the same batch size.

    Args:
        features: the batch.
        order: indices of features.
        order_tensor: the same as int32 on the device.
    """
    keys = features.keys()
    is_complete = len(order) == len(keys) == len(set(order))
    if not is_complete or features.variable_stride_per_key():
        return features.permute(order, order_tensor)
    values, weights = features.values(), features.weights_or_none()
    lengths = features.lengths().view(len(keys), -1)
    lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
        order_tensor, lengths, values, weights, values.numel()
    )
    return KeyedJaggedTensor(
        keys=[keys[feature] for feature in order],
        values=values,
        weights=weights,
        lengths=lengths.view(-1),
        stride=features.stride(),
    )


def check_row_numbers(features: KeyedJaggedTensor, tables: Sequence[tuple[str, str, int]]) -> None:
    """Checks ids of dense-compatible tables, which always hold all of their rows.

    On a GPU it is a device-side assertion, which does not synchronize.

    Args:
        features: the batch.
        tables: features to check, each with the name and the number of rows of its table.

    Raises:
        ValueError: an id is not a row number; the message names table, id and allowed range.
    """
    for feature, table, count in tables:
        ids = features[feature].values()
        is_row = (ids >= 0) & (ids < count)
        if ids.device.type == "cuda":
            torch._assert_async(is_row.all(), f"Table {table!r} takes ids from 0 to {count - 1}.")
        elif not is_row.all():
            raise ValueError(
                f"Table {table!r} has dense=True and looks up feature {feature!r}, which has id "
                f"{int(ids[~is_row][0])}: allowed are row numbers from 0 to {count - 1}."
            )
