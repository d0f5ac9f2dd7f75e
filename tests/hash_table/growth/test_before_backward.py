"""If a table grows between a forward and its backward, the backward still trains the same rows.

Compared with a table that has its full capacity from the start, which never moves a row.
"""

import pytest
import torch

from tests.support.batches import Bags, find, insert, random_ids, rate, rows_by_id
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform
from torchrec_hkv.hash_table.groups.table_group import Pin


def make(device: str, initial: int | None) -> TableGroup:
    spec = TableSpec("t", 4000, 4, initializer=Uniform(-1, 1), initial_capacity=initial)
    return TableGroup([spec], [0], RowWiseAdagrad(), device=device)


def pool(group: TableGroup, bags: Bags, slots, pin: Pin | None, weights=None) -> torch.Tensor:
    anchor = torch.empty(0, device=bags.ids.device, requires_grad=pin is not None)
    return group.pooled_lookup(
        anchor,
        bags.ids,
        bags.offsets,
        weights,
        slots,
        bags.batch_size,
        False,
        pin,
        rate(0.1, group),
    )


def found(group: TableGroup, bags: Bags) -> tuple[torch.Tensor, Pin]:
    pin = group.pin()
    return group.find_or_insert(bags.ids, bags.offsets, bags.batch_size, pin), pin


def assert_equal_rows(groups: list[TableGroup]) -> None:
    rows = [rows_by_id(group) for group in groups]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])


@pytest.mark.parametrize("grow", ["insert", "reserve"])
def test_after_the_forward(device_type, grow):
    groups = [make(device_type, 100), make(device_type, None)]
    ids = random_ids(2000)
    bags = Bags.random(1, 40, ids[:60]).to(device_type)
    more = Bags.flat(ids[60:]).to(device_type)
    grad = torch.randn(40, 4, device=device_type)
    for group in groups:
        slots, pin = found(group, bags)
        out = pool(group, bags, slots, pin)
        before = group.present_slots(0)
        if grow == "insert":
            insert(group, more)
        else:
            group.reserve(0, 4000)
        assert (group.present_slots(0) > before) == (group is groups[0])
        out.backward(grad)
    assert_equal_rows(groups)


def test_between_the_find_and_the_forward(device_type):
    """The table also grows between find and forward, as when the next batch is prefetched."""
    groups = [make(device_type, 64), make(device_type, None)]
    ids = random_ids(1500)
    batches = [Bags.random(1, 30, ids[: 50 * 3**k]).to(device_type) for k in range(4)]
    grads = [torch.randn(30, 4, device=device_type) for _ in batches]
    outs = []
    for group in groups:
        slots = [found(group, bags) for bags in batches]
        slots += [found(group, Bags.flat(ids).to(device_type))]
        made = [pool(group, bags, *its) for bags, its in zip(batches, slots, strict=False)]
        outs.append(torch.stack(made).detach())
        for out, grad in zip(made, grads, strict=True):
            out.backward(grad)
    assert groups[0].present_slots(0) > 64
    assert torch.equal(outs[0], outs[1])
    assert_equal_rows(groups)


def test_gradients_of_weights(device_type):
    """Gradients of weights read the forward's rows, in evaluation too."""
    for training in (True, False):
        gradients = []
        bags = Bags.random(1, 40, random_ids(50)).to(device_type)
        values = torch.rand(len(bags.ids), device=device_type)
        for initial in (64, None):
            group = make(device_type, initial)
            weights = values.clone().requires_grad_()
            slots, pin = found(group, bags)
            out = pool(group, bags, slots, pin if training else None, weights)
            group.reserve(0, 4000)
            out.sum().backward()
            gradients.append(weights.grad)
        assert torch.equal(*gradients)


def test_an_id_without_a_slot_stays_without(device_type):
    """A backward does not train an id that its lookup refused, even if the id has a slot by
    then."""
    group = make(device_type, 64)
    known, new = random_ids(20), random_ids(20)
    insert(group, Bags.flat(known).to(device_type))
    bags = Bags.flat(torch.cat([known, new])).to(device_type)
    pin = group.pin()
    slots = find(group, bags)  # new ids get no slot
    out = pool(group, bags, slots, pin)
    insert(group, Bags.flat(torch.cat([known, new, random_ids(300)])).to(device_type))
    assert group.present_slots(0) > 64
    before = rows_by_id(group)
    out.sum().backward()
    after = rows_by_id(group)
    for id_ in known.tolist():
        assert not torch.equal(before[id_], after[id_])
    for id_ in new.tolist():
        assert torch.equal(before[id_], after[id_])
