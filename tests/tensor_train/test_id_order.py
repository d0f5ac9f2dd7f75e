"""Orders of ids: permutations, by values, and that they help where neighbours are alike."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.tensor_train import IdOrder, smoothed_means, tt_svd


def test_there_and_back(device_type):
    rows = torch.randperm(50, device=device_type)
    order = IdOrder(rows)
    ids = torch.randint(0, 50, (4, 7), device=device_type)
    assert torch.equal(order.rows_of(ids), rows[ids])
    assert torch.equal(order.ids_of(order.rows_of(ids)), ids)
    assert len(order) == 50


def test_by_value_is_pythons_sort():
    values = torch.randint(0, 9, (200,))
    order = IdOrder.by_value(values)
    expected = sorted(range(200), key=lambda i: (-int(values[i]), i))
    assert order.ids.tolist() == expected
    assert order.rows_of(torch.tensor(expected)).tolist() == list(range(200))


def test_reordered_rows_are_found_at_their_ids():
    table = torch.randn(30, 4)
    order = IdOrder.by_value(table[:, 0])
    assert torch.equal(order.reordered(table)[order.rows], table)
    assert bool((order.reordered(table)[:, 0].diff() <= 0).all())


def test_an_order_by_what_rows_depend_on_needs_fewer_ranks():
    # Rows depend on one hidden value, which ids do not follow.
    hidden = torch.rand(1000)
    table = torch.stack([torch.sin(k * hidden) for k in range(1, 9)], dim=1)
    shuffled = tt_svd(table, ranks=4).relative_error
    ordered = tt_svd(IdOrder.by_value(hidden).reordered(table), ranks=4).relative_error
    assert ordered < 0.1 * shuffled


def test_smoothed_means_are_those_of_a_loop():
    ids, labels = torch.randint(0, 20, (100,)), torch.rand(100)
    means, counts = smoothed_means(ids, labels, 25, prior=3.0)
    everything = sum(labels.tolist()) / 100
    for i in range(25):
        own = [value for value, id_ in zip(labels.tolist(), ids.tolist(), strict=True) if id_ == i]
        assert counts[i] == len(own)
        expected = (sum(own) + 3 * everything) / (len(own) + 3)
        assert means[i].item() == pytest.approx(expected, rel=1e-12)
    assert counts[20:].sum() == 0


def test_refused():
    with pytest.raises(ValueError, match="must be a permutation of 0 to 2"):
        IdOrder(torch.tensor([0, 2, 2]))
    with pytest.raises(TypeError, match=r"rows must be a tensor of dtype torch\.int64"):
        IdOrder(torch.tensor([0.0]))
    with pytest.raises(ValueError, match="values hold NaN"):
        IdOrder.by_value(torch.tensor([0.0, float("nan")]))
    with pytest.raises(ValueError, match=r"no id 3: it has 0 to 2"):
        IdOrder(torch.arange(3)).rows_of(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"no row -1: it has 0 to 2"):
        IdOrder(torch.arange(3)).ids_of(torch.tensor([-1]))
    with pytest.raises(ValueError, match="ids are from 0 to 3, but must be from 0 to 2"):
        smoothed_means(torch.tensor([0, 3]), torch.ones(2), 3)
    with pytest.raises(ValueError, match="prior is -1"):
        smoothed_means(torch.tensor([0]), torch.ones(1), 3, prior=-1)
    with pytest.raises(ValueError, match="the same length"):
        smoothed_means(torch.tensor([0]), torch.ones(2), 3)
