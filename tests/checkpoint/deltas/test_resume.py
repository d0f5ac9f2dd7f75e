"""A restarted writer continues with a delta if possible, and otherwise with a base."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from tests.support.checkpoint_models import joined, make_tables, model_contents, train
from torchrec_hkv import checkpoint


def _steps(model, rank, device, writer, steps):
    """Trains and writes. Returns the names of the folders, and what the model held at each."""
    written = []
    for step in steps:
        train(model, rank, device, range(2 * step, 2 * step + 2))
        written.append(
            (writer.write().name, checkpoint.digest(model), model_contents(model, "adam"))
        )
    return written


def _begin(rank, world_size, device, folder, options):
    model = make_tables(world_size, device, "row_wise", expire_after=3)
    writer = checkpoint.DeltaWriter(model, folder, model.fused_optimizer, **options)
    return _steps(model, rank, device, writer, range(3))


def _go_on(rank, world_size, device, folder, options, steps):
    model = make_tables(world_size, device, "row_wise", expire_after=3)
    writer = checkpoint.DeltaWriter(model, folder, model.fused_optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for states that are reset
        assert writer.resume() == 0
    state = checkpoint.digest(model), model_contents(model, "adam")
    return state, _steps(model, rank, device, writer, steps)


def _load(rank, world_size, device, path):
    model = make_tables(world_size, device, "row_wise", expire_after=3)
    checkpoint.load(path, model, model.fused_optimizer)
    return checkpoint.digest(model), model_contents(model, "adam")


def _check(run_ranks, folder, written, world_sizes=(1, 2)):
    for write in range(len(written[0])):
        name, digest, _ = written[0][write]
        for world_size in world_sizes:
            loaded = run_ranks(world_size, _load, folder / name)
            assert all(found == digest for found, _ in loaded)
            assert joined([values for _, values in loaded]) == joined(
                [rank[write][2] for rank in written]
            )


@pytest.mark.slow
def test_the_same_ranks_go_on_with_a_delta(run_ranks, tmp_path):
    folder = tmp_path / "chain"
    first = run_ranks(2, _begin, folder, {})
    results = run_ranks(2, _go_on, folder, {}, range(3, 5))
    assert [state for state, _ in results] == [written[-1][1:] for written in first]
    written = [result[1] for result in results]
    assert [name for name, *_ in written[0]] == ["delta-000003", "delta-000004"]
    _check(run_ranks, folder, written)


@pytest.mark.slow
def test_other_ranks_go_on_with_a_base(run_ranks, tmp_path):
    folder = tmp_path / "chain"
    first = run_ranks(2, _begin, folder, {})
    results = run_ranks(3, _go_on, folder, {}, range(3, 5))
    assert all(state[0] == first[0][-1][1] for state, _ in results)
    written = [result[1] for result in results]
    assert [name for name, *_ in written[0]] == ["base-000003", "delta-000004"]
    _check(run_ranks, folder, written, (1,))


@pytest.mark.parametrize("options", [{"states": False}, {"row_dtype": torch.int8}])
def test_other_options_go_on_with_a_base(run_ranks, tmp_path, options):
    folder = tmp_path / "chain"
    run_ranks(1, _begin, folder, options)
    (_, same), *_ = run_ranks(1, _go_on, folder, options, range(3, 4))
    (_, other), *_ = run_ranks(1, _go_on, folder, {}, range(4, 5))
    assert [name for name, *_ in (*same, *other)] == ["delta-000003", "base-000004"]


def test_bases_are_counted_on(run_ranks, tmp_path):
    folder, options = tmp_path / "chain", {"base_every": 4, "keep_bases": 1}
    run_ranks(1, _begin, folder, options)
    (_, written), *_ = run_ranks(1, _go_on, folder, options, range(3, 6))
    assert [name for name, *_ in written] == ["delta-000003", "base-000004", "delta-000005"]
    assert sorted(os.listdir(folder)) == ["base-000004", "delta-000005", "deltas.json"]


def test_a_writer_that_was_killed_before_it_named_the_newest(run_ranks, tmp_path):
    folder = tmp_path / "chain"
    run_ranks(1, _begin, folder, {})
    newest = (folder / "deltas.json").read_bytes()
    first = run_ranks(1, _go_on, folder, {}, range(3, 4))
    (folder / "deltas.json").write_bytes(newest)  # the error names delta-000002
    (folder / ".delta-000004.saving").mkdir()
    ((state, written),) = run_ranks(1, _go_on, folder, {}, range(4, 5))
    assert state == first[0][1][-1][1:]
    assert [name for name, *_ in written] == ["delta-000004"]
    _check(run_ranks, folder, [written], (1,))


def _nothing(rank, world_size, device, folder):
    writer = checkpoint.DeltaWriter(make_tables(world_size, device, "row_wise"), folder)
    with pytest.raises(ValueError, match="no checkpoint at"):
        writer.resume()
    return writer.write().name


def test_no_chain(run_ranks, tmp_path):
    assert run_ranks(1, _nothing, tmp_path / "chain") == ["base-000000"]
