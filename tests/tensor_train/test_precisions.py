"""The two precisions of products on a GPU."""

from __future__ import annotations

import pytest

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", tt.LARGER, ids=str)
def test_precisions_are_two(shape):
    cores = tt.random_cores(shape, "cuda")
    bags = tt.even_bags([shape])
    expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
    errors = {}
    for precision in ("fp32", "tf32"):
        group = TTGroup([shape], precision=precision)
        out = group.lookup(cores, bags.ids, bags.offsets, bags.batch_size)
        errors[precision] = float((out - expected).norm() / expected.norm())
    assert errors["fp32"] < 1e-5 < errors["tf32"] < 1e-3
