"""The updates themselves count steps, on the device."""

import torch

from tests.support.batches import Bags, insert, lookup, rate, rows_by_id
from torchrec_hkv.hash_table import SGD, Adam, TableGroup, TableSpec, Uniform


def _bags(ids, device):
    return Bags(torch.tensor(ids), torch.arange(len(ids) + 1), len(ids)).to(device)


def test_each_update_counts_once_for_every_table(device_type):
    specs = [TableSpec("a", 70, 4), TableSpec("b", 70, 3)]
    group = TableGroup(specs, [0, 1], SGD(), device=device_type)
    assert group.optimizer_steps.tolist() == [0, 0]
    bags = Bags(torch.tensor([1, 2]), torch.tensor([0, 2, 2]), 1).to(device_type)  # no id for b
    out = lookup(group, bags)
    insert(group, bags)  # trains nothing
    assert group.optimizer_steps.tolist() == [0, 0]
    out.sum().backward()
    assert group.optimizer_steps.tolist() == [1, 1]
    empty = Bags(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 1)
    lookup(group, empty.to(device_type)).sum().backward()
    assert group.optimizer_steps.tolist() == [2, 2]
    assert group.optimizer_steps.device.type == device_type


def test_a_global_step_corrects_new_rows_as_old_ones(device_type):
    """Adam's first step of a row has the length of the learning rate only if the bias correction
    uses the row's own step."""
    moved = {}
    for mode in ("global", "row"):
        spec = TableSpec("t", 70, 4, initializer=Uniform(-1, 1))
        optimizer = Adam(step_mode=mode)
        group = TableGroup([spec], [0], optimizer, device=device_type)
        for _ in range(9):
            lookup(group, _bags([1], device_type)).sum().backward()
        out = lookup(group, _bags([2], device_type), learning_rate=0.25)
        out.sum().backward()
        moved[mode] = (out.detach().cpu()[0] - rows_by_id(group)[2]).double()
    torch.testing.assert_close(moved["row"], torch.full((4,), 0.25).double())
    first, second = 0.1 / (1 - 0.9**10), 0.001 / (1 - 0.999**10)
    expected = torch.full((4,), 0.25 * first / second**0.5).double()
    torch.testing.assert_close(moved["global"], expected, rtol=1e-6, atol=1e-6)


def test_the_backward_takes_the_learning_rate_of_its_time(device_type):
    group = TableGroup([TableSpec("t", 70, 4)], [0], SGD(), device=device_type)
    bags = _bags([1], device_type)
    pin = group.pin()
    slots = group.find_or_insert(bags.ids, bags.offsets, 1, pin)
    anchor = torch.empty(0, device=device_type, requires_grad=True)
    learning_rate = rate(0.5, group)
    out = group.pooled_lookup(
        anchor, bags.ids, bags.offsets, None, slots, 1, False, pin, learning_rate
    )
    learning_rate.fill_(0.25)
    out.sum().backward()
    assert rows_by_id(group)[1].tolist() == [-0.25] * 4
