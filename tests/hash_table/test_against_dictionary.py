"""Find and insert agree with a Python dictionary in a table that holds all ids."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import INT64_MAX, INT64_MIN, Bags, find, insert, random_ids, rows_by_id
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform, initial_rows

ids_lists = st.lists(
    st.one_of(st.integers(INT64_MIN, INT64_MAX), st.integers(-3, 3), st.just(INT64_MIN)),
    max_size=60,
)


def check_against_model(device: str, batches: list[list[int]], capacity: int) -> None:
    group = TableGroup(
        [TableSpec("t", capacity, 3, initializer=Uniform(-1, 1))], [0], device=device
    )
    model: dict[int, int] = {}  # id to slot
    lookups = 0
    for batch in batches:
        bags = Bags.flat(torch.tensor(batch, dtype=torch.long, device=device))
        assert find(group, bags).tolist() == [model.get(id_, -1) for id_ in batch]
        slots = insert(group, bags).tolist()
        for id_, slot in zip(batch, slots, strict=True):
            assert model.setdefault(id_, slot) == slot
        lookups += len(batch)
        assert len(set(model.values())) == len(model)
    (counters,) = group.counters()
    assert counters["size"] == counters["inserted"] == len(model)
    assert counters["lookups"] == lookups
    assert counters["evicted"] == counters["refused"] == 0
    rows = rows_by_id(group)
    assert rows.keys() == model.keys()
    if model:
        ids = torch.tensor(list(model))
        expected = initial_rows(ids, 3, table="t", initializer=Uniform(-1, 1))
        assert torch.equal(torch.stack([rows[id_] for id_ in model]), expected)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(ids_lists, max_size=5))
def test_random_batches(batches):
    check_against_model("cpu", batches, 1000)


def test_extreme_ids(device_type):
    extremes = [INT64_MIN, -1, 0, 2**62, INT64_MAX, -2, 1, INT64_MIN + 1, INT64_MAX - 1]
    check_against_model(device_type, [extremes, extremes[::-1], extremes * 50], 100)


def test_many_ids(device_type):
    pool = random_ids(20_000)
    batches = [pool[torch.randint(0, 20_000, (9_000,))].tolist() for _ in range(4)]
    check_against_model(device_type, batches, 24_000)


def test_one_id_many_times(device_type):
    check_against_model(device_type, [[7] * 200_000, [7] * 10 + [8] * 200_000], 64)


def test_tables_of_a_group_are_apart(device_type):
    specs = [TableSpec(name, 300, 2, initializer=Uniform(-1, 1)) for name in "abc"]
    group = TableGroup(specs, [2, 0, 1, 0], device=device_type)
    pool = random_ids(100)
    bags = Bags.random(4, 32, pool).to(device_type)
    insert(group, bags)
    met = [set(), set(), set()]
    for feature, table in enumerate([2, 0, 1, 0]):
        met[table] |= set(bags.feature(feature)[0].tolist())
    for table in range(3):
        assert rows_by_id(group, table).keys() == met[table]


def test_empty_batches(device_type):
    group = TableGroup([TableSpec("t", 10, 2)], [0], device=device_type)
    none = torch.empty(0, dtype=torch.long, device=device_type)
    assert insert(group, Bags.flat(none)).shape == (0,)
    offsets = torch.zeros(1, dtype=torch.long, device=device_type)
    assert find(group, Bags(none, offsets, 0)).shape == (0,)
    assert insert(group, Bags(none, offsets, 0)).shape == (0,)
    assert group.counters()[0]["size"] == 0
