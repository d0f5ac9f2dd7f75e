"""Rows of int8 are saved as they are, and loaded at any number of ranks, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpointed import evaluate, held, joined, make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint import DeltaWriter
from torchrec_hkv.cli import main


def _saved(rank, world_size, device, folder, plain):
    model = make_tables(world_size, device, "row_wise", hash_dtype="int8")
    train(model, rank, device, range(6))
    if plain:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    else:
        checkpoint.save(folder, model, model.fused_optimizer)
    dtypes = {
        value.dtype
        for name, value in model.state_dict().items()
        if name.endswith(("lru.weight", "lfu.weight", "lru.scales", "lfu.scales"))
    }
    assert dtypes == {torch.float32}
    return held(model, "adam"), checkpoint.digest(model), evaluate(model, device)


def _loaded(rank, world_size, device, sharding_type, folder, plain):
    model = make_tables(world_size, device, sharding_type, hash_dtype="int8")
    if plain:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    else:
        assert checkpoint.load(folder, model, model.fused_optimizer) == 0
    result = held(model, "adam"), checkpoint.digest(model), evaluate(model, device)
    train(model, rank, device, range(2))
    return result


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("ranks", "sharding_type"), [(1, "row_wise"), (2, "table_wise")])
def test_at_other_ranks(run_ranks, tmp_path, plain, ranks, sharding_type):
    folder = tmp_path / "checkpoint"
    saved = run_ranks(2, _saved, folder, plain)
    loaded = run_ranks(ranks, _loaded, sharding_type, folder, plain)
    before, after = (joined([values for values, *_ in results]) for results in (saved, loaded))
    assert len(before) > 1000
    assert after == before
    hashed = [
        {name: value for name, value in digest.items() if name.endswith(("lru", "lfu"))}
        for _, digest, _ in [*saved, *loaded]
    ]
    assert hashed[0]
    assert all(digest == hashed[0] for digest in hashed)
    outputs = [output for *_, output in [*saved, *loaded]]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-6, atol=1e-6)


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


def test_commands_read_them(run_ranks, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    run_ranks(1, _saved, folder, False)
    assert main(["verify", str(folder)]) in (0, None)
    assert main(["inspect", str(folder), "--json"]) in (0, None)
    shown = capsys.readouterr().out
    assert "int8" in shown
    assert main(["diff", str(folder), str(folder)]) in (0, None)
