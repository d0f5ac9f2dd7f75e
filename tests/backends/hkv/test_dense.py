"""``HKVOptions(dense=True)``: all rows exist, are exposed by row number, and stay."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.shards import table_shard
from torchrec_hkv import HKVOptions, backends
from torchrec_hkv.backends import OptimizerSpec
from torchrec_hkv.hash_table import Uniform, initial_rows

ROWS, DIM, FIRST_ROW, FIRST_COLUMN = 300, 6, 1000, 4
SHARD = table_shard(
    ROWS,
    DIM,
    HKVOptions(dense=True, seed=9),
    name="user",
    num_embeddings=5000,
    embedding_dim=16,
    row_offset=FIRST_ROW,
    column_offset=FIRST_COLUMN,
    init_range=(-0.5, 0.5),
)
KEY = f"user/{FIRST_COLUMN}"


def _lookup(device_type, optimizer="sgd", shard=SHARD):
    spec = OptimizerSpec(optimizer)
    return backends.get("hkv").create_lookup([shard], [0], spec, torch.device(device_type))


def _rows(lookup, ids):
    device = ids.device
    offsets = torch.arange(ids.numel() + 1, device=device)
    return lookup(ids, offsets, None, ids.numel(), torch.full((), 0.1, device=device))


def test_rows_begin_as_their_numbers_say(device_type):
    weight = _lookup(device_type).export_table(KEY)["weight"].cpu()
    expected = initial_rows(
        torch.arange(FIRST_ROW, FIRST_ROW + ROWS),
        DIM,
        table="user",
        seed=9,
        initializer=Uniform(-0.5, 0.5),
        column_offset=FIRST_COLUMN,
    )
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_training_shows_in_the_tensors_and_writing_them_shows_in_lookups(device_type, optimizer):
    lookup = _lookup(device_type, optimizer)
    weight = lookup.export_table(KEY)["weight"]
    states = lookup.dense_states(KEY)
    assert (
        set(states)
        == {
            "sgd": set(),
            "adagrad": {"momentum1"},
            "rowwise_adagrad": {"momentum1"},
            "adam": {"optimizer_states_0", "optimizer_states_1", "optimizer_step"},
        }[optimizer]
    )
    ids = torch.randperm(ROWS, device=device_type)[:100]
    before = weight.clone()
    _rows(lookup, ids).square().sum().backward()
    assert torch.equal(weight, before)  # a copy, until it is asked for again
    assert lookup.export_table(KEY)["weight"] is weight
    changed = (weight != before).any(dim=1)
    assert torch.equal(changed.nonzero().flatten(), ids.sort().values)
    again = lookup.dense_states(KEY)
    for name, state in again.items():
        assert state is states[name]
        touched = state != 0 if state.dim() == 1 else (state != 0).any(dim=1)
        if name != "optimizer_step":
            assert torch.equal(touched.nonzero().flatten(), ids.sort().values)
    written = torch.randn(ROWS, DIM, device=device_type)
    weight.copy_(written)
    for state in again.values():
        state.fill_(3)
    lookup.eval()
    assert torch.equal(_rows(lookup, torch.arange(ROWS, device=device_type)), written)
    for state in lookup.dense_states(KEY).values():
        assert (state == 3).all()


def test_no_row_ever_leaves(device_type):
    lookup = _lookup(device_type)
    for _ in range(20):
        ids = torch.randint(0, ROWS, (500,), device=device_type)
        _rows(lookup, ids).sum().backward()
    counts = lookup.counters(KEY)
    assert counts["size"] == counts["inserted"] == ROWS
    assert counts["evicted"] == counts["refused"] == 0


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 4096, 50_000])
def test_all_rows_find_a_place(rows):
    shard = dataclasses.replace(SHARD, capacity=rows)
    weight = _lookup("cpu", shard=shard).export_table(KEY)["weight"]
    assert weight.shape == (rows, DIM)


def test_announced_storage_counts_the_tensors(device_type):
    backend, spec = backends.get("hkv"), OptimizerSpec("adagrad")
    lookup = _lookup(device_type, "adagrad")
    tensors = [lookup.export_table(KEY)["weight"], *lookup.dense_states(KEY).values()]
    shown = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    announced, table = backend.storage(SHARD, spec, device_type), lookup.memory(KEY)
    assert announced.hbm + announced.host == table.hbm + table.host + shown
    assert announced.host == table.host + (shown if device_type == "cpu" else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_16_bits(device_type, dtype):
    """The tensor is of that dtype, and shows what lookups give and take."""
    shard = dataclasses.replace(SHARD, dtype=dtype)
    lookup = _lookup(device_type, "rowwise_adagrad", shard)
    weight = lookup.export_table(KEY)["weight"]
    spec = backends.get("hkv").state_spec(shard, OptimizerSpec("rowwise_adagrad"))["weight"]
    assert (weight.dtype, tuple(weight.shape)) == (spec.dtype, spec.shape) == (dtype, (ROWS, DIM))
    assert lookup.dense_states(KEY)["momentum1"].dtype == torch.float32
    ids = torch.arange(ROWS, device=device_type)
    out = _rows(lookup, ids)
    assert torch.equal(out.detach(), weight.float())
    before = weight.clone()
    out.square().sum().backward()
    now = lookup.export_table(KEY)["weight"]
    assert now.dtype == dtype
    assert (now != before).any(dim=1).all()
    written = torch.randn(ROWS, DIM).to(dtype).to(device_type)
    now.copy_(written)
    assert torch.equal(_rows(lookup, ids).detach(), written.float())
    announced = backends.get("hkv").storage(shard, OptimizerSpec("rowwise_adagrad"), device_type)
    wide = backends.get("hkv").storage(SHARD, OptimizerSpec("rowwise_adagrad"), device_type)
    slots = lookup.capacity(KEY)
    saved = wide.hbm + wide.host - announced.hbm - announced.host
    assert saved == 2 * DIM * (slots + ROWS)
