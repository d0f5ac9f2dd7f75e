"""Initializers are values: equal, hashable, checked when they are made."""

import math
import pickle

import numpy as np
import pytest

from torchrec_hkv.hash_table import Constant, Normal, TruncatedNormal, Uniform

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [(Uniform, (-1, 2)), (Normal, (0, 1)), (TruncatedNormal, (0, 1, -2, 2)), (Constant, (3,))],
)
def test_values(kind, numbers):
    initializer = kind(*numbers)
    same = kind(*map(np.float32, numbers))
    assert initializer == same
    assert hash(initializer) == hash(same)
    assert repr(initializer) == repr(same)
    assert pickle.loads(pickle.dumps(initializer)) == initializer
    assert initializer != kind(*(x + 1 for x in numbers))
    with pytest.raises(AttributeError):
        setattr(initializer, next(iter(vars(initializer))), 0.0)


@pytest.mark.parametrize(
    ("kind", "numbers", "match"),
    [
        (Uniform, (1, 0), r"Uniform: low is 1.0 and high is 0.0, but low must not be larger"),
        (Uniform, (0, INF), r"Uniform: high is inf, but must be a finite number within the range"),
        (Uniform, (NAN, 0), r"Uniform: low is nan, but"),
        (Uniform, ("0", 1), r"Uniform: low is '0', but"),
        (Uniform, (0, True), r"Uniform: high is True, but"),
        (Uniform, (-3e38, 3e38), r"Uniform: low is -3e\+38 and high is 3e\+38, but their distance"),
        (Normal, (INF, 1), r"Normal: mean is inf, but"),
        (Normal, (0, 0), r"Normal: std is 0.0, but must be positive"),
        (Normal, (0, -1), r"Normal: std is -1.0, but must be positive"),
        (Normal, (0, 1e39), r"Normal: std is 1e\+39, but"),
        (Normal, (None, 1), r"Normal: mean is None, but"),
        (TruncatedNormal, (0, 0, -1, 1), r"TruncatedNormal: std is 0.0, but must be positive"),
        (TruncatedNormal, (0, 1, 2, -2), r"TruncatedNormal: low is 2.0 and high is -2.0, but low"),
        (TruncatedNormal, (0, 1, -INF, 2), r"TruncatedNormal: low is -inf, but"),
        (TruncatedNormal, (0, 1, 2, 2), r"range from 2.0 to 2.0 holds 0 of the probability of a"),
        (TruncatedNormal, (0, 1, 9, 10), r"range from 9.0 to 10.0 holds 1.13e-19 of the probab"),
        (TruncatedNormal, (0, 1, -99, -50), r"holds 0 of .* mean 0.0 and std 1.0, but must hold"),
        (Constant, (NAN,), r"Constant: value is nan, but"),
        (Constant, (-1e39,), r"Constant: value is -1e\+39, but"),
    ],
)
def test_impossible_initializers(kind, numbers, match):
    with pytest.raises(ValueError, match=match):
        kind(*numbers)
