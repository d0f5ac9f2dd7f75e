"""Held gradients train the rows of their ids, even if the table grows before they are applied.

Compared with a table that has its full capacity from the start.
"""

import pytest
import torch

from tests.support.batches import Bags, insert, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform


def make(device: str, initial: int | None) -> TableGroup:
    spec = TableSpec("t", 6000, 4, initializer=Uniform(-1, 1), initial_capacity=initial)
    return TableGroup([spec], [0], RowWiseAdagrad(), device=device)


def assert_equal_rows(groups: list[TableGroup]) -> None:
    rows = [rows_by_id(group) for group in groups]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])


@pytest.mark.parametrize("when", ["between backwards", "between forward and backward"])
def test_rounds(device_type, when):
    groups = [make(device_type, 64), make(device_type, None)]
    ids = random_ids(4000)
    rounds = [Bags.random(1, 30, ids[:60]).to(device_type) for _ in range(3)]
    others = [Bags.flat(part).to(device_type) for part in (ids[60:300], ids[300:1000], ids[1000:])]
    grads = [torch.randn(30, 4, device=device_type) for _ in rounds]
    grown = []
    for group in groups:
        before = group.present_slots(0)
        for i, (bags, grad, more) in enumerate(zip(rounds, grads, others, strict=True)):
            holds = i + 1 < len(rounds)
            if holds:
                with group.accumulate():
                    out = lookup(group, bags)
            else:
                out = lookup(group, bags)
            if when == "between backwards":
                out.backward(grad)
                insert(group, more)
            else:
                insert(group, more)
                out.backward(grad)
        grown.append(group.present_slots(0) > before)
    assert grown == [True, False]
    assert_equal_rows(groups)


def test_gradients_of_weights(device_type):
    results = []
    bags = Bags.random(1, 30, random_ids(50)).to(device_type)
    values = torch.rand(len(bags.ids), device=device_type)
    for initial in (64, None):
        group = make(device_type, initial)
        weights = values.clone().requires_grad_()
        with group.accumulate():
            out = lookup(group, bags, weights)
        group.reserve(0, 6000)
        out.sum().backward()
        results.append(weights.grad)
    assert (results[0] != 0).all()
    assert torch.equal(*results)
