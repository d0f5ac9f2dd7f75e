"""The backend ``hkv`` with an initial capacity."""

import pytest
import torch

from tests.support.shards import look_up, table_shard
from torchrec_hkv import HKVOptions, backends
from torchrec_hkv.backends import OptimizerSpec, TableShard

ADAGRAD = OptimizerSpec("rowwise_adagrad", 1e-6)
INITIAL = HKVOptions(initial_capacity=200)


def shard(options: HKVOptions, capacity: int = 1000) -> TableShard:
    """A shard of a table of 2000 rows."""
    return table_shard(capacity, 8, options, name="user", num_embeddings=2000)


@pytest.mark.parametrize("initial", [0, -3, 1.5, True, "1"])
def test_impossible_options(initial):
    with pytest.raises(ValueError, match=f"initial_capacity is {initial!r}, but must be None or a"):
        HKVOptions(initial_capacity=initial)


def test_more_than_the_capacity():
    one = shard(HKVOptions(initial_capacity=2001))
    match = r"table 'user': initial_capacity is 2001, but must not exceed num_embeddings, 2000"
    with pytest.raises(ValueError, match=match):
        backends.get("hkv").check(one, ADAGRAD, "cpu")


def test_is_described():
    assert backends.get("hkv").describe(INITIAL) == "initial_capacity=200"


@pytest.mark.parametrize("capacity", [1000, 2000])
def test_a_rank_begins_with_its_part(device_type, capacity):
    one = shard(INITIAL, capacity=capacity)
    lookup = backends.get("hkv").create_lookup([one], [0], ADAGRAD, torch.device(device_type))
    part = 200 * capacity // 2000
    assert part <= lookup._group.present_slots(0) < 2 * part


def test_reserve(device_type):
    one = shard(INITIAL)
    lookup = backends.get("hkv").create_lookup([one], [0], ADAGRAD, torch.device(device_type))
    capacity = lookup.counters("user")["capacity"]
    with pytest.raises(ValueError, match=f"'user': {capacity + 1} rows .* {capacity}"):
        lookup.reserve("user", capacity + 1)
    lookup.reserve("user", capacity)
    assert lookup._group.present_slots(0) == capacity


def test_storage_is_that_of_the_full_capacity(device_type):
    backend, one = backends.get("hkv"), shard(INITIAL)
    lookup = backend.create_lookup([one], [0], ADAGRAD, torch.device(device_type))
    announced = backend.storage(one, ADAGRAD, device_type)
    rows = 1000 * (8 + 1) * 4
    assert rows <= announced.hbm + announced.host < 2 * rows
    first = lookup.memory("user")
    look_up(lookup, list(range(950)))
    full = lookup.memory("user")
    assert lookup._group.present_slots(0) == lookup.counters("user")["capacity"] >= 1000
    if device_type == "cpu":  # a GPU allocates pages of 2 MiB
        assert first.host < announced.host / 4
        assert full == announced


def test_state_has_the_announced_shapes_however_far_it_has_grown(device_type):
    backend, one = backends.get("hkv"), shard(INITIAL)
    spec = backend.state_spec(one, ADAGRAD)
    lookup = backend.create_lookup([one], [0], ADAGRAD, torch.device(device_type))
    for n in (10, 400, 900):
        out = look_up(lookup, list(range(n)))
        out.backward(torch.randn_like(out))
        state = lookup.export_table("user")
        assert {k: (tuple(v.shape), v.dtype) for k, v in state.items()} == {
            k: (v.shape, v.dtype) for k, v in spec.items()
        }
        fresh = backend.create_lookup([one], [0], ADAGRAD, torch.device(device_type))
        fresh.load_table("user", state)
        lookup.eval()
        fresh.eval()
        ids = list(range(-10, n))
        assert torch.equal(look_up(fresh, ids), look_up(lookup, ids))
        lookup.train()
    # Slots differ from those of a table that has its full capacity from the start.
    other = backend.state_spec(shard(HKVOptions()), ADAGRAD)
    assert other["ids"].shape[0] >= 1000
