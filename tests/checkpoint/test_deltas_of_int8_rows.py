"""Deltas and commands read and write tables of int8 rows."""

from __future__ import annotations

import pytest

from tests.support.checkpoint_models import make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint import DeltaWriter
from torchrec_hkv.cli import main


def _chain(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", hash_dtype="int8")
    writer = DeltaWriter(model, folder / "chain", model.fused_optimizer)
    for step in range(3):
        train(model, rank, device, range(2 * step, 2 * step + 2))
        writer.write()
    checkpoint.save(folder / "whole", model, model.fused_optimizer)
    return checkpoint.digest(model)


def _of_chain(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", hash_dtype="int8")
    checkpoint.load(folder, model, model.fused_optimizer)
    return checkpoint.digest(model)


@pytest.mark.slow
def test_deltas_are_the_full_save(run_ranks, tmp_path):
    trained = run_ranks(2, _chain, tmp_path)
    for folder in (tmp_path / "chain", tmp_path / "whole"):
        assert run_ranks(1, _of_chain, folder)[0] == trained[0]


def _saved(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", hash_dtype="int8")
    train(model, rank, device, range(2))
    checkpoint.save(folder, model, model.fused_optimizer)


def test_commands_read_them(run_ranks, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    run_ranks(1, _saved, folder)
    assert main(["verify", str(folder)]) in (0, None)
    assert main(["inspect", str(folder), "--json"]) in (0, None)
    shown = capsys.readouterr().out
    assert "int8" in shown
    assert main(["diff", str(folder), str(folder)]) in (0, None)
