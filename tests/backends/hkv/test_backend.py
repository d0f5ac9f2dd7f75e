"""The backend ``hkv``: options, refusals and announcements."""

import dataclasses

import pytest
import torch

from tests.support.shards import look_up, table_shard
from torchrec_hkv import HKVOptions, backends
from torchrec_hkv.backends import BackendOptions, OptimizerSpec, TableShard
from torchrec_hkv.hash_table import (
    Constant,
    MinFrequency,
    Normal,
    Probability,
    TruncatedNormal,
    Uniform,
    initial_rows,
)

ADAGRAD = OptimizerSpec("rowwise_adagrad", 1e-6)


def shard(**changes) -> TableShard:
    values = {"name": "user", "num_embeddings": 2000, "embedding_dim": 8, "options": HKVOptions()}
    return table_shard(**{"capacity": 1000, "dim": 8, **values, **changes})


def test_options_are_hashable_and_described():
    options = HKVOptions(admission=Probability(0.5), expire_after=7, strict=True)
    described = backends.get("hkv").describe(options)
    assert described == "admission=Probability(p=0.5), expire_after=7, strict=True"
    assert hash(options) == hash(dataclasses.replace(options))
    options = HKVOptions(eviction="lfu", hbm_bytes=1 << 20, initializer=Normal(0, 1))
    assert hash(options) == hash(dataclasses.replace(options))
    described = backends.get("hkv").describe(options)
    assert described == "eviction=lfu, hbm_bytes=1048576, initializer=Normal(mean=0.0, std=1.0)"
    assert backends.get("hkv").describe(HKVOptions()) == ""


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"capacity": 0, "num_embeddings": 0}, r"table 'user': num_embeddings is 0, but must be"),
        ({"dim": 0}, r"table 'user': embedding_dim is 0, but backend 'hkv' takes 1 to 2048"),
        ({"dim": 4096}, r"table 'user': embedding_dim is 4096"),
        ({"dtype": torch.int32}, r"data type is torch.int32, but backend 'hkv' takes torch.fl"),
        (
            {"options": HKVOptions(hbm_bytes=1000)},
            r"table 'user': hbm_bytes is 1000, but 1000 rows on a rank need at least \d+: their",
        ),
        ({"init_range": (1.0, 0.0)}, r"weight_init_min is 1.0 and weight_init_max is 0.0, but"),
        ({"init_range": (0.0, float("inf"))}, r"weight_init_min is 0.0 and weight_init_max is inf"),
        ({"options": BackendOptions()}, r"options of type BackendOptions were given to backend 'h"),
    ],
)
def test_impossible_tables(changes, match):
    backend = backends.get("hkv")
    with pytest.raises(ValueError, match=match):
        backend.check(shard(**changes), ADAGRAD, "cpu")
    with pytest.raises(ValueError, match=match):
        backend.create_lookup([shard(**changes)], [0], ADAGRAD, torch.device("cpu"))


def test_hbm_bytes_below_one_bucket():
    one_bucket = shard(capacity=64, dim=512, options=HKVOptions(hbm_bytes=64 * 512 * 4))
    with pytest.raises(ValueError, match=r"one bucket with its rows"):
        backends.get("hkv").check(one_bucket, ADAGRAD, "cuda")


@pytest.mark.parametrize(
    "options",
    [
        HKVOptions(),
        HKVOptions(eviction="lfu", hbm_bytes=30_000),
        HKVOptions(admission=MinFrequency(2, entries=999)),
        HKVOptions(hbm_bytes=50_000, admission=MinFrequency(2, sketch_bytes=20_000)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_announced_storage_is_what_a_table_takes(device_type, options, dtype):
    backend, one = backends.get("hkv"), shard(options=options, dtype=dtype)
    lookup = backend.create_lookup([one], [0], ADAGRAD, torch.device(device_type))
    announced = backend.storage(one, ADAGRAD, device_type)
    assert lookup.memory("user") == announced
    assert announced.hbm + announced.host >= 1000 * (8 * dtype.itemsize + 4)
    if device_type == "cuda" and options.hbm_bytes and dtype == torch.float32:
        assert announced.hbm <= options.hbm_bytes < announced.hbm + announced.host


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_state_has_the_announced_shapes(device_type, dtype):
    backend = backends.get("hkv")
    for eviction in ("lru", "lfu"):
        for optimizer in (None, OptimizerSpec("sgd"), ADAGRAD):
            one = shard(options=HKVOptions(eviction=eviction), dtype=dtype)
            lookup = backend.create_lookup([one], [0], optimizer, torch.device(device_type))
            state = lookup.export_table("user")
            spec = backend.state_spec(one, optimizer)
            assert {k: (tuple(v.shape), v.dtype) for k, v in state.items()} == {
                k: (v.shape, v.dtype) for k, v in spec.items()
            }
            lookup.load_table("user", state)
            with pytest.raises(ValueError, match=r"table 'user': the state to load lacks weight"):
                lookup.load_table("user", {k: v for k, v in state.items() if k != "weight"})


def test_training_inserts_and_updates_evaluation_does_neither(device_type):
    lookup = backends.get("hkv").create_lookup(
        [shard()], [0], OptimizerSpec("sgd"), torch.device(device_type)
    )
    out = look_up(lookup, [-1, 2**62])
    before = out.detach().clone()
    out.backward(torch.ones_like(out))
    assert lookup.counters("user")["size"] == 2
    lookup.eval()
    again = look_up(lookup, [-1, 2**62, 77])
    assert not again.requires_grad
    assert torch.equal(again[:2], before - 0.5)
    assert (again[2] != 0).all()
    assert lookup.counters("user")["size"] == 2
    assert lookup.counters("user")["lookups"] == 2


def test_initial_rows(device_type):
    for options, low, high in (
        (HKVOptions(), -0.1, 0.1),
        (HKVOptions(initializer=Uniform(2, 3)), 2.0, 3.0),
    ):
        lookup = backends.get("hkv").create_lookup(
            [shard(options=options)], [0], None, torch.device(device_type)
        )
        out = look_up(lookup, list(range(500)))
        assert low <= out.min() < out.max() < high
        assert out.max() - out.min() > 0.99 * (high - low)


@pytest.mark.parametrize(
    "initializer", [Normal(1, 0.5), TruncatedNormal(0, 1, -1, 2), Constant(0.5), Uniform(2, 3)]
)
def test_an_initializer_and_a_column_offset(device_type, initializer):
    options = HKVOptions(seed=4, initializer=initializer)
    lookup = backends.get("hkv").create_lookup(
        [shard(options=options, column_offset=3)], [0], None, torch.device(device_type)
    )
    ids = torch.arange(100, device=device_type)
    expected = initial_rows(ids, 8, table="user", seed=4, initializer=initializer, column_offset=3)
    assert torch.equal(look_up(lookup, ids.tolist()), expected)
    lookup.eval()
    unseen = torch.arange(100, 200, device=device_type)
    expected = initial_rows(
        unseen, 8, table="user", seed=4, initializer=initializer, column_offset=3
    )
    assert torch.equal(look_up(lookup, unseen.tolist()), expected)
