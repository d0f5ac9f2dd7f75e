"""Whatever changes a table, a base and its deltas hold the table's content at each write."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.changing_tables import Changing, TableContents, Written, table_contents
from torchrec_hkv.hash_table import files
from torchrec_hkv.hash_table.files.changes import read_removed_ids
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.files.merge import merge_layers
from torchrec_hkv.hash_table.files.parts_load import PartsLoad
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.shard_files import ShardReader, Staging
from torchrec_hkv.hash_table.files.table_load import verify
from torchrec_hkv.hash_table.routing import owner_rank

#: Set TORCHREC_HKV_CHAINS=10000 for a stress run.
CHAINS = int(os.environ.get("TORCHREC_HKV_CHAINS", "60"))


def _ids_of(part: SavedPart) -> list[int]:
    """The ids that the files of the newest layer hold."""
    fields = [field for field in part.fields if field.name == "ids"]
    ids: list[int] = []
    for shard in part.manifest.shards:
        with ShardReader(part.folder / shard.file, part.fields, shard) as reader:
            for batch in reader.batches(Staging(fields, 64)):
                ids += batch["ids"].tolist()
    return ids


def _load(
    changing: Changing, table: int, part: SavedPart, owners: tuple[int, int]
) -> TableContents:
    group = changing.make()
    load = PartsLoad(group, table, table, [part], owners, batch_bytes=4096, allow_loss=True)
    load.check()
    with group.alone():
        group.set_clock(load.clock)
        load.run()
    return table_contents(group, table)


def _without_slots(entries: TableContents) -> dict[int, tuple]:
    return {id_: entry[1:] for id_, entry in entries.items()}


def _check_write(changing: Changing, written: Written, last: int, folder) -> None:
    layers = written.layers(last)
    for layer, manifest in layers:
        verify(layer, manifest, 4096)
    now = written.states[last]
    part = SavedPart(layers[0][0], (0, OWNERS), layers[0][1], tuple(layers[1:]))
    assert _load(changing, written.table, part, (0, OWNERS)) == now
    # Half of the owners, as with more ranks. They fit in the table.
    owners = (0, OWNERS // 2) if last % 2 else (OWNERS // 3, OWNERS)
    owned = owner_rank(torch.tensor(list(now), dtype=torch.int64), OWNERS).tolist()
    half = {
        id_: entry
        for owner, (id_, entry) in zip(owned, now.items(), strict=True)
        if owners[0] <= owner < owners[1]
    }
    loaded = _without_slots(_load(changing, written.table, part, owners))
    assert loaded.items() <= _without_slots(half).items()
    if len(half) <= 0.9 * changing.group.full_slots(written.table):
        assert len(loaded) == len(half)
    # A merged chain is a saved table.
    merged = merge_layers(layers, folder, 4096)
    verify(folder, merged, 4096)
    group = changing.make()
    files.load(group, written.table, folder)
    assert table_contents(group, written.table) == now
    assert group.clock == merged.clock


def _check_delta(written: Written, last: int, since: int) -> None:
    """The delta holds entries that changed or were looked up, slots whose ids left, and nothing
    else."""
    layers = written.layers(last)
    folder, manifest = layers[0]
    if manifest.changes is None:
        return
    before, now = written.states[last - 1], written.states[last]
    part = SavedPart(folder, (0, OWNERS), manifest, tuple(layers[1:]))
    for id_ in _ids_of(part):
        assert before.get(id_) != now[id_] or now[id_][1] >= since, id_
    left = {
        slot: id_
        for slots, ids in read_removed_ids(folder, manifest.changes, 7)
        for slot, id_ in zip(slots.tolist(), ids.tolist(), strict=True)
    }
    were = {entry[0]: id_ for id_, entry in before.items()}
    are = {entry[0]: id_ for id_, entry in now.items()}
    assert left == {slot: id_ for slot, id_ in were.items() if are.get(slot) != id_}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CHAINS))
def test_random_changes(device_type, tmp_path, seed):
    changing = Changing(seed, device_type, tmp_path)
    chains = [Written(changing.group, table, tmp_path / str(table)) for table in (0, 1)]
    opened = 0
    for write in range(5):
        since = changing.group.first_open_step
        for written in chains:
            written.write()
            if write:
                _check_delta(written, write, opened)
        opened = since
        for _ in range(changing.random.choice((0, 3, 20))):
            changing.change()
    for written in chains:
        for last in range(5):
            _check_write(changing, written, last, tmp_path / f"merged-{written.table}-{last}")
