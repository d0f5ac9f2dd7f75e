"""A base and deltas are the full save of the same step, for every prefix and at any world size."""

from __future__ import annotations

import os

import pytest

from tests.support.checkpoint_models import (
    assert_same,
    evaluate,
    features,
    joined,
    make_tables,
    model_contents,
    train,
)
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency

WRITES = 4


def _options(name):
    return {
        "expiry": {"expire_after": 2},
        "eviction": {"rows": 150},
        "admission": {"admission": MinFrequency(2, entries=256)},
        "bf16": {"hash_dtype": "bf16"},
    }[name]


def _state(model, optimizer):
    return checkpoint.digest(model), model_contents(model, optimizer)


def _write(rank, world_size, device, folder, sharding_type, optimizer, options):
    model = make_tables(world_size, device, sharding_type, optimizer, **options)
    writer = checkpoint.DeltaWriter(model, folder, model.fused_optimizer)
    states = []
    for write in range(WRITES):
        train(model, rank, device, range(3 * write, 3 * write + 3))
        path = writer.write()
        checkpoint.save(folder.parent / f"full-{write}", model, model.fused_optimizer)
        states.append((path.name, *_state(model, optimizer)))
    return states


def _load(rank, world_size, device, path, sharding_type, optimizer, options):
    model = make_tables(world_size, device, sharding_type, optimizer, **options)
    train(model, rank, device, range(50, 52))
    checkpoint.load(path, model, model.fused_optimizer)
    state = _state(model, optimizer)
    # What goes on is the same, too.
    return *state, evaluate(model, device), train(model, rank, device, range(60, 62))


def _check(written, loaded, write):
    digest = written[0][write][1]
    assert all(result[0] == digest for result in loaded)
    assert joined([rank[write][2] for rank in written]) == joined([result[1] for result in loaded])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise", "column_wise"])
def test_every_prefix(run_ranks, tmp_path, sharding_type, optimizer, device_type):
    folder = tmp_path / "chain"
    written = run_ranks(2, _write, folder, sharding_type, optimizer, {})
    names = [write[0] for write in written[0]]
    assert names == ["base-000000", "delta-000001", "delta-000002", "delta-000003"]
    for write, name in enumerate(names):
        for path in [folder / name] + [folder] * (write == WRITES - 1):
            loaded = run_ranks(2, _load, path, sharding_type, optimizer, {})
            _check(written, loaded, write)
            full = tmp_path / f"full-{write}"
            whole = run_ranks(2, _load, full, sharding_type, optimizer, {})
            assert_same(whole, loaded, device_type)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["expiry", "admission", "bf16"])
def test_another_world_size(run_ranks, tmp_path, world_size, name):
    folder, options = tmp_path / "chain", _options(name)
    written = run_ranks(2, _write, folder, "row_wise", "adagrad", options)
    for write, (path, *_) in enumerate(written[0]):
        loaded = run_ranks(world_size, _load, folder / path, "row_wise", "adagrad", options)
        _check(written, loaded, write)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eviction", "admission"])
def test_the_same_world_size(run_ranks, tmp_path, name):
    folder, options = tmp_path / "chain", _options(name)
    written = run_ranks(2, _write, folder, "row_wise", "adagrad", options)
    for write, (path, *_) in enumerate(written[0]):
        loaded = run_ranks(2, _load, folder / path, "row_wise", "adagrad", options)
        _check(written, loaded, write)


def _outputs(model, device, seed, train):
    """The model's outputs for a batch, as lists; with ``train``, the batch is trained on."""
    output = model(features(device, seed, names=("lfu",)))
    if train:
        output.square().sum().backward()
    return output.detach().tolist()


def _write_dense(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", "adagrad", dense=True)
    writer = checkpoint.DeltaWriter(model, folder, model.fused_optimizer)
    states = []
    for write in range(3):
        _outputs(model, device, 10 * write + rank, train=True)
        writer.write()
        model.eval()
        states.append((checkpoint.digest(model), _outputs(model, device, 77, train=False)))
        model.train()
    return states


def _load_dense(rank, world_size, device, path):
    model = make_tables(world_size, device, "row_wise", "adagrad", dense=True)
    checkpoint.load(path, model, model.fused_optimizer)
    model.eval()
    return checkpoint.digest(model), _outputs(model, device, 77, train=False)


@pytest.mark.slow
def test_dense_tables(run_ranks, tmp_path):
    """They are whole in every delta."""
    folder = tmp_path / "chain"
    written = run_ranks(2, _write_dense, folder)
    for write, name in enumerate(["base-000000", "delta-000001", "delta-000002"]):
        loaded = run_ranks(2, _load_dense, folder / name)
        assert loaded == [states[write] for states in written]


def test_deltas_are_small(run_ranks, tmp_path):
    """A delta of a few ids has few bytes of hash tables."""
    run_ranks(1, _write_few, tmp_path / "chain")
    sizes = {
        name: sum(
            os.stat(os.path.join(path, file)).st_size
            for path, _, files in os.walk(tmp_path / "chain" / name / "tables")
            for file in files
            if file.startswith(("shard", "left"))
        )
        for name in ("base-000000", "delta-000001")
    }
    assert sizes["delta-000001"] < sizes["base-000000"] / 3


def _write_few(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", rows=4000)
    writer = checkpoint.DeltaWriter(model, folder)
    train(model, rank, device, range(40))
    writer.write()
    train(model, rank, device, range(100, 101))
    writer.write()
