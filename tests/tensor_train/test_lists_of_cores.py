"""A group on a GPU works with several lists of cores."""

from __future__ import annotations

import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU


def test_many_lists_of_cores_take_turns():
    """More lists than a group caches; each gradient belongs to its list of cores."""
    shape = tt.LARGER[2]
    group, bags = TTGroup([shape]), tt.even_bags([shape])
    lists = [[c.requires_grad_() for c in tt.random_cores(shape, "cuda")] for _ in range(11)]
    outs = [group.lookup(cores, bags.ids, bags.offsets, 40) for cores in lists]
    grad = torch.randn_like(outs[0])
    for cores, out in zip(lists, outs, strict=True):
        expected = tt.reference_lookup([tt.dense_table(shape, cores)], [0], bags)
        tt.assert_near(out, expected)
        wanted = torch.autograd.grad(expected, cores, grad.double())
        for one, other in zip(torch.autograd.grad(out, cores, grad), wanted, strict=True):
            tt.assert_near(one, other, 2e-5)
