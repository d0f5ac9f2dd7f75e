"""A full table loads at any number of ranks; a shard that is too small drops its lowest scores."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.support.checkpoint_models import make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table.routing import owner_rank

ROWS = 200


def _model(world_size, device, rows=ROWS):
    return make_tables(world_size, device, "row_wise", "adagrad", rows=rows)


def _save(rank, world_size, device, folder, rows=ROWS):
    model = _model(world_size, device, rows)
    train(model, rank, device, range(40))
    checkpoint.save(folder, model)
    return model_contents(model, "adagrad")


def _load(rank, world_size, device, folder, rows=ROWS):
    model = _model(world_size, device, rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lost = checkpoint.load(folder, model)
    messages = [str(w.message) for w in caught if "found no place" in str(w.message)]
    return lost, messages, model_contents(model, "adagrad")


def _refused(rank, world_size, device, folder):
    model = _model(world_size, device)
    with pytest.raises(ValueError, match=r"holds \d+ entries for a shard of \d+ slots"):
        checkpoint.load(folder, model, allow_loss=False)
    assert model_contents(model, "adagrad") == []


def _entries(results):
    """By table: the rank (score and step) of each id, and all values of each entry."""
    ranks, values = {}, {}
    for value in (value for of_rank in results for value in of_rank):
        if value[1] == "all":
            continue
        values.setdefault(value[:2], set()).add(value[2:])
        if value[2] == "entry":
            ranks[value[:2]] = (value[4] or 0, value[3])
    return ranks, values


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks(run_ranks, tmp_path, ranks):
    saved, values = _entries(run_ranks(2, _save, tmp_path / "c"))
    assert len(saved) >= 2 * ROWS  # full
    results = run_ranks(ranks, _load, tmp_path / "c")
    kept, loaded = _entries([values for *_, values in results])
    (lost,) = {lost for lost, *_ in results}
    assert lost == len(saved) - len(kept)
    assert lost < 0.15 * len(saved)  # in tables of 200 rows
    assert all(loaded[key] == values[key] for key in loaded)
    (message,) = [message for _, messages, _ in results for message in messages]
    for table in ("lru", "lfu"):
        of_table = [key for key in saved if key[0] == table]
        removed = [key for key in of_table if key not in kept]
        shown = f"{len(removed)} of {len(of_table)} ("
        assert (shown in message) == bool(removed)
        assert (f"table 'ebc.embedding_bags.{table}'" in message) == bool(removed)
    assert lost > 0


def test_the_lowest_scores_leave(run_ranks, tmp_path):
    # A shard is one bucket, so exactly the highest scores stay.
    rows = 180
    saved, _ = _entries(run_ranks(2, _save, tmp_path / "c", rows))
    results = run_ranks(3, _load, tmp_path / "c", rows)
    kept, _ = _entries([values for *_, values in results])
    removed = saved.keys() - kept.keys()
    assert removed
    for table, id_ in removed:
        owner = int(owner_rank(torch.tensor([id_]), 3))
        beside = [
            rank
            for (other, kept_id), rank in kept.items()
            if other == table and int(owner_rank(torch.tensor([kept_id]), 3)) == owner
        ]
        assert len(beside) == rows // 3
        assert saved[table, id_] <= min(beside)


def test_refused_where_loss_is_not_allowed(run_ranks, tmp_path):
    run_ranks(2, _save, tmp_path / "c")
    run_ranks(3, _refused, tmp_path / "c")


@pytest.mark.slow
def test_no_warning_where_nothing_leaves(run_ranks, tmp_path):
    run_ranks(2, _save, tmp_path / "c")
    for ranks, rows in ((2, ROWS), (3, 2 * ROWS)):
        for lost, messages, _ in run_ranks(ranks, _load, tmp_path / "c", rows):
            assert (lost, messages) == (0, [])
