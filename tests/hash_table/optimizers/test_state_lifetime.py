"""Optimizer states are created, saved and removed with their rows."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from tests.support.optimizer_cases import OPTIMIZERS
from torchrec_hkv.hash_table import SGD, Adagrad, TableGroup, TableSpec, Uniform, files

#: Two buckets, full and empty ones, narrow and wide.
SPECS = [
    TableSpec("t", 128, 8, initializer=Uniform(-1, 1)),
    TableSpec("u", 100, 5, "lfu", initializer=Uniform(-1, 1)),
]


def _group(optimizer, device):
    return TableGroup(SPECS, [0, 1], optimizer, device=device)


def _train(group, pool, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = pool[torch.randint(0, len(pool), (2 * 20,), generator=generator)]
        bags = Bags(ids, torch.arange(41), 20).to(group.device)
        out = lookup(group, bags)
        out.backward(torch.randn(out.shape, generator=generator).to(group.device))


def _equal(group, other, table):
    """Compares entries by id, because slots are random on a GPU."""
    actual, expected = (_entries(each.export_table(table)) for each in (group, other))
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


def _entries(state):
    """Entries of the occupied slots, ordered by id."""
    fields = {name: value.cpu() for name, value in vars(state).items()}
    step, occupied = fields.pop("optimizer_step"), fields.pop("occupied")
    by_slot = {name: value[occupied] for name, value in fields.items() if len(value)}
    order = by_slot["ids"].argsort()
    return {"optimizer_step": step} | {name: value[order] for name, value in by_slot.items()}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_an_id_that_was_evicted_starts_anew(device_type, optimizer):
    spec = TableSpec("t", 64, 6, initializer=Uniform(-1, 1))
    used, fresh = (
        TableGroup([spec], [0], OPTIMIZERS[optimizer], device=device_type) for _ in range(2)
    )
    one = Bags(torch.tensor([7]), torch.tensor([0, 1]), 1).to(device_type)
    for _ in range(3):
        lookup(used, one).backward(torch.randn(1, 6, device=device_type))
    others = Bags(torch.arange(100, 164), torch.arange(65), 64).to(device_type)
    lookup(used, others).backward(torch.randn(64, 6, device=device_type))
    assert 7 not in rows_by_id(used)
    fresh.optimizer_steps.copy_(used.optimizer_steps)  # the global step goes on
    grads = torch.randn(4, 1, 6, device=device_type)
    for grad in grads:
        for group in (used, fresh):
            lookup(group, one).backward(grad)
    assert torch.equal(rows_by_id(used)[7], rows_by_id(fresh)[7])


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_goes_on_after_a_table_is_loaded(device_type, optimizer):
    saved, loaded = (_group(OPTIMIZERS[optimizer], device_type) for _ in range(2))
    pool = random_ids(60)
    _train(saved, pool, 5, seed=0)
    _train(loaded, random_ids(60), 2, seed=1)
    for table in range(2):
        loaded.load_table(table, saved.export_table(table))
    for group in (saved, loaded):
        group.set_clock(50)
        _train(group, pool, 5, seed=2)
    for table in range(2):
        _equal(saved, loaded, table)
    assert saved.optimizer_steps.tolist() == [10, 10]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_goes_on_after_files_are_loaded(device_type, optimizer, tmp_path):
    saved, loaded = (_group(OPTIMIZERS[optimizer], device_type) for _ in range(2))
    pool = random_ids(60)
    _train(saved, pool, 5, seed=0)
    _train(loaded, random_ids(60), 2, seed=1)
    for table in range(2):
        files.save(saved, table, tmp_path / str(table))
        files.load(loaded, table, tmp_path / str(table))
    for group in (saved, loaded):
        _train(group, pool, 5, seed=2)
    for table in range(2):
        _equal(saved, loaded, table)


def test_states_of_another_optimizer_are_refused(device_type, tmp_path):
    """The states are equally wide, but mean something else."""
    files.save(_group(SGD(0.9), device_type), 0, tmp_path)
    other = _group(Adagrad(), device_type)
    with pytest.raises(ValueError, match=r"has optimizer states of layout 2, but table 't' is tra"):
        files.load(other, 0, tmp_path)


def test_clearing_a_table_forgets_its_updates(device_type):
    group = _group(SGD(), device_type)
    _train(group, random_ids(60), 3, seed=0)
    group.clear_table(1)
    assert group.optimizer_steps.tolist() == [3, 0]
