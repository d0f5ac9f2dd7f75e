"""Distributions of the initial rows.

Each value is a pure function of seed, table name, id and column; see
:func:`torchrec_hkv.hash_table.initial_rows`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import TypeAlias

import torch

from torchrec_hkv import _C

_MAX = torch.finfo(torch.float32).max


def _check_numbers(initializer: Initializer) -> None:
    """Checks all fields and converts them to float."""
    for field in dataclasses.fields(initializer):
        value = getattr(initializer, field.name)
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (real and abs(value) <= _MAX):
            raise ValueError(
                f"{type(initializer).__name__}: {field.name} is {value!r}, but must be a finite "
                "number within the range of float32."
            )
        object.__setattr__(initializer, field.name, float(value))


def _check_order(initializer: Uniform | TruncatedNormal) -> None:
    if initializer.low > initializer.high:
        raise ValueError(
            f"{type(initializer).__name__}: low is {initializer.low} and high is "
            f"{initializer.high}, but low must not be larger."
        )


def _check_std(initializer: Normal | TruncatedNormal) -> None:
    if initializer.std <= 0:
        raise ValueError(
            f"{type(initializer).__name__}: std is {initializer.std}, but must be positive."
        )


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Uniform distribution over ``[low, high)``; constant if the bounds are equal.

    Raises:
        ValueError: a bound or their distance is not finite in float32, or ``low`` is larger than
            ``high``.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_order(self)
        if self.high - self.low > _MAX:
            raise ValueError(
                f"Uniform: low is {self.low} and high is {self.high}, but their distance must be "
                "within the range of float32."
            )


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal distribution.

    Each value uses 32 random bits, so values lie within 6.34 standard deviations of the mean.

    Raises:
        ValueError: a number is not finite in float32, or ``std`` is not positive.
    """

    mean: float
    std: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_std(self)


@dataclasses.dataclass(frozen=True)
class TruncatedNormal:
    """Normal distribution, truncated to ``[low, high]``.

    Raises:
        ValueError: a number is not finite in float32, ``std`` is not positive, ``low`` is larger
            than ``high``, or the interval holds less than 1e-9 of the probability.
    """

    mean: float
    std: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_std(self)
        _check_order(self)
        mass = _C.normal_mass(self.mean, self.std, self.low, self.high)
        if mass < _C.MIN_NORMAL_MASS:
            raise ValueError(
                f"TruncatedNormal: the range from {self.low} to {self.high} holds {mass:.3g} of "
                f"the probability of a normal with mean {self.mean} and std {self.std}, but must "
                f"hold at least {_C.MIN_NORMAL_MASS}."
            )


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same value for all columns of all rows.

    Raises:
        ValueError: the value is not finite in float32.
    """

    value: float

    def __post_init__(self) -> None:
        _check_numbers(self)


#: The initializers that tables accept.
Initializer: TypeAlias = Uniform | Normal | TruncatedNormal | Constant

_BY_NAME = {kind.__name__: kind for kind in (Uniform, Normal, TruncatedNormal, Constant)}


def initializer_from_fields(fields: Mapping[str, str | float]) -> Initializer:
    """Makes an initializer of the class ``fields["type"]`` from the other fields.

    Raises:
        ValueError: no initializer has this name.
    """
    numbers_of = dict(fields)
    name = numbers_of.pop("type", None)
    if name not in _BY_NAME:
        raise ValueError(f"type is {name!r}, but must be one of {', '.join(_BY_NAME)}.")
    return _BY_NAME[name](**numbers_of)


def op_arguments(initializer: Initializer | None) -> dict[str, str | float]:
    """An initializer as arguments of the ops.

    Args:
        initializer: None for zeros.

    Raises:
        ValueError: ``initializer`` has another type.
    """
    distribution, mean, std = "uniform", 0.0, 1.0
    match initializer:
        case None:
            low = high = 0.0
        case Constant(value):
            low = high = value
        case Uniform(low, high):
            pass
        case Normal(mean, std):
            distribution, low, high = "normal", -math.inf, math.inf
        case TruncatedNormal(mean, std, low, high):
            distribution = "normal"
        case _:
            raise ValueError(
                f"initializer is {initializer!r}, but must be a Uniform, Normal, TruncatedNormal "
                "or Constant, or None."
            )
    return {"distribution": distribution, "low": low, "high": high, "mean": mean, "std": std}
