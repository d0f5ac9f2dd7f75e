"""``torch.save`` and ``deepcopy`` of modules."""

import copy

import pytest
import torch

from tests.support.embeddings import make_embedding
from tests.support.saved_embeddings import IDS, MAKERS, lookup, rows, through_file, train
from torchrec_hkv import HKVAdamOptimizer, HKVOptimizer


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_copies_are_equal_and_apart(make, how, device_type):
    module = torch.nn.Sequential(make(device=device_type))
    optimizer = HKVAdamOptimizer(module[0], lr=0.1)
    train([module[0]], optimizer, range(3))
    if how == "deepcopy":
        copied = copy.deepcopy(module)[0]
    else:
        copied = through_file(module, weights_only=False)[0]
    trained = rows(module[0])
    assert torch.equal(rows(copied), trained)
    train([copied], HKVOptimizer(copied, lr=0.1), range(3, 5))
    assert not torch.equal(rows(copied), trained)
    assert torch.equal(rows(module[0]), trained)
    train([module[0]], optimizer, range(3, 4))


def test_a_copy_keeps_mode_and_freezing(device_type):
    module = make_embedding(device=device_type, padding_idx=3).eval().requires_grad_(False)
    copied = copy.deepcopy(module)
    assert (copied.training, copied.anchor.requires_grad, copied.padding_idx) == (False, False, 3)


def test_a_copied_anchor_stands_for_the_copy(device_type):
    module = make_embedding(device=device_type)
    copied = copy.deepcopy(module)
    optimizer = HKVOptimizer(copied, lr=0.5)
    before = rows(copied)
    lookup(copied, torch.tensor(IDS, device=device_type)).sum().backward()
    copied.anchor.grad.mul_(2)
    optimizer.step()
    torch.testing.assert_close(rows(copied), before - 1)


def test_optimizers_are_not_copied(device_type):
    optimizer = HKVOptimizer(make_embedding(device=device_type))
    with pytest.raises(TypeError, match="create one over the copied embeddings"):
        copy.deepcopy(optimizer)
