"""A weight gradient under ``create_graph=True`` can't be differentiated."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_refused(device_type, accumulated, linear):
    group = TableGroup([TableSpec("a", 200, 4)], [0], SGD(), device=device_type)
    bags = Bags.random(1, 6, random_ids(20)).to(device_type)
    weights = torch.rand(len(bags.ids), device=device_type, requires_grad=True)
    with group.accumulate() if accumulated else contextlib.nullcontext():
        out = lookup(group, bags, weights)
        loss = out.sum() if linear else out.square().sum()
        (first,) = torch.autograd.grad(loss, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="weights of a hash table's lookup can't be diff"):
        first.square().sum().backward()


def test_first_derivatives_are_those_without_a_graph(device_type):
    bags = Bags.random(1, 6, random_ids(20)).to(device_type)
    weights = torch.rand(len(bags.ids), device=device_type, requires_grad=True)
    gradients = []
    for create_graph in (False, True):
        group = TableGroup([TableSpec("a", 200, 4)], [0], SGD(), device=device_type)
        loss = lookup(group, bags, weights).square().sum()
        gradients.append(torch.autograd.grad(loss, weights, create_graph=create_graph)[0])
    torch.testing.assert_close(gradients[1].detach(), gradients[0])
