"""Integers beyond 64 bits are refused in one sentence, and NumPy's integers are taken."""

import numpy
import pytest
import torch

from torchrec_hkv import HashTable, HierarchicalHashEmbedding


@pytest.mark.parametrize("name", ["dim", "capacity", "initial_capacity", "state_dim", "seed"])
@pytest.mark.parametrize("value", [2**63, 10**30])
def test_sizes(name, value):
    arguments = {"dim": 4, "capacity": 100, name: value}
    with pytest.raises(ValueError, match=rf"{name} is {value}, but must be .*2\^63 - 1\.$"):
        HashTable(**arguments)


def test_calls():
    table = HashTable(4, 100)
    with pytest.raises(ValueError, match=r"rows is 9223372036854775808, but must be"):
        table.reserve(2**63)
    with pytest.raises(ValueError, match=r"batch_size is 9223372036854775808, but must be"):
        list(table.export(2**63))
    with pytest.raises(ValueError, match="max_hbm_gb is 1e\\+300"):
        HierarchicalHashEmbedding(4, 100, max_hbm_gb=1e300)


def test_numpy_integers():
    ids = torch.arange(5)
    rows, _ = HashTable(numpy.int64(4), numpy.int32(100), seed=numpy.int64(7)).find(ids)
    assert rows.equal(HashTable(4, 100, seed=7).find(ids)[0])
