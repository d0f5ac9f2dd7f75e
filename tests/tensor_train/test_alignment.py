"""Tensors at any alignment."""

from __future__ import annotations

import torch

from tests.support import tensor_train as tt
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.tensor_train import TTGroup

pytestmark = NEEDS_GPU


def test_gradient_at_an_odd_address():
    shape = tt.LARGER[0]
    cores = tt.random_cores(shape, "cuda")
    bags, group = tt.even_bags([shape]), TTGroup([shape])
    memory = torch.randn(40 * 64 + 1, device="cuda")
    grad = memory[1:].view(40, 64)
    assert grad.data_ptr() % 16 != 0
    args = (bags.ids, bags.offsets, 40)
    odd = group.gradients(cores, grad, *args)
    for one, other in zip(odd, group.gradients(cores, grad.clone(), *args), strict=True):
        tt.assert_near(one, other, 1e-6)
