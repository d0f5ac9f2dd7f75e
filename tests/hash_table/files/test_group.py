"""Tables of a group are saved one by one, with their optimizer states."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform, files

SPECS = [
    TableSpec("a", 300, 6, "lfu", initializer=Uniform(-1, 1)),
    TableSpec("b", 500, 3, "lru", initializer=Uniform(-1, 1), column_offset=4),
]


def trained(device):
    group = TableGroup(SPECS, [0, 1], RowWiseAdagrad(), device=device)
    for _ in range(6):
        bags = Bags.random(2, 60, random_ids(1000)).to(device)
        lookup(group, bags).sum().backward()
    return group


@pytest.mark.parametrize("table", [0, 1])
def test_round_trip(device_type, tmp_path, table):
    group, other = trained(device_type), trained(device_type)
    neighbour = vars(other.export_table(1 - table))
    files.save(group, table, tmp_path)
    assert files.load(other, table, tmp_path).lost == 0
    state = group.export_table(table)
    assert (state.states[state.occupied] > 0).all()
    for name, value in vars(other.export_table(table)).items():
        assert torch.equal(value, getattr(state, name)), name
    for name, value in vars(other.export_table(1 - table)).items():
        assert torch.equal(value, neighbour[name]), name


def test_the_other_table_is_refused(device_type, tmp_path):
    group = trained(device_type)
    files.save(group, 0, tmp_path)
    with pytest.raises(ValueError, match="its name is 'a', but that of table 'b' is 'b'"):
        files.load(group, 1, tmp_path)


def test_another_optimizer_is_refused(device_type, tmp_path):
    files.save(trained(device_type), 0, tmp_path)
    group = TableGroup(SPECS, [0, 1], SGD(), device=device_type)
    with pytest.raises(ValueError, match="its state_dim is 1, but that of table 'a' is 0"):
        files.load(group, 0, tmp_path)
