"""Loading a checkpoint of other tables is refused, and changes nothing. The error names what the
checkpoint has and what the model needs."""

from __future__ import annotations

import pytest

from tests.support.checkpoint_models import OPTIMIZERS, evaluate, make_tables, train
from torchrec_hkv import checkpoint

DIMS = {"lru": 12, "lfu": 8}


def _save(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", "adagrad")
    train(model, rank, device, range(3))
    checkpoint.save(folder / "all", model, model.fused_optimizer)
    checkpoint.save(folder / "model", model)


OTHERS = {
    "dim": ({"dims": {"lru": 16, "lfu": 8}}, "has dim 12, but in the model 16"),
    "optimizer": (
        {"optimizer": "adam"},
        "has optimizer 'adagrad', but in the model 'adam'",
    ),
    "seed": ({"seed": 4}, "has seed 3, but in the model 4"),
    "backend": (
        {"kinds": {"tt": "hkv"}},
        "is of backend 'tt', but in the model of 'hkv': convert it",
    ),
    "stock": ({"kinds": {"stock": "hkv"}}, "has no table 'ebc.embedding_bags.stock'"),
    "dtype": (
        {"tt_dtype": "bf16"},
        "table 'ebc.embedding_bags.tt' has dtype 'float32', but in the model 'bfloat16'",
    ),
    "ranks": ({"tt_rank": 6}, "'model.ebc.embedding_bags.tt.tt_core_"),
    "dense": ({"dense": True}, "has its rows by id, but in the model by row number"),
}


def _refused(rank, world_size, device, folder):
    messages = {}
    for name, (changes, _) in OTHERS.items():
        optimizer = changes.get("optimizer", "adagrad")
        rest = {key: value for key, value in changes.items() if key != "optimizer"}
        model = make_tables(world_size, device, "row_wise", optimizer, **rest)
        before = None
        if name != "dense":
            train(model, rank, device, range(2))
            before = evaluate(model, device), checkpoint.digest(model)
        with pytest.raises(ValueError, match=r"checkpoint") as refusal:
            checkpoint.load(folder / "model", model)
        messages[name] = str(refusal.value)
        if before is not None:
            assert evaluate(model, device).equal(before[0])
            assert checkpoint.digest(model) == before[1]
    model = make_tables(world_size, device, "row_wise", "adagrad")
    with pytest.raises(ValueError, match=r"checkpoint") as refusal:
        checkpoint.load(folder / "model", model, model.fused_optimizer)
    return messages, str(refusal.value)


@pytest.mark.slow
def test_both_are_named(run_ranks, tmp_path):
    assert set(OPTIMIZERS) >= {"adagrad", "adam"}
    run_ranks(2, _save, tmp_path)
    for messages, optimizer in run_ranks(2, _refused, tmp_path):
        for name, (_, expected) in OTHERS.items():
            assert expected in messages[name], messages[name]
        assert "was saved without an optimizer" in optimizer


def _full(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", "adagrad", rows=256)
    train(model, rank, device, range(60))
    checkpoint.save(folder, model)
    return checkpoint.digest(model)


def _smaller(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", "adagrad", rows=150)
    train(model, rank, device, range(2))
    before = checkpoint.digest(model)
    with pytest.raises(ValueError, match=r"holds .* entries for a shard of .* slots") as refusal:
        checkpoint.load(folder, model)
    assert checkpoint.digest(model) == before
    lost = checkpoint.load(folder, model, allow_loss=True)
    return str(refusal.value), lost, checkpoint.digest(model)


@pytest.mark.slow
def test_too_little_room(run_ranks, tmp_path):
    saved = run_ranks(1, _full, tmp_path / "c")[0]
    total = sum(int(digest.split("-")[0]) for digest in saved.values())
    for message, lost, digest in run_ranks(2, _smaller, tmp_path / "c"):
        assert "allow_loss=True" in message
        kept = sum(int(value.split("-")[0]) for value in digest.values())
        assert lost > 0
        assert kept + lost == total
