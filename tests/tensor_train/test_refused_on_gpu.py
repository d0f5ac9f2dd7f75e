"""Calls that a GPU refuses."""

from __future__ import annotations

import math

import pytest

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup, TTShape

pytestmark = NEEDS_GPU


def test_refusals():
    shape = tt.LARGER[0]
    group, bags = TTGroup([shape]), tt.even_bags([shape])
    cores = tt.random_cores(shape, "cuda")
    args = (bags.ids, bags.offsets, 40)
    index = group.sort(*args)
    with pytest.raises(ValueError, match=r"index must have .* sort the batch with the weights"):
        group.lookup(cores, *args, weights=bags.weights, index=index)
    with pytest.raises(ValueError, match="cores must be on cuda:0, but is on cpu"):
        group.lookup([core.cpu() for core in cores], *args)
    high = TTShape(10**6, 512, (1000, 1000), (16, 32), (300,))
    assert math.prod(high.p) == 10**6
    with pytest.raises(ValueError, match="table 'table_0' has rank 300, but on a GPU"):
        TTGroup([high]).sort(*args)
