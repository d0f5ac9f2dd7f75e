"""accum_or_assign on int8 rows: rows of an id that occurs several times in a call."""

import pytest
import torch

from tests.support.int8_rows import rounded
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def add(table, ids, rows):
    table.accum_or_assign(ids, rows.to(ids.device), torch.ones_like(ids, dtype=torch.bool))


def skewed(n, ids, hot):
    """Positions of ids: one in `hot` of them, the others uniform."""
    numbers = torch.randint(ids, (n,))
    return numbers.where(torch.rand(n) >= hot, 3)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 7, 64, 260])
@pytest.mark.parametrize("hot", [0.0, 0.9])
def test_sums_are_rounded_once(dim, hot, threads, set_threads):
    set_threads(threads)
    table = make("cpu", 600, dim, dtype=torch.int8, initializer=Uniform(-1, 1))
    ids = distinct_ids(401, "cpu")
    before, _ = table.find_or_insert(ids)
    numbers = skewed(3000, 401, hot)
    rows = torch.randn(3000, dim)
    add(table, ids[numbers], rows)
    exact = before.double().index_add_(0, numbers, rows.double())
    after = table.find(ids)[0].double()
    steps = exact.abs().amax(1, keepdim=True) / 127
    assert ((after - exact).abs() <= 0.501 * steps).all()


def test_small_rows_add_up():
    """Each alone is below half a step of the row, and would be rounded away."""
    table = make("cpu", 100, 4, dtype=torch.int8)
    ids = distinct_ids(1, "cpu")
    table.insert_or_assign(ids, torch.tensor([[127.0, 0.0, 10.0, -5.0]]))
    add(table, ids.expand(100_000), torch.full((100_000, 4), 1e-4))
    assert torch.equal(table.find(ids)[0], rounded(torch.tensor([[137.0, 10.0, 20.0, 5.0]])))


def test_tables_of_other_dtypes_in_the_group():
    specs = [
        TableSpec("a", 200, 12, initializer=Uniform(-1, 1), dtype=torch.int8),
        TableSpec("b", 200, 20, initializer=Uniform(-1, 1)),
        TableSpec("c", 200, 7, initializer=Uniform(-1, 1), dtype=torch.int8),
    ]
    group = TableGroup(specs, [0, 1, 2], None, "cpu")
    ids, ends = distinct_ids(90, "cpu"), torch.arange(4)
    before, _ = group.find_or_insert_rows(ids.repeat(3), ends * 90, 1)
    numbers = torch.cat([skewed(800, 90, 0.5) for _ in specs])
    rows = torch.randn(2400, 20)
    which = torch.ones(2400, dtype=torch.bool)
    group.accum_or_assign(ids[numbers], ends * 800, 1, rows, which)
    after, _ = group.find_rows(ids.repeat(3), ends * 90, 1)
    places = torch.arange(3).repeat_interleave(800) * 90 + numbers
    exact = before.double().index_add_(0, places, rows.double())
    for table, spec in enumerate(specs):
        part = slice(90 * table, 90 * (table + 1)), slice(spec.dim)
        error = (after[part].double() - exact[part]).abs()
        most = exact[part].abs().amax(1, keepdim=True)
        assert (error <= most * (0.501 / 127 if spec.dtype == torch.int8 else 1e-5)).all()


def test_deterministic_tables_round_after_each(device_type):
    """On both devices, in the order of the call."""
    table = make(
        device_type, 100, 37, dtype=torch.int8, initializer=Uniform(-1, 1), deterministic=True
    )
    ids = distinct_ids(1, device_type)
    expected = table.find_or_insert(ids)[0].cpu()
    rows = torch.randn(20, 37)
    add(table, ids.expand(20), rows)
    for row in rows:
        expected = rounded(expected + row)
    torch.testing.assert_close(table.find(ids)[0].cpu(), expected, rtol=0, atol=0)
