"""Gradients that autograd has not added to ``.grad`` train no rows: those of
``torch.autograd.grad``, and of a backward that an error interrupted."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv import HierarchicalHashEmbedding, HKVOptimizer

IDS = torch.tensor([-1, 2**62, 5])


class _Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt


def _make(device):
    embedding = HierarchicalHashEmbedding(embedding_dim=4, max_capacity=100, seed=1, device=device)
    return embedding, HKVOptimizer([embedding], lr=1.0), IDS.to(device)


def _change(embedding, optimizer, ids):
    """The change of the rows in a step."""
    with torch.no_grad():
        before = embedding(ids).clone()
        optimizer.step()
        return embedding(ids) - before


def test_gradients_of_another_loss(device_type):
    embedding, optimizer, ids = _make(device_type)
    rows = embedding(ids)
    torch.autograd.grad((5 * rows).sum(), list(embedding.parameters()), retain_graph=True)
    rows.sum().backward()
    torch.testing.assert_close(_change(embedding, optimizer, ids), -torch.ones_like(rows))


def test_gradients_alone(device_type):
    embedding, optimizer, ids = _make(device_type)
    torch.autograd.grad(embedding(ids).sum(), list(embedding.parameters()))
    assert not _change(embedding, optimizer, ids).any()
    torch.autograd.grad(embedding(ids).sum(), list(embedding.parameters()))
    embedding.load_state_dict(embedding.state_dict())  # would be refused if gradients were held


def test_gradients_put_in_place_by_hand(device_type):
    embedding, optimizer, ids = _make(device_type)
    rows = embedding(ids)
    (embedding.anchor.grad,) = torch.autograd.grad(rows.sum(), list(embedding.parameters()))
    torch.testing.assert_close(_change(embedding, optimizer, ids), -torch.ones_like(rows))


@pytest.mark.parametrize("drops", [True, False])
def test_an_interrupted_backward(device_type, drops):
    embedding, optimizer, ids = _make(device_type)
    first = _Interrupted.apply(embedding(ids))
    with pytest.raises(KeyboardInterrupt):
        (first + 3 * embedding(ids)).sum().backward()  # the second lookup's backward runs first
    assert embedding.grad_buffer_bytes > 0
    if drops:
        optimizer.zero_grad()
    rows = embedding(ids)
    rows.sum().backward()
    torch.testing.assert_close(_change(embedding, optimizer, ids), -torch.ones_like(rows))
