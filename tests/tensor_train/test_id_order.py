"""Orders of ids: permutations, orders by value, and their benefit where neighbours are alike."""

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
    # Rows depend on one hidden value that is independent of the ids' order.
    hidden = torch.rand(1000)
    table = torch.stack([torch.sin(k * hidden) for k in range(1, 9)], dim=1)
    shuffled = tt_svd(table, ranks=4).relative_error
    ordered = tt_svd(IdOrder.by_value(hidden).reordered(table), ranks=4).relative_error
    assert ordered < 0.1 * shuffled


@pytest.mark.parametrize("num_ids", [1, 2, 255, 256, 257, 1000, 70_000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_ids_that_come_first_are_a_sort_of_two_keys(device_type, num_ids, share):
    listed = torch.randperm(num_ids, device=device_type)[: round(share * num_ids)]
    order = IdOrder.first(listed, num_ids)
    chosen = set(listed.tolist())
    expected = sorted(range(num_ids), key=lambda id_: (id_ not in chosen, id_))
    assert order.ids.tolist() == expected
    assert order.rows[order.ids].tolist() == list(range(num_ids))
    ids = torch.randint(num_ids, (3, 5), device=device_type)
    assert order.rows_of(ids).tolist() == [
        [expected.index(id_) for id_ in row] for row in ids.tolist()
    ]
    assert torch.equal(order.ids_of(order.rows_of(ids)), ids)
    assert order.num_listed == len(chosen)


def test_a_dense_block_and_the_ends_of_blocks():
    listed = [*range(256, 512), 0, 255, 512, 767, 1023]
    order = IdOrder.first(torch.tensor(listed), 1024)
    rest = [id_ for id_ in range(1024) if id_ not in listed]
    assert order.ids.tolist() == [*sorted(listed), *rest]
    assert order.rows_of(order.ids).tolist() == list(range(1024))


@pytest.mark.parametrize("num_ids", [100, 5000, 1_000_000])
@pytest.mark.parametrize("max_bytes", [0, 300, 20_000, 50_000, 200_000])
def test_an_order_of_few_bytes_lists_as_many_ids_as_fit(num_ids, max_bytes):
    values = torch.randint(0, 1000, (num_ids,))
    order = IdOrder.by_value(values, max_bytes)
    listed = order.ids[: order.num_listed]
    assert bool((listed.diff() > 0).all())
    rest = torch.ones(num_ids, dtype=torch.bool)
    rest[listed] = False
    if 0 < order.num_listed < num_ids:
        assert int(values[listed].min()) >= int(values[rest].max())
    if order.num_listed:
        assert order.num_bytes <= max_bytes
    if order.num_listed < num_ids:
        more = IdOrder.first(torch.arange(order.num_listed + 1), num_ids)
        assert more.num_bytes > max_bytes


def test_bytes_are_those_of_the_tensors_and_small():
    assert IdOrder(torch.randperm(1000)).num_bytes == 2 * 1000
    assert IdOrder(torch.randperm(40_000)).num_bytes == 4 * 40_000
    # Five percent of the bytes of a table of 64 columns, compressed 100 times, list over two
    # percent of its ids.
    rows, budget = 1_000_000, 1_000_000 * 64 * 4 // 100
    order = IdOrder.by_value(torch.rand(rows), max_bytes=budget // 20)
    assert order.num_bytes <= budget // 20
    assert order.num_listed > 0.1 * rows


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
    with pytest.raises(ValueError, match="values contain NaN"):
        IdOrder.by_value(torch.tensor([0.0, float("nan")]))
    with pytest.raises(ValueError, match=r"no id 3: it has 0 to 2"):
        IdOrder(torch.arange(3)).rows_of(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"no row -1: it has 0 to 2"):
        IdOrder(torch.arange(3)).ids_of(torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"no id 5: it has 0 to 4"):
        IdOrder.first(torch.tensor([2]), 5).rows_of(torch.tensor([5]))
    with pytest.raises(ValueError, match="ids must be distinct, but 1 occur again"):
        IdOrder.first(torch.tensor([2, 1, 2]), 5)
    with pytest.raises(ValueError, match="ids are from 2 to 5, but must be from 0 to 4"):
        IdOrder.first(torch.tensor([5, 2]), 5)
    with pytest.raises(TypeError, match=r"ids must be a tensor of dtype torch\.int64"):
        IdOrder.first([1, 2], 5)
    with pytest.raises(TypeError, match=r"num_ids is 5\.0, but must be an integer"):
        IdOrder.first(torch.tensor([2]), 5.0)
    with pytest.raises(ValueError, match="max_bytes is -1, but must not be negative"):
        IdOrder.by_value(torch.rand(5), max_bytes=-1)
    with pytest.raises(ValueError, match="ids are from 0 to 3, but must be from 0 to 2"):
        smoothed_means(torch.tensor([0, 3]), torch.ones(2), 3)
    with pytest.raises(ValueError, match="prior is -1"):
        smoothed_means(torch.tensor([0]), torch.ones(1), 3, prior=-1)
    with pytest.raises(ValueError, match="the same length"):
        smoothed_means(torch.tensor([0]), torch.ones(2), 3)
