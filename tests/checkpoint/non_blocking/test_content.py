"""A non-blocking save holds the model's content at the step of the call."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.checkpoint_models import evaluate, joined, make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.backends.save_types import FileOptions
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.model_save import save_to, saving
from torchrec_hkv.sharding.state.names import named_tables
from torchrec_hkv.write_behind import SaveHandle


def _state(model, device):
    return model_contents(model, "adam"), checkpoint.digest(model), evaluate(model, device).tolist()


def _train_meanwhile(rank, world_size, device, folder, sharding_type):
    model = make_tables(world_size, device, sharding_type, rows=150)
    train(model, rank, device, range(6))
    before = _state(model, device)
    # Does what save does, but writes nothing before the training below has ended.
    place, go_on = AtomicFolder(folder / "c"), threading.Event()
    handle = SaveHandle(place.path)
    handle.defer(go_on.wait)
    try:
        with saving(place, handle) as save:
            options = FileOptions(4096, 2)
            save_to(place, model, model.fused_optimizer, named_tables(model), options, save)
        assert not handle.done()
        assert handle.progress == 0
        train(model, rank, device, range(100, 106))
        after = _state(model, device)
        assert not place.path.exists()
    finally:
        go_on.set()
    assert handle.wait(60) == place.path
    assert handle.done()
    assert handle.progress == 1
    assert after == _state(model, device)
    return before, after


def _load(rank, world_size, device, folder, sharding_type):
    model = make_tables(world_size, device, sharding_type, rows=150)
    assert checkpoint.load(folder / "c", model, model.fused_optimizer) == 0
    return _state(model, device)


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on(run_ranks, tmp_path, ranks, sharding_type):
    results = run_ranks(ranks, _train_meanwhile, tmp_path, sharding_type)
    loaded = run_ranks(ranks, _load, tmp_path, sharding_type)
    before = [result[0] for result in results]
    assert joined([state[0] for state in loaded]) == joined([state[0] for state in before])
    assert [state[1:] for state in loaded] == [state[1:] for state in before]
    assert all(old[1] != new[1] for old, new in results)


def _save_often(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", rows=150)
    states = []
    for step in range(5):
        train(model, rank, device, range(2 * step, 2 * step + 2))
        states.append(_state(model, device))
        # The next save waits for this one.
        handle = checkpoint.save(
            folder / "c",
            model,
            model.fused_optimizer,
            blocking=False,
            staging_bytes=1 if step % 2 else 1 << 30,
        )
    checkpoint.load(folder / "c", model, model.fused_optimizer)  # waits for the save, too
    assert handle.done()
    assert handle.wait() == Path(folder / "c")
    assert _state(model, device) == states[-1]


def test_saves_wait_for_each_other(run_ranks, tmp_path):
    run_ranks(2, _save_often, tmp_path)


def _write_deltas(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", rows=150)
    writer = checkpoint.DeltaWriter(
        model, folder / "chain", model.fused_optimizer, every_steps=2, blocking=False
    )
    states, paths = [], []
    for step in range(8):
        train(model, rank, device, range(step, step + 1))
        handle = writer.step()
        assert (handle is None) == (step % 2 == 0)
        if handle is not None:
            paths.append(handle.path.name)
            states.append(_state(model, device))
    # The last save blocks.
    train(model, rank, device, range(50, 51))
    paths.append(writer.write(blocking=True).name)
    states.append(_state(model, device))
    return paths, states


def _load_chain(rank, world_size, device, folder, names):
    model = make_tables(world_size, device, "row_wise", rows=150)
    states = []
    for name in names:
        checkpoint.load(folder / "chain" / name, model, model.fused_optimizer)
        states.append(_state(model, device))
    return states


@pytest.mark.slow
def test_deltas(run_ranks, tmp_path):
    results = run_ranks(2, _write_deltas, tmp_path)
    names = results[0][0]
    assert names == ["base-000000", *(f"delta-{i:06d}" for i in range(1, 5))]
    loaded = run_ranks(2, _load_chain, tmp_path, names)
    assert loaded == [states for _, states in results]
