"""A load refuses a folder of another save or of another shard. All ranks name the folder, and
nothing changes."""

from __future__ import annotations

import shutil

import pytest

from tests.support.checkpoint_models import make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency

ADMISSION = MinFrequency(2, entries=256)
TABLE = "tables/ebc.embedding_bags.lfu"


def _save(rank, world_size, device, folder, seed):
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    train(model, rank, device, range(seed, seed + 3))
    checkpoint.save(folder, model)


def _load(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    train(model, rank, device, range(50, 52))
    before = model_contents(model, "adam")
    with pytest.raises(ValueError, match="is not what the checkpoint was saved with") as refusal:
        checkpoint.load(folder, model)
    assert model_contents(model, "adam") == before
    return str(refusal.value)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("source", ["older", "other shard", "other checkpoint at once"])
def test_another_folder_in_its_place(run_ranks, tmp_path, ranks, source):
    run_ranks(2, _save, tmp_path / "old", 0)
    run_ranks(2, _save, tmp_path / "new", 10)
    shard = tmp_path / "new" / TABLE / "00001"
    shutil.rmtree(shard)
    if source == "other shard":
        shutil.copytree(tmp_path / "new" / TABLE / "00000", shard)
    else:
        shutil.copytree(tmp_path / "old" / TABLE / "00001", shard)
    if source == "other checkpoint at once":  # the same steps: the saves differ in nothing else
        shutil.rmtree(tmp_path / "old")
        run_ranks(2, _save, tmp_path / "old", 10)
        shutil.rmtree(shard)
        shutil.copytree(tmp_path / "old" / TABLE / "00001", shard)
    messages = run_ranks(ranks, _load, tmp_path / "new")
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{shard} is not what the checkpoint was saved with")
    said = "its checksum is" if source == "other shard" else "it is of save"
    assert said in messages[0]
