"""A lookup whose output is in a reference cycle does not prevent loading a checkpoint."""

from __future__ import annotations

import gc

import pytest

from tests.support.checkpoint_models import features, make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.sharding.modules.open_lookups import collect_open_lookups
from torchrec_hkv.sharding.state.names import named_collections


class _Holder:
    """An object in a reference cycle, which only the garbage collector frees."""

    def __init__(self, held):
        self.held, self.itself = held, self


def _lookups(model):
    return {
        lookup
        for _, collection in named_collections(model)
        for lookup in collection.group_lookups().values()
    }


def _collections_of(function):
    """The number of full garbage collections during a call."""
    phases = []

    def note(phase, info):
        phases.append((phase, info["generation"]))

    gc.callbacks.append(note)
    try:
        function()
    finally:
        gc.callbacks.remove(note)
    return phases.count(("start", 2))


def _run(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(3))
    checkpoint.save(folder, model)
    saved = checkpoint.digest(model)
    lookups = _lookups(model)
    assert not any(lookup.has_open_lookup() for lookup in lookups)
    gc.disable()
    try:
        assert _collections_of(lambda: collect_open_lookups(lookups)) == 0
        output = model(features(device, 7))
        assert any(lookup.has_open_lookup() for lookup in lookups)
        with pytest.raises(ValueError, match="lookups has not run"):
            checkpoint.load(folder, model)
        _Holder(output)
        del output
        checkpoint.load(folder, model)
    finally:
        gc.enable()
    assert not any(lookup.has_open_lookup() for lookup in lookups)
    assert checkpoint.digest(model) == saved


def test_a_load_frees_them(run_ranks, tmp_path):
    run_ranks(1, _run, tmp_path / "saved")
