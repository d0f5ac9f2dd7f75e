"""PyTorch's operations on gradients apply to stored gradients."""

import warnings

import pytest
import torch

from tests.support.embeddings import make_embedding
from torchrec_hkv import HKVOptimizer


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.embedding = make_embedding(device=device)
        self.dense = torch.nn.Linear(4, 1).to(device)

    def forward(self, ids):
        return self.embedding(ids)


DROPS = {
    "the optimizer's": lambda model, optimizer: optimizer.zero_grad(),
    "the optimizer's, not to None": lambda model, optimizer: optimizer.zero_grad(False),
    "the embedding's": lambda model, optimizer: model.embedding.zero_grad(),
    "its parent's": lambda model, optimizer: model.zero_grad(),
    "its parent's, not to None": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "another optimizer's": lambda model, optimizer: torch.optim.SGD(
        model.parameters(), lr=0.1
    ).zero_grad(),
}


@pytest.fixture
def model(device_type):
    return Model(device_type)


@pytest.fixture
def ids(device_type):
    return torch.arange(5, device=device_type)


@pytest.mark.parametrize("drop", DROPS)
def test_zero_grad_drops_what_is_held(drop, model, ids):
    optimizer = HKVOptimizer(model.embedding, lr=0.5)
    before = model(ids).detach()
    model(ids).sum().backward()
    DROPS[drop](model, optimizer)
    optimizer.step()
    assert torch.equal(model(ids).detach(), before)
    model(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model(ids).detach(), before - 0.5)


@pytest.mark.parametrize("drop", DROPS)
def test_zero_grad_between_forward_and_backward_keeps_the_new_gradient(drop, model, ids):
    optimizer = HKVOptimizer(model.embedding, lr=0.5)
    before = model(ids).detach()
    model(ids).sum().backward()
    loss = model(ids).sum() + model(ids).sum()
    DROPS[drop](model, optimizer)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(model(ids).detach(), before - 1)


def test_clipping_by_norm_scales_rows_and_leaves_the_norm_to_the_others(model, ids):
    optimizer = HKVOptimizer(model.embedding, lr=0.5)
    before = model(ids).detach()
    (model(ids).sum() + model.dense.weight.sum() * 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(4.0)  # of (2, 2, 2, 2)
    optimizer.step()
    torch.testing.assert_close(model(ids).detach(), before - 0.5 / 4, rtol=0, atol=1e-6)


def test_a_gradient_that_was_scaled_may_be_added_to(model, ids):
    optimizer = HKVOptimizer(model.embedding, lr=0.5)
    before = model(ids).detach()
    model(ids).sum().backward()
    model.embedding.anchor.grad.mul_(0.25)
    model(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model(ids).detach(), before - 0.5 * 1.25)


def test_other_optimizers_leave_rows_alone(model, ids):
    HKVOptimizer(model.embedding, lr=0.5)
    before = model(ids).detach()
    dense = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        model(ids).sum().backward()
        dense.step()
    assert torch.equal(model(ids).detach(), before)


def test_rows_that_nobody_trains_are_warned_of(model, ids):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="give this embedding to an HKV optimizer"):
        model(ids).sum().backward()


def test_rows_that_are_trained_are_not_warned_of(model, ids):
    optimizer = HKVOptimizer(model.embedding, lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(ids).sum().backward()
            optimizer.zero_grad()
