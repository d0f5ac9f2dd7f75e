"""Shards hold ranges of owner buckets, in order; other programs can read them."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.saved_tables import filled, owner_of, shard_files
from torchrec_hkv.hash_table import files, owner_rank
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.shard_checks import verify_shard


def test_a_shard_holds_its_range(device_type, tmp_path):
    table = filled(device_type, 2000, 2500, eviction="lfu", state_dim=1)
    files.save(table._group, 0, tmp_path, shard_bytes=10_000, batch_bytes=3000)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    paths = shard_files(tmp_path)
    assert [path.name for path in paths] == [shard["file"] for shard in manifest["shards"]]
    assert len(paths) > 5
    last = 0
    for path, shard in zip(paths, manifest["shards"], strict=True):
        assert path.stat().st_size <= 10_000 + 1000  # and the header
        ids = load_file(path)["ids"].tolist()
        begin, end = shard["owner_begin"], shard["owner_end"]
        assert begin == last
        assert all(begin <= owner_of(id_) < end for id_ in ids)
        last = end
    assert last == 65536


def test_a_rank_reads_the_shards_of_its_range(tmp_path):
    table = filled("cpu", 2000, 2500)
    files.save(table._group, 0, tmp_path, shard_bytes=10_000)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    world, rank = 4, 2
    wanted = []
    for shard in manifest["shards"]:
        begin, end = shard["owner_begin"] * world, shard["owner_end"] * world
        if begin < (rank + 1) << 16 and end > rank << 16:
            wanted.append(load_file(tmp_path / shard["file"])["ids"])
    assert len(wanted) < len(manifest["shards"]) / 2
    ids = torch.cat(wanted)
    everything = torch.cat([part.ids for part in table.export()])
    owned = everything[owner_rank(everything, world) == rank]
    assert set(owned.tolist()) <= set(ids.tolist())


def test_the_safetensors_package_reads_them(device_type, tmp_path):
    table = filled(device_type, 300, 400, dim=3, eviction="customized", dtype=torch.bfloat16)
    table.save(tmp_path)
    (path,) = shard_files(tmp_path)
    with safe_open(path, "pt") as shard:
        assert shard.metadata()["owner_buckets"] == "0-65535"
        kinds = {name: shard.get_slice(name).get_dtype() for name in shard.keys()}  # noqa: SIM118
    assert kinds == {
        "ids": "I64", "slots": "I64", "scores": "U64", "last_steps": "U32", "rows": "BF16",
    }  # fmt: skip
    tensors = load_file(path)
    ids = tensors["ids"].to(device_type)
    assert torch.equal(table.find_slots(ids).cpu(), tensors["slots"])
    rows, found = table.find(ids)
    assert found.all()
    assert torch.equal(rows.cpu().view(torch.int16), tensors["rows"].view(torch.int16))


def test_ids_that_the_part_was_not_asked_for(tmp_path):
    """A shard of a sharded table must not hold ids of other ranks, whatever its manifest says."""
    filled("cpu").save(tmp_path)
    manifest = Manifest.read(tmp_path)
    for shard in manifest.shards:
        verify_shard(tmp_path, manifest, shard, 1 << 20, (0, 1 << 16))
        with pytest.raises(ValueError, match="ids are not in their own buckets"):
            verify_shard(tmp_path, manifest, shard, 1 << 20, (0, 1 << 15))
