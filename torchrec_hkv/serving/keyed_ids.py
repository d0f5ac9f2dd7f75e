"""Ids of several features, which a served model takes instead of a ``KeyedJaggedTensor``."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.id_types import ID_DTYPES, int64_ids


@dataclasses.dataclass(frozen=True, eq=False)
class KeyedIds:
    """Ids of some features of a batch.

    Attributes:
        keys: names of the features.
        values: ids ``[n]`` of any integer dtype, ordered by feature, then by sample.
        lengths: int32 or int64 ``[features, samples]``, the number of ids of each feature and
            sample.
        weights: float32 ``[n]``, or None.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: a tensor has the wrong shape.
    """

    keys: Sequence[str]
    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        for name, allowed, of in (
            ("values", ID_DTYPES, "integers of 8 to 64 bits"),
            ("lengths", (torch.int32, torch.int64), "int32 or int64"),
        ):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype not in allowed:
                what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{name} are {what}, but must be a tensor of {of}.")
        if self.values.dim() != 1:
            raise ValueError(
                f"values must have one dimension, but have shape {tuple(self.values.shape)}."
            )
        if self.lengths.dim() != 2 or self.lengths.shape[0] != len(self.keys):
            raise ValueError(
                f"lengths must have shape [{len(self.keys)}, samples], but have "
                f"{tuple(self.lengths.shape)}."
            )
        if self.weights is not None:
            if not isinstance(self.weights, Tensor) or not self.weights.is_floating_point():
                raise TypeError("weights must be a float tensor.")
            if self.weights.shape != self.values.shape:
                raise ValueError(
                    f"weights must have shape {tuple(self.values.shape)}, but have "
                    f"{tuple(self.weights.shape)}."
                )

    @classmethod
    def from_lists(
        cls,
        ids: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> KeyedIds:
        """Creates ids from lists: for each feature the ids of each sample.

        Args:
            ids: for example ``{"user": [[1], [2]], "seen": [[7, 8], []]}``.
            weights: lists of the same shape, or None.

        Raises:
            TypeError: the ids of a feature are not lists in a list.
            ValueError: features have different numbers of samples, weights have the wrong shape, or
                an id is not an integer of 64 bits.
        """
        lengths = [_lengths(key, bags) for key, bags in ids.items()]
        samples = {len(feature_lengths) for feature_lengths in lengths}
        if len(samples) > 1:
            raise ValueError(
                f"features have {sorted(samples)} samples, but must all have the same number."
            )
        flat = None
        if weights is not None:
            shape = [[len(bag) for bag in weights.get(key, ())] for key in ids]
            if shape != lengths:
                raise ValueError("weights must have one number for each id.")
            flat = torch.tensor([w for key in ids for bag in weights[key] for w in bag])
        return cls(
            list(ids),
            _int64([bag for bags in ids.values() for bag in bags]),
            torch.tensor(lengths, dtype=torch.int64).view(
                len(ids), samples.pop() if samples else 0
            ),
            flat,
        )


def _lengths(key: str, bags: Sequence[Sequence[int]]) -> list[int]:
    try:
        return [len(bag) for bag in bags]
    except TypeError:
        raise TypeError(
            f"ids of feature {key!r} must be lists of the ids of each sample, such as "
            "[[1], [2, 3]]."
        ) from None


def _int64(bags: Sequence[Sequence[int]]) -> Tensor:
    """The numbers of all bags."""
    try:
        return _C.int64_of_lists(bags)
    except (TypeError, OverflowError):
        bad = next(number for bag in bags for number in bag if not _is_id(number))
        raise ValueError(
            f"an id is {bad!r}, but must be an integer from -2^63 to 2^63 - 1."
        ) from None


def _is_id(number: Any) -> bool:
    try:
        return -(2**63) <= operator.index(number) < 2**63
    except TypeError:
        return False


def tensors_of(
    given: Any, keys: Sequence[str], is_weighted: bool, device: torch.device
) -> list[Tensor]:
    """Converts ids to the tensors that a program takes for some features.

    Args:
        given: a :class:`KeyedIds`, lists for its ``from_lists``, or a ``KeyedJaggedTensor``. Other
            features are ignored.
        keys: names of the features, in the program's order.
        is_weighted: whether the program takes weights.
        device: device of the program.

    Raises:
        TypeError: ``given`` has the wrong type, or a tensor has the wrong dtype.
        ValueError: a feature or weights are missing, or a tensor has the wrong shape.
    """
    if isinstance(given, KeyedIds):  # tested first, because the next test takes longer
        pass
    elif isinstance(given, Mapping):
        given = KeyedIds.from_lists(given)
    else:
        if not all(hasattr(given, name) for name in ("keys", "values", "lengths")):
            raise TypeError(
                f"ids are a {type(given).__name__}, but must be a KeyedIds, a dictionary of lists "
                "or a KeyedJaggedTensor."
            )
        weights = given.weights_or_none() if hasattr(given, "weights_or_none") else None
        names = list(given.keys())
        check_one_stride(given)
        given = KeyedIds(names, given.values(), given.lengths().view(len(names), -1), weights)
    if given.keys != keys:
        missing = [key for key in keys if key not in given.keys]
        if missing:
            raise ValueError(f"ids lack the features {missing}: they have {list(given.keys)}.")
        if list(given.keys) != list(keys):
            given = _in_order(given, keys)
    if is_weighted and given.weights is None:
        raise ValueError("ids have no weights, but the model takes weighted features.")
    values, lengths = given.values, given.lengths
    if values.dtype is not torch.int64:
        values = int64_ids(values)
    if lengths.dtype is not torch.int64:
        lengths = lengths.long()
    tensors = [values, lengths]
    if is_weighted:
        tensors.append(given.weights.float())
    elif values.device == device and lengths.device == device:
        return tensors
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def check_one_stride(features: Any) -> None:
    """Checks that a ``KeyedJaggedTensor`` has a sample of every feature.

    Raises:
        ValueError: features have different numbers of samples.
    """
    if hasattr(features, "variable_stride_per_key") and features.variable_stride_per_key():
        raise ValueError(
            "the features of a batch have different numbers of samples: a served model takes "
            "batches with a sample of every feature."
        )


def _in_order(given: KeyedIds, keys: Sequence[str]) -> KeyedIds:
    if given.lengths.numel() > 0 and int(given.lengths.min()) < 0:
        raise ValueError(f"lengths must not be negative, but one is {int(given.lengths.min())}.")
    counts = given.lengths.sum(dim=1).tolist()
    if sum(counts) != given.values.numel():
        raise ValueError(
            f"lengths add up to {sum(counts)}, but there are {given.values.numel()} ids."
        )
    numbers = [list(given.keys).index(key) for key in keys]
    values = given.values.split(counts)
    weights = None if given.weights is None else given.weights.split(counts)
    return KeyedIds(
        keys,
        torch.cat([values[number] for number in numbers]),
        given.lengths[numbers],
        None if weights is None else torch.cat([weights[number] for number in numbers]),
    )
