"""A table grows on the stream that inserts, and calls on other streams stay in order."""

import pytest
import torch

from tests.support.batches import Bags, find, lookup, random_ids, rows_by_id
from tests.support.gpu import NEEDS_GPU
from tests.support.tables import distinct_ids, make, random_rows
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU


@pytest.fixture
def streams():
    torch.cuda.synchronize()
    yield torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()


def test_insert_on_one_find_on_another(streams):
    table = make("cuda", 400_000, 32, initial_capacity=1000)
    parts = distinct_ids(300_000, "cuda").split(5000)
    rows = [random_rows(table, len(ids)) for ids in parts]
    torch.cuda.synchronize()
    before = table.num_slots
    results = []
    for ids, given in zip(parts, rows, strict=True):
        with torch.cuda.stream(streams[0]):
            table.insert_or_assign(ids, given)
        with torch.cuda.stream(streams[1]):
            results.append(table.find(ids))
    torch.cuda.synchronize()
    assert table.num_slots >= 64 * before
    for given, (read, found) in zip(rows, results, strict=True):
        assert found.all()
        assert torch.equal(read, given)


def test_backwards_beside_growing_insertions(streams):
    """Backwards run on one stream while the next batches grow the table on another."""
    groups = []
    ids = random_ids(20_000)
    batches = [Bags.random(1, 200, ids[: 300 * 2**k]).to("cuda") for k in range(6)]
    grads = [torch.randn(200, 4, device="cuda") for _ in batches]
    torch.cuda.synchronize()
    for initial in (64, None):
        spec = TableSpec("t", 40_000, 4, initializer=Uniform(-1, 1), initial_capacity=initial)
        group = TableGroup([spec], [0], RowWiseAdagrad(), device="cuda")
        for i, (bags, grad) in enumerate(zip(batches, grads, strict=True)):
            with torch.cuda.stream(streams[i % 2]):
                out = lookup(group, bags)
            with torch.cuda.stream(streams[1 - i % 2]):
                more = Bags.flat(ids[1000 * i : 1000 * (i + 1)].to("cuda"))
                group.find_or_insert(more.ids, more.offsets, more.batch_size)
            with torch.cuda.stream(streams[i % 2]):
                out.backward(grad)
        torch.cuda.synchronize()
        assert int(find(group, batches[-1]).min()) >= 0
        groups.append(group)
    assert groups[0].present_slots(0) > 64
    rows = [rows_by_id(group) for group in groups]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], rows[1][id_]) for id_ in rows[0])
