"""A CUDA graph replays an update, reads the changed learning rate, and counts its steps."""

import pytest
import torch

from tests.support.batches import Bags, insert, random_ids, rate, rows_by_id
from tests.support.gpu import needs_gpu
from tests.support.optimizer_cases import OPTIMIZERS
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform


@needs_gpu
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_replays_are_as_updates(optimizer):
    specs = [TableSpec(f"t{dim}", 200, dim, initializer=Uniform(-1, 1)) for dim in (8, 260)]
    bags = Bags.random(2, 40, random_ids(50)).to("cuda")
    groups = [TableGroup(specs, [0, 1], OPTIMIZERS[optimizer], device="cuda") for _ in range(2)]
    grad = torch.randn(40, 268, device="cuda")
    rates = [rate(0.1, group) for group in groups]

    def update(group, slots, learning_rate):
        torch.ops.torchrec_hkv.update_rows(
            group.counter_tensor,
            group.handle,
            grad,
            bags.ids,
            bags.offsets,
            None,
            slots,
            40,
            False,
            learning_rate,
        )

    slots = [insert(group, bags) for group in groups]
    for group, at, learning_rate in zip(groups, slots, rates, strict=True):
        update(group, at, learning_rate)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(groups[0], slots[0], rates[0])
    for value in (0.3, 0.2, 0.05):
        for learning_rate in rates:
            learning_rate.fill_(value)
        grad.normal_()
        graph.replay()
        update(groups[1], slots[1], rates[1])
    assert groups[0].optimizer_steps.tolist() == [4, 4]
    for table in range(2):
        actual, expected = (rows_by_id(group, table) for group in groups)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(row, expected[id_]) for id_, row in actual.items())
