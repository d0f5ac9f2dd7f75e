"""copy.deepcopy gives an independent table that behaves like the original; pickling is refused."""

import copy
import pickle

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import constant_scores, contents, distinct_ids, make, random_rows
from torchrec_hkv.hash_table import (
    SGD,
    Adam,
    HashTable,
    MinFrequency,
    TableGroup,
    TableSpec,
    Uniform,
)


def insert(table: HashTable, ids: torch.Tensor) -> None:
    scores = constant_scores(table, len(ids))
    if scores is not None:
        scores = ids % 1000 - 500
    table.insert_or_assign(ids, ids[:, None].expand(-1, table.dim).to(table.dtype), scores)


def everything(table: HashTable) -> tuple:
    ids = torch.tensor(sorted(contents(table)), device=table.device, dtype=torch.int64)
    slots = table.find_slots(ids).tolist()
    return contents(table), slots, table.counters(), table.num_slots, table.epoch


@pytest.mark.parametrize("policy", [*POLICIES, "adaptive"])
@pytest.mark.parametrize("initial_capacity", [None, 64])
def test_the_copy_goes_on_alike(device_type, policy, initial_capacity):
    """The copy evicts, expires, admits and counts returns like the original."""
    table = make(
        device_type,
        1000,
        dim=3,
        eviction=policy,
        initial_capacity=initial_capacity,
        state_dim=2,
        admission=MinFrequency(2, entries=4000),
        expire_after=40,
        remember_evicted=4096,
        deterministic=True,
        dtype=torch.float16,
    )
    ids = distinct_ids(3000, device_type)
    table.epoch = 3
    for part in ids[:1500].repeat_interleave(2).split(400):
        insert(table, part)
    copied = copy.deepcopy(table)
    assert type(copied) is HashTable
    assert everything(copied) == everything(table)
    for part in torch.cat([ids, ids[:900]]).repeat_interleave(2).split(700):
        for each in (table, copied):
            insert(each, part)
        assert everything(copied) == everything(table)
    # Under other policies, new ids rank lower and are refused.
    if policy in ("lru", "epoch_lru", "customized"):
        assert table.counters()["evicted"] > 0
        assert table.counters()["returned"] > 0


def test_the_copy_is_its_own(device_type):
    table = make(device_type, 100, dim=3)
    ids = distinct_ids(50, device_type)
    table.insert_or_assign(ids, random_rows(table, 50))
    before = contents(table)
    copied = copy.deepcopy({"a": table, "b": [table]})
    assert copied["a"] is copied["b"][0]
    copied["a"].clear()
    assert contents(table) == before
    table.clear()
    copied["a"].insert_or_assign(ids[:1], random_rows(table, 1))
    assert table.size == 0


def test_a_group(device_type):
    """Tables of several policies and geometries, with an optimizer."""
    specs = [
        TableSpec(
            "a", 300, 4, eviction="lfu", initializer=Uniform(-1, 1), deterministic=True
        ),  # both take the same steps, so their contents are equal
        TableSpec("b", 5000, 8, initial_capacity=64, initializer=Uniform(-1, 1)),
    ]
    group = TableGroup(specs, [0, 1], Adam(), device=device_type)
    rate = torch.tensor(0.1, device=device_type)

    def step(of: TableGroup, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 900, (400,), generator=generator).to(device_type)
        offsets = torch.tensor([0, 200, 400], device=device_type)
        pin = of.pin()
        slots = of.find_or_insert(ids, offsets, 1, pin)
        anchor = torch.empty(0, device=device_type, requires_grad=True)
        out = of.pooled_lookup(anchor, ids, offsets, None, slots, 1, False, pin, rate)
        out.square().sum().backward()

    for seed in range(4):
        step(group, seed)
    copied = copy.deepcopy(group)
    for seed in range(4, 8):
        for of in (group, copied):
            step(of, seed)
    for table in range(2):
        actual, expected = group.export_table(table), copied.export_table(table)
        for name in ("occupied", "ids", "rows", "states", "last_steps", "scores"):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        assert torch.equal(actual.optimizer_step, expected.optimizer_step)
    assert copied.counters() == group.counters()
    assert copied.clock == group.clock


def test_held_gradients_are_refused(device_type):
    group = TableGroup([TableSpec("a", 300, 4)], [0], SGD(), device=device_type)
    with (
        group.accumulate(),
        pytest.raises(RuntimeError, match="gradients are stored for them"),
    ):
        copy.deepcopy(group)


def test_pickling_and_shallow_copies_are_refused(device_type):
    table = make(device_type, 64)
    with pytest.raises(TypeError, match=r"HashTable can't be pickled: .* save\(\) .*from_file\("):
        pickle.dumps(table)
    with pytest.raises(TypeError, match=r"TableGroup can't be pickled: .*files\.save.*files\.load"):
        pickle.dumps(table.group)
    for each in (table, table.group):
        with pytest.raises(TypeError, match=r"has no shallow copy, .*: use copy\.deepcopy\."):
            copy.copy(each)
