"""If ranks get different arguments, all of them refuse the call, and nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_models import evaluate, make_tables, model_contents, train
from torchrec_hkv import checkpoint

DIFFERENT = "^The ranks were given different arguments: "


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _refused(rank, world_size, device, folder):
    """Makes all calls that must fail. Returns errors, and whether anything changed."""
    model = make_tables(world_size, device, "row_wise")
    other = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(2))
    train(other, rank, device, range(2, 4))
    optimizer = model.fused_optimizer
    checkpoint.save(folder / "one", model, optimizer)
    checkpoint.save(folder / "two", other, other.fused_optimizer)
    before = model_contents(model, "adam"), evaluate(model, device).tolist(), _tree(folder)
    owned = "one" if rank == 0 else "two"
    is_last = rank == world_size - 1
    rows = [(torch.tensor([7]), torch.ones(1, 12))]
    calls = {
        "save to other folders": lambda: checkpoint.save(folder / f"new-{owned}", model),
        "save over others": lambda: checkpoint.save(folder / owned, model),
        "save an optimizer": lambda: checkpoint.save(
            folder / "one", model, None if is_last else optimizer
        ),
        "load others": lambda: checkpoint.load(folder / owned, model, optimizer),
        "load an optimizer": lambda: checkpoint.load(
            folder / "one", model, optimizer if is_last else None
        ),
        "load with loss": lambda: checkpoint.load(folder / "one", model, allow_loss=is_last),
        "load in 0 threads": lambda: checkpoint.load(folder / "one", model, threads=1 - is_last),
        "save in 0 threads": lambda: checkpoint.save(folder / "one", model, threads=1 - is_last),
        "save a dict": lambda: checkpoint.save(folder / "one", model, {} if is_last else optimizer),
        "import others": lambda: checkpoint.import_rows(model, "lru" if is_last else "lfu", rows),
        "import with loss": lambda: checkpoint.import_rows(model, "lru", rows, allow_loss=is_last),
        "import none": lambda: checkpoint.import_rows(model, "none" if is_last else "lru", rows),
        "export others": lambda: list(checkpoint.export_rows(model, "lru" if is_last else "lfu")),
    }
    messages = {}
    for what, call in calls.items():
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 (compared below)
            call()
        messages[what] = str(refusal.value)
    after = model_contents(model, "adam"), evaluate(model, device).tolist(), _tree(folder)
    return messages, before == after


@pytest.mark.parametrize("world_size", [2, 3])
def test_different_arguments(run_ranks, tmp_path, world_size):
    last = world_size - 1
    expected = {
        "save to other folders": f"path is '{tmp_path}/new-one' on rank 0 and "
        f"'{tmp_path}/new-two' on rank 1.",
        "save over others": f"path is '{tmp_path}/one' on rank 0 and '{tmp_path}/two' on rank 1.",
        "save an optimizer": f"optimizer is 'given' on rank 0 and 'None' on rank {last}.",
        "load others": f"path is '{tmp_path}/one' on rank 0 and '{tmp_path}/two' on rank 1.",
        "load an optimizer": f"optimizer is 'None' on rank 0 and 'given' on rank {last}.",
        "load with loss": f"allow_loss is False on rank 0 and True on rank {last}.",
        "load in 0 threads": "threads is 0, but must be an integer, at least 1.",
        "save in 0 threads": "threads is 0, but must be an integer, at least 1.",
        "save a dict": "The optimizer is a dict: it must be a KeyedOptimizer",
        "import others": "table is 'ebc.embedding_bags.lfu' on rank 0 and "
        f"'ebc.embedding_bags.lru' on rank {last}.",
        "import with loss": f"allow_loss is False on rank 0 and True on rank {last}.",
        "import none": "The model has no table 'none'",
        "export others": "table is 'ebc.embedding_bags.lfu' on rank 0 and "
        f"'ebc.embedding_bags.lru' on rank {last}.",
    }
    for messages, is_unchanged in run_ranks(world_size, _refused, tmp_path):
        assert is_unchanged
        assert messages.keys() == expected.keys()
        for what, message in messages.items():
            assert expected[what] in message
            is_difference = " on rank 0 " in expected[what]
            assert message.startswith(DIFFERENT[1:]) == is_difference


def _same(rank, world_size, device, folder):
    """Ranks name the same folder by a link and by a relative path."""
    os.chdir(folder)
    model, fresh = (make_tables(world_size, device, "row_wise") for _ in range(2))
    train(model, rank, device, range(2))
    checkpoint.save(folder / "one" if rank == 0 else Path("link") / "one", model)
    checkpoint.load("one" if rank == 0 else folder / "link" / "one", fresh)
    return checkpoint.digest(model), checkpoint.digest(fresh)


def test_one_folder_by_several_paths(run_ranks, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    for saved, loaded in run_ranks(2, _same, tmp_path):
        assert saved == loaded
    assert sorted(os.listdir(tmp_path)) == ["link", "one"]
