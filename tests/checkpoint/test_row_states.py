"""Splitting columns copies states that have one value a row; joining columns averages them."""

from __future__ import annotations

import pytest
import torch

from tests.support.checkpoint_models import DIMS, make_tables, model_contents, train
from torchrec_hkv import checkpoint

NAME = "rowwise_adagrad"


def _save(rank, world_size, device, sharding_type, folder):
    model = make_tables(world_size, device, sharding_type, NAME)
    train(model, rank, device, range(8))
    checkpoint.save(folder, model)
    return model_contents(model, NAME), checkpoint.digest(model)


def _move(rank, world_size, device, sharding_type, source, target):
    model = make_tables(world_size, device, sharding_type, NAME)
    checkpoint.load(source, model)
    checkpoint.save(target, model)
    return model_contents(model, NAME), checkpoint.digest(model)


def _values(results):
    """By table, id and column: the row's state; and the set of all other values."""
    everything = [value for values, _ in results for value in values]
    states = {value[:3]: value[4] for value in everything if value[3] == "of the row"}
    return states, {value for value in everything if value[3] != "of the row"}


@pytest.mark.slow
def test_cut_and_joined_again(run_ranks, tmp_path):
    saved = run_ranks(2, _save, "row_wise", tmp_path / "rows")
    cut = run_ranks(3, _move, "column_wise", tmp_path / "rows", tmp_path / "columns")
    joined = run_ranks(1, _move, "row_wise", tmp_path / "columns", tmp_path / "again")
    assert _values(saved) == _values(cut) == _values(joined)
    assert len({str(digest) for _, digest in [*saved, *cut, *joined]}) == 1


def test_joined_as_a_mean_over_columns(run_ranks, tmp_path):
    saved = run_ranks(2, _save, "column_wise", tmp_path / "columns")
    joined = run_ranks(2, _move, "row_wise", tmp_path / "columns", tmp_path / "rows")
    (before, rest), (after, same) = _values(saved), _values(joined)
    assert rest == same

    def means(states):
        bits = {key: torch.tensor(value, dtype=torch.int32) for key, value in states.items()}
        totals: dict[tuple, float] = {}
        for (table, id_, _), value in bits.items():
            at = (table, id_)
            mean = float(value.view(torch.float32).double()) / DIMS[table]
            totals[at] = totals.get(at, 0.0) + mean
        return totals

    expected, found = means(before), means(after)
    assert len(expected) > 100
    assert set(after) == set(before)
    for key, value in expected.items():
        assert abs(found[key] - value) <= 1e-6 * abs(value)
    assert len({value for key, value in after.items() if key[:2] == next(iter(after))[:2]}) == 1
