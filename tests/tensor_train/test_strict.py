"""Strict tables refuse ids out of range on every device, with the same message."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support import tensor_train as tt
from tests.support.gpu import needs_gpu
from torchrec_hkv import TTEmbeddingBag, TTOptions
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape

SHAPES = [TTShape(90, 6, (5, 4, 5), (1, 2, 3), (5, 4)), TTShape(50, 4, (5, 10), (2, 2), (3,))]
NAMES = ["page", "user"]


def batch(device, bad=None, at=0):
    """Two features of three bags, of the second and of the first table; one bag is empty."""
    ids = torch.tensor([49, 0, 3, 7, 89, 88, 0, 1], device=device)
    if bad is not None:
        ids[at] = bad
    return ids, torch.tensor([0, 2, 2, 4, 5, 7, 8], device=device)


@pytest.mark.parametrize(
    ("bad", "at", "sentence"),
    [
        (50, 1, "table 'user' was asked for id 50, but has the ids 0 to 49."),
        (-1, 3, "table 'user' was asked for id -1, but has the ids 0 to 49."),
        (90, 4, "table 'page' was asked for id 90, but has the ids 0 to 89."),
        (-(2**63), 7, "table 'page' was asked for id -9223372036854775808, but has the ids 0 to"),
    ],
)
def test_the_first_id_outside_is_named(device_type, bad, at, sentence):
    group = TTGroup(SHAPES, [1, 0], SGD(), NAMES, strict=True)
    cores = [core for shape in SHAPES for core in tt.random_cores(shape, device_type)]
    before, states = [core.clone() for core in cores], group.make_states(device_type)
    step = torch.zeros(1, dtype=torch.int64, device=device_type)
    anchor = torch.zeros(0, device=device_type, requires_grad=True)
    rate = torch.tensor(0.1, device=device_type)
    ids, offsets = batch(device_type, bad, at)
    for call in (
        lambda: group.sort(ids, offsets, 3),
        lambda: group.lookup(cores, ids, offsets, 3),
        lambda: group.lookup_fused(anchor, cores, states, step, ids, offsets, 3, rate),
        lambda: group.refuse_outside(ids, offsets, 3),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            call()
    assert all(map(torch.equal, before, cores))
    assert group.outside(device_type) == 0


def test_ids_inside_pass(device_type):
    strict, plain = TTGroup(SHAPES, [1, 0], strict=True), TTGroup(SHAPES, [1, 0])
    cores = [core for shape in SHAPES for core in tt.random_cores(shape, device_type)]
    ids, offsets = batch(device_type)
    expected = plain.lookup(cores, ids, offsets, 3)
    torch.testing.assert_close(strict.lookup(cores, ids, offsets, 3), expected)
    strict.refuse_outside(ids[:0], offsets * 0, 3)


def test_modules_and_options(device_type):
    bag = TTEmbeddingBag(90, 6, tt_ranks=2, strict=True, device=device_type)
    ids = torch.tensor([3, 90], device=device_type)
    with pytest.raises(ValueError, match="was asked for id 90, but has the ids 0 to 89"):
        bag(ids, torch.tensor([0], device=device_type))
    assert TTOptions().strict is False
    with pytest.raises(ValueError, match="strict is 1, but must be True or False"):
        TTOptions(strict=1)


@needs_gpu
def test_capture_is_refused():
    group = TTGroup(SHAPES[:1], strict=True)
    cores = tt.random_cores(SHAPES[0], "cuda")
    ids, offsets = torch.tensor([3, 9], device="cuda"), torch.tensor([0, 2], device="cuda")
    group.lookup(cores, ids, offsets, 1)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="Strict Tensor-Train tables check ids on the host"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        group.lookup(cores, ids, offsets, 1)
